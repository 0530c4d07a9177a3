"""Choice of the modules that are scaled: by patterns of names, or the model's child modules."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from steadygrad._checks import InputError
from steadygrad._names import plain_name
from steadygrad.scale.layers import LOSS, Layer, Layers, module_paths
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
        patterns, scale = layer_scales.layers, LayerScale(layer_scales.scale)
        layer_scales = dict.fromkeys(_parts(model) if patterns is None else patterns, scale)
    entries = _matching(model, layer_scales)
    for name, module, _ in entries:
        if not _has_forward(module):
            items = ", or choose its items, by " + repr(f"{name}.*") if module._modules else ""
            raise InputError(
                f"Expected chosen modules that are called. Found {name!r}, a "
                f"{type(module).__name__} without a forward. Remedy: do not choose it{items}."
            )
    layers = Layers(model, _nested(model, [(name, module) for name, module, _ in entries]))
    return layers, [loss_rule, *(layer_scales[p].with_defaults(rule) for _, _, p in entries)]


def _matching(model: nn.Module, patterns: Iterable[str]) -> list[tuple[str, nn.Module, str]]:
    """Lists matching modules: name, module, and the last pattern that matches."""
    named = _named_modules(model)
    chosen: dict[int, tuple[str, nn.Module, str]] = {}
    for pattern in patterns:
        matching = [(n, m) for n, m in named.items() if n and _matches(n.split("."), pattern)]
        if not matching:
            raise _unmatched(pattern, [name for name in named if name])
        for name, module in matching:
            first = chosen[id(module)][0] if id(module) in chosen else name
            chosen[id(module)] = (first, module, pattern)
    order = {id(module): i for i, module in enumerate(named.values())}
    return sorted(chosen.values(), key=lambda entry: order[id(entry[1])])


def _nested(model: nn.Module, chosen: list[tuple[str, nn.Module]]) -> list[Layer]:
    """Makes layers of chosen modules, each with its parent."""
    index = {id(module): i for i, (_, module) in enumerate(chosen, start=1)}
    parents: dict[int, int] = {}
    for _, path in module_paths(model):
        *before, last = path
        if id(last) in index:
            parent = next((index[id(m)] for m in reversed(before) if id(m) in index), LOSS)
            first = parents.setdefault(index[id(last)], parent)
            if first != parent and any(True for _ in last.parameters()):
                name = chosen[index[id(last)] - 1][0]
                raise InputError(
                    f"Expected every chosen module in one place. Found {name!r} both inside and "
                    "outside of another chosen module: its parameters would be under two scales. "
                    "Remedy: leave one of the two out."
                )
    layers = [Layer(name, module, parents[i]) for i, (name, module) in enumerate(chosen, start=1)]
    return [Layer("", model), *layers]


def _matches(parts: Sequence[str], pattern: str) -> bool:
    """Compares part by part: ``*`` is one part or a piece of it, ``**`` any number of parts."""

    def match(left: Sequence[str], wanted: Sequence[str]) -> bool:
        if not wanted:
            return not left
        if wanted[0] == "**":
            return any(match(left[i:], wanted[1:]) for i in range(len(left) + 1))
        return bool(left) and fnmatchcase(left[0], wanted[0]) and match(left[1:], wanted[1:])

    return match(parts, pattern.split("."))


def _unmatched(pattern: str, names: list[str]) -> InputError:
    near = get_close_matches(pattern, names, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else "see model.named_modules()."
    return InputError(
        f"Parameter `layer_scales` should have patterns that match modules. Found {pattern!r}, "
        f"which matches none of {len(names)}. Remedy: {hint}"
    )


def parts_of(model: nn.Module) -> list[str]:
    """Names the parts of a model that get automatic scales: its child modules.

    These modules are replaced by their own children: a ``ModuleList``, a ``ModuleDict``, an
    ``nn.Sequential``, any module without a ``forward``, an only child with parameters, a module
    that holds a ``ModuleList`` of blocks and most of the parameters, as Hugging Face's ``bert``,
    and one that shares a parameter with modules outside of it. One without children is left out.
    """
    named = _named_modules(model)
    paths = [path for _, path in module_paths(model)]
    parts = _first_names(named, _children(named, paths, ""))

    def trained(names: Iterable[str]) -> list[str]:
        return [name for name in names if any(p.numel() for p in named[name].parameters())]

    most = sum(p.numel() for p in model.parameters()) / 2
    while True:
        own = trained(parts)
        hidden = (name for name in own if own == [name] or _holds_blocks(named[name], most))
        opened = {name: _children(named, paths, name) for name in hidden}
        if not any(trained(inner) for inner in opened.values()):
            return parts
        parts = _first_names(named, [n for name in parts for n in opened.get(name) or [name]])


def _children(
    named: Mapping[str, nn.Module], paths: Sequence[list[nn.Module]], name: str
) -> list[str]:
    """Lists children of a module that can be parts; others are replaced by their children."""
    parts: list[str] = []
    for part, child in named[name]._modules.items():
        full = plain_name(f"{name}.{part}" if name else part)
        if child is None or full not in named or full == name:
            continue
        module = named[full]
        container = isinstance(module, nn.Sequential) or not _has_forward(module)
        whole = not container and not _shares_parameters(module, paths)
        parts += [full] if whole else _children(named, paths, full)
    return parts


def _holds_blocks(module: nn.Module, most: float) -> bool:
    """Tells whether a module hides a list of blocks, and more than ``most`` parameters."""
    lists = (m for m in module.modules() if isinstance(m, nn.ModuleList))
    return any(len(m) > 1 for m in lists) and sum(p.numel() for p in module.parameters()) > most


def _first_names(named: Mapping[str, nn.Module], names: Iterable[str]) -> list[str]:
    """Keeps the first of several names of one module."""
    first: dict[int, str] = {}
    for name in names:
        first.setdefault(id(named[name]), name)
    return list(first.values())


def _shares_parameters(module: nn.Module, paths: Iterable[list[nn.Module]]) -> bool:
    """Tells whether a parameter of the module is also in a module outside of it."""
    own = {id(parameter) for parameter in module.parameters()}
    outside = (path[-1] for path in paths if not any(m is module for m in path))
    return any(id(p) in own for other in outside for p in other._parameters.values())


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _parts(model: nn.Module) -> list[str]:
    """Names the parts of a model, and warns where there is nothing to tell apart."""
    parts = parts_of(model)
    # A single layer has nothing inside that could be chosen.
    if len(parts) < 2 and any(True for _ in model.children()):
        warnings.warn(
            f"Expected a model made of several parts, for automatic scales. Found {len(parts)} in "
            f"{type(model).__name__} that can have a scale of its own. Remedy: "
            "AutoScale(layers=...) with patterns of modules inside.",
            stacklevel=4,
        )
    return parts


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Maps every plain name to its module; where wrapper and content share one, to the content."""
    inner: Any = model
    while isinstance(inner, nn.parallel.DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    return {plain_name(name): path[-1] for name, path in module_paths(inner)}
