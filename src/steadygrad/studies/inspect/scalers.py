"""The gradient scaler of each phase, which names layers, and whose fault an overflow is."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.scale import AutoScale, LayerScale, LayerwiseGradScaler
from steadygrad.scale.layers import automatic_layers
from steadygrad.studies.order import generators_kept
from steadygrad.studies.trainer import Trainer

# As torch.amp.GradScaler begins, and as it moves.
FIRST_SCALE, BACKOFF, INTERVAL = 2.0**16, 0.5, 2000
# Below it float32 has too little room. A loss that changes with every call may lead there: the
# repeated step is another one, and so is finite.
LEAST_SCALE = 2.0**-100
# Gradients that overflow only because they are large are finite at this scale.
PROBE_SCALE = 2.0**-60


def given_scales(
    model: nn.Module, loss_scale: float = FIRST_SCALE, layer_scales: Mapping[str, float] = {}
) -> LayerwiseGradScaler:
    """A loss scale, and scales of some layers; the other layers are measured only.

    Call :func:`follow_one_scale` after each update: without layer scales the loss scale then moves
    as that of ``torch.amp.GradScaler``.
    """
    measured = LayerScale(1.0, fixed=True)
    layers = {name: layer_scales.get(name, measured) for name in automatic_layers(model)}
    scaler = LayerwiseGradScaler(
        model, layers, growth_interval=INTERVAL, backoff_factor=BACKOFF, init_scale=loss_scale
    )
    scaler.measure()
    return scaler


def searched_scales(model: nn.Module) -> LayerwiseGradScaler:
    """A scale for each layer that starts at 1 and follows the measured gradients."""
    scaler = LayerwiseGradScaler(model, AutoScale(scale=1.0, every=1))
    scaler.measure()
    return scaler


def follow_one_scale(
    scaler: LayerwiseGradScaler,
    culprits: Collection[str],
    before: Mapping[str, Any],
    layer_scales: Collection[str],
    nonfinite: Collection[str],
) -> None:
    """Backs the loss scale off for an overflow in a layer that has no scale of its own.

    Its growth then begins anew, as in torch's scaler. A layer of ``layer_scales`` has backed off by
    itself. An overflow in one that is ``nonfinite`` at any scale moves no scale, nor does the step
    count for growth. ``before`` is the scaler's state before its update.
    """
    state = scaler.state_dict()
    layers, old = state["layers"], before["layers"]
    for name in ("", *nonfinite) if nonfinite else ():
        layers[name].update({key: old[name][key] for key in ("scale", "growth_tracker")})
    if not {*culprits} <= {*layer_scales, *nonfinite}:
        scale = max(LEAST_SCALE, old[""]["scale"] * BACKOFF)
        layers[""].update(scale=scale, growth_tracker=0)
    scaler.load_state_dict(state)


def nonfinite_at_any_scale(
    trainer: Trainer, indices: Tensor, restore_rng: Callable[[], None]
) -> list[str]:
    """Culprits of the step that was just skipped that are not finite whatever the scale.

    It is repeated with a loss scale of 2**-60, no layer scales, and the random numbers that
    ``restore_rng`` brings back. Weights, buffers, scales and random numbers stay as they were.
    """
    scaler, state = trainer.scaler, trainer.scaler.state_dict()
    culprits = scaler.culprits()
    buffers = [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
    rows = state["layers"].items()
    probe = {name: {**row, "scale": 1.0 if name else PROBE_SCALE} for name, row in rows}
    scaler.load_state_dict({**state, "layers": probe})
    with generators_kept(trainer.context.device):
        restore_rng()
        trainer.backward(indices)
    scaler.unscale_(trainer.optimizer)
    scaler.update()
    again = scaler.culprits()
    trainer.optimizer.zero_grad()
    scaler.load_state_dict(state)
    with torch.no_grad():
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return [name for name in culprits if name in again]
