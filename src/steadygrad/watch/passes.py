"""A pass of one batch through the model, forward and backward, and the tensors that it met."""

import math
from collections.abc import Iterable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from steadygrad.numerics import HostCopy, exact
from steadygrad.watch.finding import Evidence, Finding, Habits, Seen, is_finite
from steadygrad.watch.hooks import REAL, Known, Shared, has_values, tensors_of, values

__all__ = ["Pass"]

_NARROW = (torch.float16, torch.bfloat16)
_KNOWN = (*REAL, torch.complex64, torch.complex128)


class Pass(Evidence):
    """Collects the evidence of one batch."""

    def __init__(self, batch: int, shared: Shared, inputs: Any) -> None:
        # Parameters whose gradients were not finite before the backward pass.
        self.left = set[str]()
        self._shared, self.backward, self._broken = shared, False, False
        self._copied: HostCopy | None = None
        tensors = [x for x in tensors_of(inputs) if x.numel()]
        lengths = {x.shape[0] for x in tensors if x.ndim}
        self._rows = lengths.pop() if len(lengths) == 1 else 0
        found = [self._look(x) for x in tensors if x.dtype in _KNOWN]
        # A mask may be minus infinity.
        some = [x.clamp(min=0).to(shared.device) for x in found if x is not True]
        given = Seen("batch", "", sum(some) if some else True)
        super().__init__(batch, [given])
        # Contributions to the gradient of a node's output, by its number and the output's.
        self._parts = dict[tuple[int, int], list[Tensor]]()
        self._first = torch._C._autograd._get_sequence_nr()
        self._known = Known[Seen]()
        for x in tensors:
            self._known.put(x, given)

    def take(self, name: str, inputs: Iterable[Any]) -> None:
        """Looks at the tensors that a module is handed, unless another module gave them."""
        for leaf in inputs:
            if isinstance(leaf, (Tensor, list, tuple, dict)):
                for tensor in (leaf,) if isinstance(leaf, Tensor) else tensors_of(leaf):
                    one = self._known.get(tensor) or self._note(Seen("input", name), tensor)
                    one.takers.append(name)

    def give(self, name: str, output: Any, *, is_root: bool) -> None:
        """Looks at the tensors that a module gives, unless one of its own modules gave them."""
        self.called.add(name)
        outputs = [output] if type(output) is Tensor else tensors_of(output)
        for tensor in outputs:
            if self._known.get(tensor) in (None, self.seen[0]):
                self._note(Seen("output", name), tensor)
        if is_root:
            self._await_loss(outputs)

    def _note(self, one: Seen, tensor: Tensor) -> Seen:
        if tensor.dtype not in _KNOWN or not has_values(tensor):
            return one
        self.seen.append(one)
        one.value = self._look(tensor)
        self._known.put(tensor, one)
        if tensor.grad_fn is not None:
            # A hook of the node and not of the tensor: that takes half the time.
            tensor.grad_fn.register_prehook(partial(self._arrive, one, tensor.output_nr))
        return one

    def _look(self, tensor: Tensor) -> Any:
        """True, or sums of each row, with shape ``(rows,)``; of all if it has other rows.

        They are not finite where a value is not, and keep the sign of a mask's infinities.
        """
        numbers, rows = values(tensor), self._rows
        if not (numbers.numel() and (self._shared.deferred or not _all_finite(numbers))):
            return True
        told = rows and not tensor.is_sparse and tensor.ndim and len(numbers) == rows
        found = numbers.reshape(rows if told else 1, -1).sum(1, dtype=exact(numbers.device))
        return found if told else found[0]

    def _arrive(self, one: Seen, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if not has_values(gradient):
            return
        if torch.is_grad_enabled():
            # With create_graph: the loss will contain this gradient, and go back through it.
            self.twice = self._shared.detailed = True
        else:
            watch = self._shared.owner()
            if watch is not None:
                watch.await_backward(self)
            self.backward = True
            if self.twice:
                one = Seen("output", "", returned=True)
                self.entries.append(one)
        before, found = one.gradient, self._look(gradient)
        if isinstance(before, Tensor):
            # Of several backward passes through one forward pass.
            found = before if found is True else found + before.to(found.device, non_blocking=True)
        one.gradient = found

    def _await_loss(self, outputs: Sequence[Tensor]) -> None:
        """Compares gradients with their parts from the graph, if the loss may add to them."""
        known = [self._known.get(tensor) for tensor in outputs if tensor.grad_fn is not None]
        for one in filter(None, known):
            one.returned = True
            self._shared.detailed = self._shared.detailed or bool(one.takers)
        # In an object that is not known there is nothing to hook.
        self._shared.detailed = self._shared.detailed or not outputs
        if self.batch and not self._shared.detailed:
            return
        returned, followed = {self._number(x.grad_fn) for x in outputs}, set[Any]()
        nodes: list[Any] = [tensor.grad_fn for tensor in self._known.tensors()]
        while nodes:
            node = nodes.pop()
            number = -1 if node in followed else self._number(node)
            if number >= 0:
                followed.add(node)
                node.register_prehook(partial(self._meet, number, number in returned))
                edges = [(self._number(later), i) for later, i in node.next_functions]
                node.register_hook(partial(self._part, edges))
                nodes += [later for later, _ in node.next_functions]

    def _number(self, node: Any) -> int:
        """Number of a node, which does not keep its graph; -1 for leaves and for older nodes."""
        number = node._sequence_nr() if node is not None and node.next_functions else -1
        return number if number >= self._first else -1

    def _part(self, edges: list[tuple[int, int]], gradients: Any, _: Any) -> None:
        for edge, gradient in zip(edges, gradients, strict=True):
            if edge[0] >= 0 and has_values(gradient):
                self._parts.setdefault(edge, []).append(gradient)

    def _meet(self, number: int, returned: bool, gradients: tuple[Tensor | None, ...]) -> None:
        # Where the loss contains gradients, the model's parts are in the loss as well.
        twice = self.twice or torch.is_grad_enabled()
        for i, gradient in enumerate(gradients):
            parts = self._parts.pop((number, i), [])
            if twice or not has_values(gradient) or any(part is gradient for part in parts):
                continue
            whole, *inner = map(values, (gradient, *parts))
            if any(part.shape != whole.shape for part in inner):
                continue  # Sparse, or sharded in several ways.
            total = reduce(torch.add, inner) if inner else None
            value = True if total is None else self._look(total)
            self.entries.append(Seen("output", "", value, self._look(whole), returned=returned))
            kept = not (returned or self._shared.deferred)
            if kept and (total is None or not torch.equal(total, whole)):
                # The loss takes what the model keeps: later passes are measured as this one is.
                self._shared.detailed = True

    def close(self) -> None:
        """Sends the numbers from a device to the host; nothing waits for them."""
        self._known, self._parts = Known(), {}
        owners = (*map(vars, (*self.seen, *self.entries)), self.weights, self.gradients)
        found = [(own, key) for own in owners for key, x in own.items() if isinstance(x, Tensor)]
        device, self._broken = self._shared.device, bool(found)
        if device.type == "cpu" or not found:
            return
        numbers = [own[key].to(device, torch.float64, non_blocking=True) for own, key in found]
        self._copied = HostCopy(torch.cat([x.reshape(-1) for x in numbers]))
        parts = self._copied.numbers.split([x.numel() for x in numbers])
        for (own, key), x, part in zip(found, numbers, parts, strict=True):
            own[key] = part.view(x.shape)

    def arrived(self, *, wait: bool) -> bool:
        """Whether all numbers are on the host."""
        if self._copied is not None and wait:
            self._copied.event.synchronize()
        return self._copied is None or bool(self._copied.event.query())

    def fault(self, habits: Habits) -> Finding | None:
        """The first fault, once all numbers have arrived; a pass without one adds to the habits."""
        if self._copied is not None:
            self._broken = not is_finite(self._copied.numbers)
        # While all is well, nothing is asked of single tensors.
        seen, gradients = (self.seen, self.gradients) if self._broken else ([], {})
        made = [n for n, x in gradients.items() if n not in self.left and not is_finite(x)]
        entries = self.entries if self._broken else []
        fine = not made and all(is_finite(one.gradient) for one in (*seen, *entries))
        if self.backward and fine and not self.left:
            habits.learn(seen)
        # In an evaluation with gradients enabled an infinity may be normal.
        fine = fine if self.backward else is_finite(self.seen[-1].value)
        return None if fine else self.first_fault(habits, made)


def _all_finite(numbers: Tensor) -> bool:
    # The fastest check; float16 would overflow by adding up what is finite.
    total = numbers.sum(dtype=torch.float32) if numbers.dtype in _NARROW else numbers.sum()
    return math.isfinite(total.item()) or bool(torch.isfinite(numbers).all())
