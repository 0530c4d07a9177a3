"""Who scales the gradients in each phase; all of them measure, and name layers."""

from collections.abc import Collection, Mapping

from torch import nn

from steadygrad.scale import AutoScale, LayerScale, LayerwiseGradScaler
from steadygrad.scale.layers import parts_of

__all__ = ["follow_one_scale", "one_scale", "proposed_scales", "searched_scales"]

# As torch.amp.GradScaler begins, and as it moves.
FIRST_SCALE, BACKOFF, INTERVAL = 2.0**16, 0.5, 2000


def one_scale(model: nn.Module) -> LayerwiseGradScaler:
    """One loss scale for all, as ``torch.amp.GradScaler``; the boundaries only look.

    :func:`follow_one_scale` is to be called after each update.
    """
    fixed = LayerScale(1.0, growth_factor=1.0, backoff_factor=1.0)
    layers = dict.fromkeys(parts_of(model), fixed)
    scaler = LayerwiseGradScaler(
        model, layers, growth_interval=INTERVAL, backoff_factor=BACKOFF, init_scale=FIRST_SCALE
    )
    scaler.measure()
    return scaler


def follow_one_scale(scaler: LayerwiseGradScaler, own: Collection[str] = ()) -> None:
    """Backs the loss's scale off for an overflow in a layer that has no scale of its own.

    Args:
        scaler: After its update.
        own: Layers that have one, and back off by themselves.
    """
    culprits = scaler.culprits()
    if "" not in culprits and any(name not in own for name in culprits):
        scaler.update(scaler.get_scale() * BACKOFF)


def searched_scales(model: nn.Module) -> LayerwiseGradScaler:
    """A scale for each layer that follows what is measured, from 1 on."""
    scaler = LayerwiseGradScaler(model, AutoScale(scale=1.0, every=1))
    scaler.measure()
    return scaler


def proposed_scales(
    model: nn.Module, loss_scale: float, layer_scales: Mapping[str, float]
) -> LayerwiseGradScaler:
    """The scales that are proposed; the other layers are looked at as well.

    Args:
        model: The model.
        loss_scale: The loss's.
        layer_scales: Those of the layers that have one of their own.
    """
    looked_at = LayerScale(1.0, growth_factor=1.0, backoff_factor=1.0)
    layers = {name: layer_scales.get(name, looked_at) for name in parts_of(model)}
    scaler = LayerwiseGradScaler(
        model, layers, growth_interval=INTERVAL, backoff_factor=BACKOFF, init_scale=loss_scale
    )
    scaler.measure()
    return scaler
