"""Modules that are scaled: their first scales, their nesting, and the layer of each parameter."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from steadygrad._checks import InputError, check_count, check_number, check_type
from steadygrad._names import own_name, plain_name

# Index of the loss, the layer around all others.
LOSS = 0
LARGEST_SCALE = 1 / torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class LayerScale:
    """Sets a layer's first scale, and whether it stays ``fixed``, not moved by the rule."""

    scale: float
    fixed: bool = False


@dataclass(frozen=True)
class AutoScale:
    """Scales that are found and followed from measured exponents, by powers of two.

    A scale is lowered when the largest value comes within the headroom, and raised when too many
    values are subnormal. A layer where an infinity arose backs off at once.

    Attributes:
        layers: Patterns of the modules to choose. Default: those of :func:`automatic_layers`.
        scale: Each layer's first scale. Any will do; one that is a power of two rounds nothing.
        underflow: Accepted share of subnormal values among those that are not zero.
        headroom: Binades to be left free between the largest value and float16's overflow.
        every: Number of steps of which one is measured, after the warm-up; it takes longer.
        warmup: Steps at the beginning that are all measured.
    """

    layers: tuple[str, ...] | None = None
    scale: float = 1.0
    underflow: float = 0.01
    headroom: int = 4
    every: int = 25
    warmup: int = 25

    def __post_init__(self) -> None:
        check_scale("AutoScale.scale", self.scale)
        check_number("AutoScale.underflow", self.underflow, low=0, high=1)
        check_count("AutoScale.headroom", self.headroom, low=0)
        check_count("AutoScale.every", self.every)
        check_count("AutoScale.warmup", self.warmup, low=0)


def check_scale(name: str, scale: Any) -> float:
    """Returns a scale if float32 can hold both it and its reciprocal."""
    return check_number(name, scale, low=0, high=LARGEST_SCALE, low_open=True)


class Layers:
    """Lists the chosen modules of a model by name, after the loss, which is layer 0.

    Attributes:
        names: Names of the layers; empty for the loss.
        chains: For each layer the indices of the layers around it and its own, from the loss on.
        version: Counts how often parameters of the model became others.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
        self.model, self.names, self.version = model, ["", *chosen], 0
        self._index = {id(module): i for i, module in enumerate(chosen.values(), start=1)}
        self.chains: list[tuple[int, ...]] = [(LOSS,)] * len(self.names)
        for _, path in reversed([*module_paths(model)]):
            chain = self._chain(path)
            if id(path[-1]) in self._index:
                self.chains[chain[-1]] = chain
        # Module and name of each parameter, so that an exchanged one is noticed.
        self._slots: list[tuple[nn.Module, str, weakref.ref[nn.Parameter]]] = []
        self._layer_of = WeakTensorKeyDictionary()
        self._look()

    def _chain(self, path: Sequence[nn.Module]) -> tuple[int, ...]:
        return (LOSS, *(self._index[id(module)] for module in path if id(module) in self._index))

    def layers_of(self, parameters: Sequence[Tensor]) -> list[int | None]:
        """Finds the innermost layers around parameters; None for parameters of other models.

        Wrappers replace parameters. One that was replaced and still exists keeps its layer, as
        FSDP2's shards do while whole ones replace them.
        """
        current = all(m._parameters.get(name) is old() for m, name, old in self._slots)
        if not current or any(parameter not in self._layer_of for parameter in parameters):
            self._look()
        return [self._layer_of.get(parameter) for parameter in parameters]

    def _look(self) -> None:
        """Finds the layer of every parameter that the model has now."""
        first: dict[int, tuple[tuple[int, ...], str]] = {}
        self._slots, changed = [], False
        for name, path in module_paths(self.model):
            chain = self._chain(path)
            for leaf, parameter in path[-1]._parameters.items():
                if parameter is None:
                    continue
                full = plain_name(f"{name}.{leaf}" if name else leaf)
                other, alias = first.setdefault(id(parameter), (chain, full))
                if other != chain:
                    raise InputError(
                        f"Expected every parameter under one scale. Found {alias!r}, in "
                        f"{self.described(other)}, which is also {full!r}, in "
                        f"{self.described(chain)}. Remedy: choose neither, or a module around both."
                    )
                changed |= self._layer_of.get(parameter) != chain[-1]
                self._layer_of[parameter] = chain[-1]
                self._slots.append((path[-1], leaf, weakref.ref(parameter)))
        self.version += changed

    def described(self, chain: Sequence[int]) -> str:
        """Names the layers of a chain in an error."""
        names = [repr(self.names[index]) for index in chain if index != LOSS]
        return f"the chosen {' and '.join(names)}" if names else "no chosen module"


def choose_layers(
    model: nn.Module, layer_scales: Any
) -> tuple[dict[str, nn.Module], list[LayerScale]]:
    """Finds the chosen modules by name, in the model's order, and the scale of each."""
    if isinstance(layer_scales, AutoScale):
        patterns = layer_scales.layers
        names = automatic_layers(model) if patterns is None else patterns
        layer_scales = dict.fromkeys(names, layer_scales.scale)
    remedy = "{'blocks.*': 2**8}, 'auto' or an AutoScale"
    check_type("layer_scales", layer_scales, Mapping, remedy)  # type: ignore[type-abstract]
    modules = _named_modules(model)
    chosen: dict[int, tuple[str, LayerScale]] = {}
    for pattern, value in layer_scales.items():
        layer = value if isinstance(value, LayerScale) else LayerScale(value)
        check_scale(f"layer_scales[{pattern!r}]", layer.scale)
        wanted = str(pattern).split(".")
        matching = [name for name in modules if name and _matches(name.split("."), wanted)]
        if not matching:
            raise InputError(
                "Parameter `layer_scales` should have patterns that match modules. Found "
                f"{pattern!r}. Remedy: see model.named_modules()."
            )
        for name in matching:
            # A module has one name, its first, and of several scales the last.
            first, _ = chosen.get(id(modules[name]), (name, layer))
            chosen[id(modules[name])] = first, layer
    order = {id(module): None for module in modules.values()}
    entries = [chosen[key] for key in order if key in chosen]
    return {name: modules[name] for name, _ in entries}, [layer for _, layer in entries]


