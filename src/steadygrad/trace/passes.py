"""The forward and backward passes of a step: what was computed, in which order, and from what."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steadygrad.trace.sketches import Key, Sketches
from steadygrad.watch.hooks import Known, tensors_of

__all__ = ["Passes", "generator_state"]

# Calls of one module in a pass that are told apart; what later ones give counts as new.
_CALLS = 16


class Passes:
    """Takes sketches of what modules are given and give, and of the gradients at these.

    Micro-batches of a step add up: a call of a module to the same call in the pass before.

    Args:
        sketches: Where the sketches go.
        device: Where the model is.

    Attributes:
        count: Passes begun.
        keep: Whether to keep the gradients at what the model returned.
        received: These gradients, by number of the tensor.
    """

    def __init__(self, sketches: Sketches, device: torch.device) -> None:
        self.count, self.keep, self.received = 0, False, dict[int, Tensor]()
        self._sketches, self._device = sketches, device
        # The order of the forward pass, the same in each pass: places and names; and what they are
        # made of.
        self._places, self._keys = dict[Key, int](), list[Key]()
        self._origins = dict[Key, tuple[list[int], int, str]]()
        self._begin()

    def _begin(self) -> None:
        self._known, self._calls = Known[int](), dict[tuple[str, str], int]()
        # The modules that are under way: a name, places of its inputs, and where it began.
        self._open = list[tuple[str, list[int], int]]()
        self._met, self._rows, self._state = 0, 0, generator_state(self._device)

    def begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Begins a pass: the model is called."""
        self._begin()
        self.count += 1
        for name, given in [*((str(i), x) for i, x in enumerate(args)), *kwargs.items()]:
            for i, tensor in enumerate(tensors_of(given)):
                self._rows = self._rows or (tensor.shape[0] if tensor.ndim else 0)
                key = Key("data", "", f"{name}.{i}" if i else name)
                self._note(key, tensor, ([], 0))
        self._open = [("", [*range(self._met)], self._met)]

    def take(self, name: str, inputs: Iterable[Any]) -> None:
        """A module is called, with tensors that are known or that code around it has made."""
        made = self._made()
        tensors = tensors_of(list(inputs))
        found = [self._known.get(tensor) for tensor in tensors]
        call = self._call("input", name)
        for i, tensor in enumerate(tensors):
            if found[i] is None:
                found[i] = self._note(Key("input", name, str(i), call), tensor, made)
        self._open.append((name, [at for at in found if at is not None], self._met))

    def give(self, name: str, output: Any, *, is_root: bool) -> None:
        """A module gives tensors; one that it hands on is a value by each of its names."""
        while len(self._open) > 1 and not is_root and self._open[-1][0] != name:
            self._open.pop()  # of a module that raised
        made, call, tensors = self._made(), self._call("output", name), tensors_of(output)
        for i, tensor in enumerate(tensors):
            self._note(Key("output", name, str(i), call), tensor, made)
        if not is_root:
            self._open.pop()
        elif self.keep:
            for i, tensor in enumerate(tensors):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(partial(self._receive, i, tensor.output_nr))

    def _made(self) -> tuple[list[int], int]:
        """What the code under way can have used."""
        return self._open[-1][1:]

    def _call(self, kind: str, name: str) -> int:
        call = self._calls[kind, name] = self._calls.get((kind, name), -1) + 1
        return call

    def _note(self, key: Key, tensor: Tensor, made: tuple[list[int], int]) -> int | None:
        """Takes a sketch, and gives its place in the order."""
        if key.call >= _CALLS:
            return None
        batch, found, known = self._batch(tensor), self._sketches.found, self._known.get(tensor)
        source = None if known is None else self._keys[known]
        if source is not None:
            found[key] = replace(found[source], drew=False)
        elif self._sketches.take(key, tensor, batch=batch) is None:
            return None
        if key not in self._places:
            self._places[key] = len(self._keys)
            self._keys.append(key)
            self._origins[key] = [*made[0]], made[1], self._open[-1][0] if self._open else ""
        place, one = self._places[key], found[key]
        *one.made, one.maker = self._origins[key]
        before, self._state = self._state, generator_state(self._device)
        same = all(map(torch.equal, before, self._state))
        one.drew = one.drew or not same
        self._known.put(tensor, place)
        self._met = max(self._met, place + 1)
        if tensor.grad_fn is not None:
            # A hook of the node and not of the tensor: that takes half the time.
            hook = partial(self._arrive, key, source, batch, tensor.output_nr)
            tensor.grad_fn.register_prehook(hook)
        return place

    def _batch(self, tensor: Tensor) -> int:
        """The dimension of the batch: that of its length, which is the model's first input's."""
        shape = tensor.shape
        return shape.index(self._rows) if self._rows in shape else 0

    def _arrive(
        self, key: Key, source: Key | None, batch: int, number: int, given: Sequence[Tensor | None]
    ) -> None:
        if (gradient := given[number]) is None:
            return
        signal, found = signal_of(key), self._sketches.found
        # The hook of another name of the tensor came first.
        if source is None or signal_of(source) not in found:
            self._sketches.take(signal, gradient, batch=batch, mean=False)
        else:
            found[signal] = replace(found[signal_of(source)])

    def _receive(self, place: int, number: int, given: Sequence[Tensor | None]) -> None:
        if (gradient := given[number]) is not None:
            self.received[place] = gradient


def signal_of(value: Key) -> Key:
    """The name of the gradient at a value."""
    return Key("signal", value.name, f"{value.kind}.{value.part}", value.call)


def generator_state(device: torch.device) -> list[Tensor]:
    """States of the generators that a model on a device draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
