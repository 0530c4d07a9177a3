"""A pass of one batch through the model, and the tensors that its modules took and gave.

On a CPU each tensor is checked immediately. On other devices the sums of its rows travel to the
host together, without a wait, and are checked when they have arrived.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from steadygrad._nests import attributes
from steadygrad.numerics import exact
from steadygrad.shards import local
from steadygrad.watch.finding import Finding, Habits, Seen, first_fault, is_finite

__all__ = ["Pass", "Shared", "has_values", "in_backward", "look_each", "tensors_of", "values"]

_NARROW = (torch.float16, torch.bfloat16)
_REAL = (*_NARROW, torch.float32, torch.float64)
_KNOWN = (*_REAL, torch.complex64, torch.complex128)


class Shared:
    """What a watch shares with its taps and passes, and with those of a copied model.

    Attributes:
        owner: Gives the watch, which no hook keeps alive; None if it is gone, as for a copy.
        ticks: Number of calls since there is compiled code, which cannot append to lists.
        deferred: Whether a read waits for a device, so that it is left until later.
        detailed: Whether to follow the whole graph in every pass: after the first fault.
    """

    def __init__(self, device: torch.device, owner: Callable[[], Any] = lambda: None) -> None:
        self.owner = owner
        self.current: Pass | None = None
        self.ticks = torch.zeros((), dtype=torch.int64, device=device)
        self.compiled, self.deferred = False, device.type not in ("cpu", "meta")
        self.detailed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Shared, (self.ticks.device,)


class Pass:
    """Collects the observations of one batch.

    Attributes:
        seen: Tensors in the order of the forward pass.
        entries: Gradients that are not from the model's own graph alone; ``value`` is that part.
        left: Parameters whose gradients were not finite before the backward pass.
        every: Whether to follow the whole graph, and not only to what the model returned.
        broken: Whether something may not be finite.
        twice: Whether the loss contains gradients.
    """

    def __init__(self, batch: int, shared: Shared, inputs: Any, *, every: bool) -> None:
        self.batch, self._shared, self.every = batch, shared, every
        self.weights, self.gradients = dict[str, Any](), dict[str, Any]()
        self.called, self.left = set[str](), set[str]()
        self.backward = self.twice = False
        self._copied: tuple[Tensor, torch.cuda.Event] | None = None
        tensors = [x for x in tensors_of(inputs) if x.numel()]
        lengths = {x.shape[0] for x in tensors if x.ndim}
        self._rows = lengths.pop() if len(lengths) == 1 else 0
        found = [self._look(x) for x in tensors if x.dtype in _KNOWN]
        # A mask may be minus infinity.
        some = [x.clamp(min=0).to(shared.ticks.device) for x in found if x is not True]
        given = Seen("batch", "", sum(some) if some else True)
        self.broken = shared.deferred or not is_finite(given.value)
        self.seen = [given]
        self.entries, self._parts = list[Seen](), dict[tuple[int, int], list[Tensor]]()
        self._first = torch._C._autograd._get_sequence_nr()
        # Here and not on the tensors, which other code may save.
        self._notes = {id(x): (weakref.ref(x), _version(x), given) for x in tensors}

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

    def known(self, tensor: Tensor) -> Seen | None:
        """The notes on a tensor; None if nothing was, or it was changed in place since."""
        note = self._notes.get(id(tensor))
        known = note and note[0]() is tensor and note[1] == _version(tensor)
        return note[2] if note and known else None

    def note(self, one: Seen, tensor: Tensor, *, again: bool) -> bool:
        """Looks at a tensor unless it is one seen ``again``; whether there was something to see."""
        if tensor.dtype not in _KNOWN or not has_values(tensor):
            return False
        if not again:
            self.seen.append(one)
            if self._shared.compiled:
                one.time = self._shared.ticks.add_(1).clone()
            self._set(one, "value", tensor)
        self._notes[id(tensor)] = weakref.ref(tensor), _version(tensor), one
        node = tensor.grad_fn
        if node is not None:
            # A hook of the node and not of the tensor: that takes half the time.
            node.register_prehook(partial(self._arrive, one, tensor.output_nr))
        return True

    def await_loss(self, outputs: Sequence[Tensor]) -> None:
        """Tells apart what the loss adds to gradients at the outputs and at what it may take."""
        # In an object that is not known there is nothing to hook.
        self._shared.detailed = self._shared.detailed or not outputs
        self.every = taken = self.every or self._shared.detailed
        for tensor in outputs:
            one = self.known(tensor)
            if one is None or one.returned or tensor.grad_fn is None:
                continue
            one.returned = True
            taken = taken or bool(one.takers)
        if taken:
            noted = [ref() for ref, _, one in self._notes.values() if one.what == "output"]
            known = [tensor.grad_fn for tensor in noted if tensor is not None]
            self._follow(known, {self._number(tensor.grad_fn) for tensor in outputs})

    def _follow(self, nodes: list[Any], returned: set[int]) -> None:
        """Compares gradients in the model's graph with the parts that come from within it."""
        known: set[Any] = set()
        while nodes:
            node = nodes.pop()
            number = -1 if node in known else self._number(node)
            if number < 0:
                continue
            known.add(node)
            if self.every or number in returned:
                node.register_prehook(partial(self._meet, number, number in returned))
            edges = [(self._number(later), i) for later, i in node.next_functions]
            asked = [at >= 0 and (self.every or at in returned) for at, _ in edges]
            if any(asked):
                node.register_hook(partial(self._part, edges, asked))
            nodes += [later for later, _ in node.next_functions]

    def _number(self, node: Any) -> int:
        """Number of a node, which does not keep its graph; -1 for leaves and for older nodes."""
        number = node._sequence_nr() if node is not None and node.next_functions else -1
        return number if number >= self._first else -1

    def _part(self, edges: list[Any], asked: list[bool], gradients: Any, _: Any) -> None:
        for edge, ask, gradient in zip(edges, asked, gradients, strict=True):
            if ask and has_values(gradient):
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
            one = Seen("output", "", returned=returned)
            total = reduce(torch.add, inner) if inner else None
            self._set(one, "gradient", whole)
            self._set(one, "value", total)
            self.entries.append(one)
            kept = not (returned or self._shared.deferred)
            if kept and (total is None or not torch.equal(total, whole)):
                # The loss takes what the model keeps: later passes are measured as this one is.
                self._shared.detailed = True

    def _set(self, one: Seen, name: str, tensor: Tensor | None) -> None:
        if not has_values(tensor):
            return
        before, found = getattr(one, name), self._look(tensor)
        self.broken = self.broken or found is not True
        if isinstance(before, Tensor):
            # Of several backward passes through one forward pass.
            found = before if found is True else found + before.to(found.device, non_blocking=True)
        setattr(one, name, found)

    def _arrive(self, one: Seen, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        gradient, name = gradients[number], "gradient"
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
            name = "second" if self.twice else "gradient"
        self._set(one, name, gradient)

    def close(self) -> None:
        """Sends the numbers from a device to the host; nothing waits for them."""
        self._notes, self._parts = {}, {}
        device = self._shared.ticks.device
        owners = (*map(vars, (*self.seen, *self.entries)), self.weights, self.gradients)
        found = [(own, key) for own in owners for key, x in own.items() if isinstance(x, Tensor)]
        if device.type == "cpu" or not found:
            return
        numbers = [own[key].to(device, torch.float64, non_blocking=True) for own, key in found]
        column = torch.cat([x.reshape(-1) for x in numbers])
        host, arrived = torch.empty_like(column, device="cpu", pin_memory=True), torch.cuda.Event()
        host.copy_(column, non_blocking=True)
        arrived.record()
        self._copied = host, arrived
        parts = host.split([x.numel() for x in numbers])
        for (own, key), x, part in zip(found, numbers, parts, strict=True):
            own[key] = part.view(x.shape)

    def arrived(self, *, wait: bool) -> bool:
        """Whether all numbers are on the host."""
        if self._copied is not None and wait:
            self._copied[1].synchronize()
        return self._copied is None or bool(self._copied[1].query())

    def fault(self, habits: Habits) -> Finding | None:
        """The first fault, once all numbers have arrived; a pass without one adds to the habits."""
        if self._copied is not None:
            self.broken = not bool(self._copied[0].isfinite().all())
        if self._shared.compiled:
            self.seen.sort(key=lambda one: float(one.time))
        # While all is well, nothing is asked of single tensors.
        seen, grads = (self.seen, self.gradients) if self.broken else ([], {})
        made = [n for n, x in grads.items() if n not in self.left and not is_finite(x)]
        fine = all(is_finite(found) for one in seen for found in (one.gradient, one.second))
        if self.backward and fine and not made:
            if not self.left:
                habits.learn(seen)
            return None
        # In an evaluation with gradients enabled an infinity may be normal.
        if not self.backward and is_finite(self.seen[-1].value):
            return None
        return self.explain(habits, made)

    def explain(self, habits: Habits, broken: list[str]) -> Finding | None:
        """The first fault, given the parameters whose gradients are not finite."""
        weights = [name for name, found in self.weights.items() if not is_finite(found)]
        found = first_fault(self.seen, self.entries, self.called, weights, habits, broken)
        return found and replace(found, batch=self.batch, last=self.batch)


def in_backward() -> bool:
    """Whether the engine is at work: a forward pass is then one that checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1


def has_values(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Whether there is a tensor, with values to look at and one shape."""
    if tensor is None or tensor.is_meta or tensor.is_nested or isinstance(tensor, FakeTensor):
        return False
    return not torch._C._functorch.is_legacy_batchedtensor(tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def tensors_of(nest: Any) -> list[Tensor]:
    """Tensors among a module's inputs or outputs."""
    found = []
    for leaf in (nest,) if isinstance(nest, Tensor) else _pytree.tree_leaves(nest):
        if isinstance(leaf, Tensor):
            found += [leaf] if has_values(leaf) else []
        else:
            parts = leaf.values() if isinstance(leaf, Mapping) else attributes(leaf)
            found += [tensor for part in parts for tensor in tensors_of(part)]
    return found


def values(tensor: Tensor) -> Tensor:
    """This process's numbers of a tensor, dense and real."""
    tensor = local(tensor.detach())
    if tensor.is_sparse:
        tensor = tensor._values()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    # Sums and norms of float8 do not exist.
    return tensor if tensor.dtype in _REAL else tensor.float()


def look_each(tensors: Iterable[Tensor], *, now: bool) -> list[Any]:
    """Whether each is finite; its largest magnitude, left on the device, if it is not read now."""
    # An empty tensor has no largest magnitude.
    numbers = [x if x.numel() else x.new_zeros(1) for x in map(values, tensors)]
    largest = [*torch._foreach_norm(numbers, math.inf)] if numbers else []
    return [math.isfinite(x.item()) for x in largest] if now else largest


def _all_finite(numbers: Tensor) -> bool:
    # The fastest check; float16 would overflow by adding up what is finite.
    total = numbers.sum(dtype=torch.float32) if numbers.dtype in _NARROW else numbers.sum()
    return math.isfinite(total.item()) or bool(torch.isfinite(numbers).all())