def _matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Compares part by part: ``*`` is one part or a piece of it, ``**`` any number of parts."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_matches(parts[i:], wanted[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])


def automatic_layers(model: nn.Module) -> list[str]:
    """Names the layers of ``"auto"``: the model's child modules.

    Replaced by its own children is one without a ``forward``, an ``nn.Sequential``, one that holds
    an ``nn.ModuleList``, one that shares a parameter with a module outside of it, and one that has
    all parameters.
    """
    modules, paths = _named_modules(model), [path for _, path in module_paths(model)]

    def opened(module: nn.Module) -> bool:
        inside = {id(parameter) for parameter in module.parameters()}
        outside = (path[-1] for path in paths if not any(m is module for m in path))
        shares = any(id(p) in inside for other in outside for p in other._parameters.values())
        listed = any(isinstance(inner, nn.ModuleList) for inner in module.modules())
        no_forward = type(module).forward is nn.Module.forward
        return shares or listed or no_forward or isinstance(module, nn.Sequential)

    def parts_of(outer: str) -> list[str]:
        first: dict[int, str] = {}  # a module in several places is one layer
        for name, module in modules.items():
            if name and name.rpartition(".")[0] == outer:
                for part in parts_of(name) if opened(module) else [name]:
                    first.setdefault(id(modules[part]), part)
        return [*first.values()]

    layers = parts_of("")
    while True:
        trained = [name for name in layers if any(True for _ in modules[name].parameters())]
        inner = parts_of(trained[0]) if len(trained) == 1 else []
        if not inner:
            return layers
        layers = [part for name in layers for part in (inner if name == trained[0] else [name])]


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Maps every plain name to its module; where wrapper and content share one, to the content."""
    return {own_name(name, model): path[-1] for name, path in module_paths(model)}


def module_paths(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Lists every path to every module: its name, and the modules along it from the model on."""

    def walk(name: str, path: list[nn.Module]) -> Iterator[tuple[str, list[nn.Module]]]:
        yield name, path
        for part, child in path[-1]._modules.items():
            # A module that holds itself would have paths without end.
            if child is not None and not any(child is known for known in path):
                yield from walk(f"{name}.{part}" if name else part, [*path, child])

    return walk("", [model])
