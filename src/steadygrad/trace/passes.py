"""The forward and backward passes of a step: what was computed, in which order, and from what."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from steadygrad.trace.sketches import Key, Sketches
from steadygrad.watch.hooks import Known, tensors_of

# Calls of one module in a pass that are told apart; what later ones give counts as new.
_CALLS = 16
# Operations whose derivative jumps, or which choose by values; and what may have such within it.
_JUMPS = (
    "Relu", "LeakyRelu", "Prelu", "Threshold", "Hard", "Softshrink", "Clamp", "Abs", "Max", "Min",
    "Amax", "Amin", "AdaptiveMax", "Topk", "Sort", "Index", "CompiledFunction", "Checkpoint",
)  # fmt: skip


class Passes:
    """Takes sketches of what modules are given and give, and of the gradients at these.

    Micro-batches of a step add up: a call of a module to the same call in the pass before.

    Attributes:
        count: Passes begun.
        keep: Whether to keep the gradients at what the model returned.
        received: These gradients, by number of the tensor.
    """

    def __init__(self, sketches: Sketches, device: torch.device) -> None:
        self.count, self.keep, self.received = 0, False, dict[int, Tensor]()
        self._sketches, self._device = sketches, device
        # Of each value its place in the order, the same in each pass, and what made it.
        self._origins = dict[Key, tuple[int, list[int], int, str]]()
        self._begin()

    def _begin(self) -> None:
        self._known, self._calls = Known[Key](), dict[tuple[str, str], int]()
        self._walked = set[Node]()
        # The modules that are under way: a name, places of its inputs, and where it began.
        self._open = [("", list[int](), 0)]
        self._met, self._rows, self._state = 0, 0, generator_state(self._device)

    def begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Begins a pass: the model is called."""
        self._begin()
        self.count += 1
        named = [{str(i): x} if not isinstance(x, Mapping) else x for i, x in enumerate(args)]
        for name, given in (item for some in (*named, kwargs) for item in some.items()):
            for i, tensor in enumerate(tensors_of(given)):
                self._rows = self._rows or (tensor.shape[0] if tensor.ndim else 0)
                self._note(Key("data", "", f"{name}.{i}" if i else name), tensor)
        self._open = [("", [*range(self._met)], self._met)]

    def take(self, name: str, inputs: Iterable[Any]) -> None:
        """A module is called, with tensors that are known or that code around it has made."""
        call, places = self._call("input", name), list[int | None]()
        for i, tensor in enumerate(tensors_of(list(inputs))):
            key = self._known.get(tensor)
            new = Key("input", name, str(i), call)
            places.append(self._origins[key][0] if key else self._note(new, tensor))
        self._open.append((name, [at for at in places if at is not None], self._met))

    def give(self, name: str, output: Any, *, is_root: bool) -> None:
        """A module gives tensors; one that it hands on is a value by each of its names."""
        while len(self._open) > 1 and not is_root and self._open[-1][0] != name:
            self._open.pop()  # of a module that raised
        call, tensors = self._call("output", name), tensors_of(output)
        for i, tensor in enumerate(tensors):
            self._note(Key("output", name, str(i), call), tensor)
            if is_root and self.keep and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._receive, i, tensor.output_nr))
        if not is_root:
            self._open.pop()
        else:
            self._walked.clear()  # which keeps a graph

    def _call(self, kind: str, name: str) -> int:
        call = self._calls[kind, name] = self._calls.get((kind, name), -1) + 1
        return call

    def _note(self, key: Key, tensor: Tensor) -> int | None:
        """Takes a sketch, and gives its place in the order."""
        if key.call >= _CALLS:
            return None
        found, source = self._sketches.found, self._known.get(tensor)
        # The dimension of the batch: that of its length, which is the model's first input's.
        batch = tensor.shape.index(self._rows) if self._rows in tensor.shape else 0
        if source is not None:
            found[key] = replace(found[source], drew=False)
        elif self._sketches.take(key, tensor, batch=batch) is None:
            return None
        maker, took, since = self._open[-1]
        origin = self._origins.setdefault(key, (len(self._origins), took, since, maker))
        place, one = origin[0], found[key]
        _, one.took, one.since, one.maker = origin
        before, self._state = self._state, generator_state(self._device)
        one.drew = one.drew or not all(map(torch.equal, before, self._state))
        one.jumps = self._jumps(tensor.grad_fn) or one.jumps
        self._known.put(tensor, key)
        self._met = max(self._met, place + 1)
        if tensor.grad_fn is not None:
            # A hook of the node and not of the tensor: that takes half the time.
            hook = partial(self._arrive, key, source, batch, tensor.output_nr)
            tensor.grad_fn.register_prehook(hook)
        return place

    def _jumps(self, node: Node | None) -> bool:
        """Whether one of the operations since the last ones that were met has a jump."""
        left, found = [node], False
        while left:
            if (node := left.pop()) is not None and node not in self._walked:
                self._walked.add(node)
                found = found or node.name().startswith(_JUMPS)
                left += [before for before, _ in node.next_functions]
        return found

    def _arrive(
        self, key: Key, source: Key | None, batch: int, number: int, given: Sequence[Tensor | None]
    ) -> None:
        if (gradient := given[number]) is None:
            return
        if source is None:
            self._sketches.take(signal_of(key), gradient, batch=batch, mean=False)
        elif (one := self._sketches.found.get(signal_of(source))) is not None:
            # The hook of another name of the tensor came first.
            self._sketches.found[signal_of(key)] = one

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
