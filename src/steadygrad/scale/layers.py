"""The scaled modules of a model, their nesting, and the owner of each parameter."""

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad._names import plain_name

__all__ = ["LOSS", "Layer", "Layers", "module_paths"]

# Index of the loss, the layer around all others.
LOSS = 0


class Layer(NamedTuple):
    """Describes a module whose gradients have a scale of their own, or the loss.

    Attributes:
        name: The module's name without wrappers; empty for the loss.
        module: The module; the whole model for the loss.
        parent: Index of the next layer around it.
    """

    name: str
    module: nn.Module
    parent: int = LOSS


class Layers:
    """Lists the chosen modules of a model, after the loss, which is layer 0.

    Args:
        model: The model.
        chosen: Names and modules.

    Attributes:
        layers: The loss, then the chosen modules.
        version: Counts how often the model's parameters were exchanged.

    Raises:
        InputError: If a parameter is under two different scales, or a module in two places.
    """

    def __init__(self, model: nn.Module, chosen: Sequence[tuple[str, nn.Module]]) -> None:
        self.model, self.version = model, 0
        self._index = {id(module): i for i, (_, module) in enumerate(chosen, start=1)}
        parents: dict[int, int] = {}
        for _, path in module_paths(model):
            if id(path[-1]) in self._index:
                parent, i = [LOSS, *self._around(path)][-2:]
                first = parents.setdefault(i, parent)
                if first != parent and any(True for _ in path[-1].parameters()):
                    raise InputError(
                        f"Expected every chosen module in one place. Found {chosen[i - 1][0]!r} "
                        "both inside and outside of another chosen module: its parameters would be "
                        "under two scales. Remedy: leave one of the two out."
                    )
        layers = [Layer(*entry, parents[i]) for i, entry in enumerate(chosen, start=1)]
        self.layers = [Layer("", model), *layers]
        # Module and name of each parameter, so that an exchanged one is noticed.
        self._slots: list[tuple[nn.Module, str, weakref.ref[nn.Parameter]]] = []
        self._owners: dict[int, tuple[weakref.ref[nn.Parameter], int]] = {}
        self._refresh()

    def _around(self, path: Sequence[nn.Module]) -> list[int]:
        return [self._index[id(module)] for module in path if id(module) in self._index]

    def chain(self, index: int) -> Iterator[int]:
        """Yields the indices of a layer and of the layers around it, from the inside out."""
        yield index
        while index:
            index = self.layers[index].parent
            yield index

    def owners(self, parameters: Sequence[Tensor]) -> list[int | None]:
        """Finds the innermost layers around parameters; None for parameters of other models.

        Wrappers replace parameters, and Python may reuse the id of a deleted one. So each call
        compares the model's parameters with those of the table. A replaced parameter that still
        exists keeps its owner, as FSDP2's shards do while whole ones replace them.
        """
        current = all(m._parameters.get(name) is old() for m, name, old in self._slots)
        if not current or any(self._owner(parameter) is None for parameter in parameters):
            self._refresh()
        return [self._owner(parameter) for parameter in parameters]

    def _owner(self, parameter: Tensor) -> int | None:
        known, owner = self._owners.get(id(parameter), (None, LOSS))
        return owner if known is not None and known() is parameter else None

    def _refresh(self) -> None:
        """Rebuilds the table of slots, and the table of owners by the parameters' ids."""
        owners: dict[int, tuple[int, str]] = {}
        slots = []
        for name, modules in module_paths(self.model):
            owner = [LOSS, *self._around(modules)][-1]
            for leaf, parameter in modules[-1]._parameters.items():
                if parameter is not None:
                    full = f"{name}.{leaf}" if name else leaf
                    other, first = owners.setdefault(id(parameter), (owner, full))
                    if other != owner:
                        raise InputError(
                            "Expected every parameter under one scale. Found one that is both "
                            f"{plain_name(first)!r}, in {self.described(other)}, and "
                            f"{plain_name(full)!r}, in {self.described(owner)}: no single divisor "
                            "removes both scales from its gradient. Remedy: choose neither module, "
                            "or one around both."
                        )
                    slots.append((modules[-1], leaf, weakref.ref(parameter)))
        # A deleted one is None.
        before, now = ([id(ref()) for _, _, ref in each] for each in (self._slots, slots))
        self.version += before != now
        self._slots = slots
        alive = {key: entry for key, entry in self._owners.items() if entry[0]() is not None}
        self._owners = alive | {id(ref()): (ref, owners[id(ref())][0]) for _, _, ref in slots}

    def described(self, index: int) -> str:
        """Names a layer in an error."""
        return f"the chosen {self.layers[index].name!r}" if index else "no chosen module"


def module_paths(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Lists every path to every module: its name, and the modules along it from the model on."""

    def walk(name: str, path: list[nn.Module]) -> Iterator[tuple[str, list[nn.Module]]]:
        yield name, path
        for part, child in path[-1]._modules.items():
            # A module that holds itself would have paths without end.
            if child is not None and not any(child is known for known in path):
                yield from walk(f"{name}.{part}" if name else part, [*path, child])

    return walk("", [model])
