"""Choice of the modules that are scaled: by patterns of names, or the model's child modules."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from steadygrad._checks import InputError
from steadygrad._names import own_name, plain_name
from steadygrad.scale.layers import Layers, module_paths
from steadygrad.scale.options import AutoScale, LayerScale

__all__ = ["choose_layers", "parts_of"]


def choose_layers(
    model: nn.Module,
    layer_scales: dict[str, LayerScale] | AutoScale,
    rule: LayerScale,
    scales_loss: bool,
) -> tuple[Layers, list[LayerScale]]:
    """Makes the layers, and for each of them its first scale and growth rule.

    ``rule`` is the scaler's own; its scale is the loss's. ``scales_loss`` tells whether that moves.
    """
    loss_rule = rule if scales_loss else replace(rule, growth_factor=1.0, backoff_factor=1.0)
    if isinstance(layer_scales, AutoScale):
        # Measurements take the place of growth.
        loss_rule = rule = replace(rule, growth_factor=1.0)
        patterns = layer_scales.layers
        if patterns is None:
            patterns = tuple(parts_of(model))
            # A single layer has nothing inside that could be chosen.
            if len(patterns) < 2 and any(True for _ in model.children()):
                warnings.warn(
                    "Expected a model made of several parts, for automatic scales. Found "
                    f"{len(patterns)} in {type(model).__name__} that can have a scale of its own. "
                    "Remedy: AutoScale(layers=...) with patterns of modules inside.",
                    stacklevel=3,
                )
        layer_scales = dict.fromkeys(patterns, LayerScale(layer_scales.scale))
    chosen = _matching(model, layer_scales)
    layers = Layers(model, [(name, module) for name, module, _ in chosen])
    return layers, [loss_rule, *(layer_scales[p].with_defaults(rule) for _, _, p in chosen)]


def _matching(model: nn.Module, patterns: Iterable[str]) -> list[tuple[str, nn.Module, str]]:
    """Lists matching modules: name, module, and the last pattern that matches."""
    named = _named_modules(model)
    chosen: dict[str, str] = {}
    for pattern in patterns:
        matching = [
            name for name in named if name and _matches(name.split("."), pattern.split("."))
        ]
        if not matching:
            names = [name for name in named if name]
            near = ", ".join(map(repr, get_close_matches(pattern, names, n=3, cutoff=0.4)))
            hint = f"did you mean {near}?" if near else "see model.named_modules()."
            raise InputError(
                "Parameter `layer_scales` should have patterns that match modules. Found "
                f"{pattern!r}, which matches none of {len(names)}. Remedy: {hint}"
            )
        known = {id(named[name]): name for name in chosen}
        chosen |= {known.get(id(named[name]), name): pattern for name in matching}
    order = {id(module): i for i, module in enumerate(named.values())}
    entries = [(name, named[name], pattern) for name, pattern in chosen.items()]
    return sorted(entries, key=lambda entry: order[id(entry[1])])


def _matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Compares part by part: ``*`` is one part or a piece of it, ``**`` any number of parts."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_matches(parts[i:], wanted[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])


def parts_of(model: nn.Module) -> list[str]:
    """Names the parts of a model that get automatic scales: its child modules.

    These modules are replaced by their own children: a ``ModuleList``, a ``ModuleDict``, an
    ``nn.Sequential``, any module without a ``forward``, an only child with parameters, a module
    that holds a ``ModuleList`` of blocks and most of the parameters, as Hugging Face's ``bert``,
    and one that shares a parameter with modules outside of it. One without children is left out.
    """
    named = _named_modules(model)
    paths = [path for _, path in module_paths(model)]
    parts = _children(named, paths, "")
    most = sum(p.numel() for p in model.parameters()) / 2

    def trained(names: Iterable[str]) -> list[str]:
        return [name for name in names if any(p.numel() for p in named[name].parameters())]

    while True:
        first: dict[int, str] = {}
        for name in parts:
            first.setdefault(id(named[name]), name)
        parts = list(first.values())
        own = trained(parts)
        hidden = (name for name in own if own == [name] or _holds_blocks(named[name], most))
        opened = {name: _children(named, paths, name) for name in hidden}
        if not any(trained(inner) for inner in opened.values()):
            return parts
        parts = [inner for name in parts for inner in opened.get(name) or [name]]


def _children(
    named: Mapping[str, nn.Module], paths: Sequence[list[nn.Module]], name: str
) -> list[str]:
    """Lists children of a module that can be parts; others are replaced by their children."""
    parts: list[str] = []
    for part, child in named[name]._modules.items():
        full = plain_name(f"{name}.{part}" if name else part)
        if child is None or full not in named or full == name:
            continue
        no_forward = type(named[full]).forward is nn.Module.forward
        container = no_forward or isinstance(named[full], nn.Sequential)
        opened = container or _shares_parameters(named[full], paths)
        parts += _children(named, paths, full) if opened else [full]
    return parts


def _holds_blocks(module: nn.Module, most: float) -> bool:
    """Tells whether a module hides a list of blocks, and more than ``most`` parameters."""
    lists = (m for m in module.modules() if isinstance(m, nn.ModuleList))
    return any(len(m) > 1 for m in lists) and sum(p.numel() for p in module.parameters()) > most


def _shares_parameters(module: nn.Module, paths: Iterable[list[nn.Module]]) -> bool:
    """Tells whether a parameter of the module is also in a module outside of it."""
    own = {id(parameter) for parameter in module.parameters()}
    outside = (path[-1] for path in paths if not any(m is module for m in path))
    return any(id(p) in own for other in outside for p in other._parameters.values())


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Maps every plain name to its module; where wrapper and content share one, to the content."""
    return {own_name(name, model): path[-1] for name, path in module_paths(model)}
