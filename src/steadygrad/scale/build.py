"""From what the user handed in to layers, scales and rules."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.scale.boundary import Boundary
from steadygrad.scale.layers import Layers, choose, parts_of
from steadygrad.scale.options import (
    AutoScale,
    LayerScale,
    Rule,
    check_layer_scales,
    check_scale,
)
from steadygrad.scale.table import ScaleTable

__all__ = ["Setup", "set_up", "uncalled"]


@dataclass(frozen=True)
class Setup:
    """What a scaler works with."""

    layers: Layers
    table: ScaleTable
    auto: AutoScale | None


def set_up(
    model: nn.Module, layer_scales: Any, rule: Mapping[str, Any], init_scale: float | None
) -> Setup:
    """Checks the arguments, finds the modules and makes the table of scales.

    Args:
        model: The model.
        layer_scales: As the user said.
        rule: The fields of the scaler's :class:`Rule`.
        init_scale: The loss's scale, as the user said.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"Parameter `model` should be a module. Found {type(model).__name__}. Remedy: hand in "
            "the model first, then the scales."
        )
    default = Rule(**rule)
    fixed = replace(default, growth_factor=1.0, backoff_factor=1.0)
    wanted = check_layer_scales(layer_scales)
    auto = wanted if isinstance(wanted, AutoScale) else None
    if init_scale is not None:
        check_scale("init_scale", init_scale)
    if auto is not None:
        # Measuring takes the place of growing.
        default = replace(default, growth_factor=1.0)
        patterns = parts_of(model) if auto.layers is None else list(auto.layers)
        wanted = {pattern: LayerScale(auto.scale) for pattern in patterns}
    assert isinstance(wanted, dict)
    layers, chosen_by = choose(model, wanted)
    loss_rule = default if init_scale is not None or auto is not None else fixed
    chosen = [wanted[pattern] for pattern in chosen_by]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    table = ScaleTable(
        layers,
        [1.0 if init_scale is None else init_scale, *(layer.scale for layer in chosen)],
        [loss_rule, *(layer.rule(default) for layer in chosen)],
        device,
    )
    return Setup(layers, table, auto)


def uncalled(
    layers: Layers, boundaries: Mapping[int, Boundary], with_gradients: Iterable[int]
) -> InputError | None:
    """The error for a layer whose parameters have gradients although it was never called.

    Its boundaries were not crossed then, and to divide would be wrong. Inside compiled code calls
    cannot be seen: where there may be some, nothing is said.
    """
    if not any(boundary.called for boundary in boundaries.values()):
        return None
    for index in with_gradients:
        for i in layers.chain(index):
            if i and not boundaries[i].called and not _compiled(layers.model):
                return InputError(
                    f"Expected chosen modules to be called. Found {layers.layers[i].name!r} not "
                    "called since the last update(), though its parameters have gradients: they "
                    "are used from outside. Remedy: choose the module that uses them."
                )
    return None


def _compiled(model: nn.Module) -> bool:
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )
