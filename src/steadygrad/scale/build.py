"""From what the user handed in to layers, scales and rules."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.scale.boundary import Boundary
from steadygrad.scale.gradients import Gradients
from steadygrad.scale.layers import Layers, choose, parts_of
from steadygrad.scale.options import (
    AutoScale,
    LayerScale,
    Rule,
    check_layer_scales,
    check_scale,
)
from steadygrad.scale.table import ScaleTable

__all__ = ["Setup", "bound", "set_up", "uncalled"]


@dataclass(frozen=True)
class Setup:
    """What a scaler works with."""

    layers: Layers
    table: ScaleTable
    auto: AutoScale | None


def set_up(model: nn.Module, layer_scales: Any, rule: Rule, init_scale: float | None) -> Setup:
    """Checks the arguments, finds the modules and makes the table of scales.

    Args:
        model: The model.
        layer_scales: As the user said.
        rule: The scaler's.
        init_scale: The loss's scale, as the user said.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"Parameter `model` should be a module. Found {type(model).__name__}. Remedy: hand in "
            "the model first, then the scales."
        )
    wanted = check_layer_scales(layer_scales)
    auto = wanted if isinstance(wanted, AutoScale) else None
    if init_scale is not None:
        check_scale("init_scale", init_scale)
    if isinstance(wanted, AutoScale):
        # Measuring takes the place of growing.
        rule = replace(rule, growth_factor=1.0)
        patterns = _parts(model) if wanted.layers is None else list(wanted.layers)
        wanted = {pattern: LayerScale(wanted.scale) for pattern in patterns}
    layers, chosen_by = choose(model, wanted)
    unscaled_loss = init_scale is None and auto is None
    loss_rule = replace(rule, growth_factor=1.0, backoff_factor=1.0) if unscaled_loss else rule
    chosen = [wanted[pattern] for pattern in chosen_by]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    table = ScaleTable(
        layers,
        [1.0 if init_scale is None else init_scale, *(layer.scale for layer in chosen)],
        [loss_rule, *(layer.rule(rule) for layer in chosen)],
        device,
    )
    return Setup(layers, table, auto)


def _parts(model: nn.Module) -> list[str]:
    found = parts_of(model)
    # A single layer has nothing inside that could be chosen.
    if len(found) < 2 and any(True for _ in model.children()):
        warnings.warn(
            f"Expected a model made of several parts, for automatic scales. Found {len(found)} in "
            f"{type(model).__name__} that can have a scale of its own. Remedy: "
            "AutoScale(layers=...) with patterns of modules inside.",
            stacklevel=4,
        )
    return found


def bound(layers: Layers, table: ScaleTable) -> dict[int, Boundary]:
    """Puts a boundary around each chosen module; by the layers' indices."""
    boundaries = {}
    for index, layer in enumerate(layers.layers):
        if layer.module is not None:
            boundaries[index] = Boundary(index, layer.parent, table)
            boundaries[index].attach(layer.module)
    return boundaries


def uncalled(layers: Layers, called: Mapping[int, bool], gradients: Gradients) -> InputError | None:
    """The error for a layer that was never called although its parameters have gradients.

    Its boundaries were not crossed then, and to divide would be wrong. Waits for the device only
    where a layer is under suspicion; wrappers give zeros to layers that took no part.
    """
    for index, tensors in gradients.items():
        for i in layers.chain(index):
            if not called.get(i, True) and any(bool(tensor.any()) for tensor in tensors):
                return InputError(
                    f"Expected chosen modules to be called. Found {layers.layers[i].name!r} never "
                    "called since the scaler was built, though its parameters have gradients. "
                    "Remedy: choose the module that uses them; in compiled code, call "
                    "torch.compiler.reset() when the scaler is built, for hooks that come later "
                    "than the compiler are not seen."
                )
    return None
