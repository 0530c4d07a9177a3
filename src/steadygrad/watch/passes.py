"""A pass of one batch through the model, and the tensors that its modules took and gave.

On a CPU, where reading a value needs no synchronisation, each tensor is checked immediately. On
other devices the largest magnitude of each row is left on the device, all travel to the host
together, and they are checked when they have arrived.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from steadygrad._nests import attributes
from steadygrad.formulas.tensors import exact
from steadygrad.sharding import local
from steadygrad.watch.finding import (
    BATCH,
    INPUT,
    OUTPUT,
    Finding,
    Habits,
    Seen,
    first_fault,
    is_finite,
)

if TYPE_CHECKING:
    from steadygrad.watch.taps import Tap

__all__ = [
    "Clock",
    "Pass",
    "finite_now",
    "has_values",
    "in_backward",
    "in_fake_mode",
    "largest",
    "look",
    "values",
]

_NARROW = (torch.float16, torch.bfloat16)
_REAL = (*_NARROW, torch.float32, torch.float64)
_KNOWN = (*_REAL, torch.complex64, torch.complex128)


class Clock:
    """Counts module calls in compiled code, which cannot append to lists but can update a tensor.

    Attributes:
        ticks: Number of calls, with shape ``()``.
        used: Whether there is compiled code.
        deferred: Whether a read waits for a device, so that it is left until later.
        detailed: Whether to hook all that modules give, and what code gives them, in every pass:
            after the first fault.
    """

    def __init__(self, device: torch.device) -> None:
        self.ticks = torch.zeros((), dtype=torch.int64, device=device)
        self.used, self.deferred = False, device.type not in ("cpu", "meta")
        self.detailed = False


class Pass:
    """Collects the observations of one batch.

    Args:
        batch: Index of the batch.
        clock: The watch's clock, which says whether reads are deferred.
        inputs: What the model was given.
        await_backward: Called with the pass when a gradient arrives.

    Attributes:
        seen: Tensors in the order of the forward pass.
        weights: Names of weights, and whether they are finite, where that was asked.
        gradients: Names of parameters, and whether their gradients are finite, likewise.
        called: Names of the modules that were called.
        left: Parameters whose gradients were not finite before the backward pass: they say nothing
            of this one.
        backward: Whether a gradient has arrived.
        broken: Whether something is known not to be finite.
        twice: Whether the loss contains gradients.
        fresh: Whether no parameter had a gradient before: an optimizer's step begins.
    """

    def __init__(
        self, batch: int, clock: Clock, inputs: Any, await_backward: "Callable[[Pass], None]"
    ) -> None:
        self.batch, self._clock = batch, clock
        # A watch that is dropped takes its passes along.
        self._await = weakref.WeakMethod(await_backward)
        tensors = [x for x in _tensors(inputs) if x.numel()]
        lengths = {x.shape[0] for x in tensors if x.ndim}
        self._rows = lengths.pop() if len(lengths) == 1 else 0
        self._inputs = [(x.detach(), _version(x)) for x in tensors if x.dtype in _KNOWN]
        self.seen = [Seen(BATCH, "", batch)]
        # Here and not on the tensors, which other code may save.
        self._notes: dict[int, tuple[weakref.ref[Tensor], int, Seen]] = {}
        for tensor in tensors:
            self._remember(tensor, self.seen[0])
        if clock.deferred:
            self.seen[0].value, self._inputs = self._greatest_inputs(), []
        self.weights: list[Seen] = []
        self.gradients: list[Seen] = []
        self.called: set[str] = set()
        self.left: set[str] = set()
        self.backward = self.broken = self.fresh = self.twice = False
        self._copied: tuple[Tensor, Any] | None = None

    def enter(self, tap: "Tap", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes what a module is given."""
        for leaf in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(leaf, Tensor):
                self._take(tap, leaf)
            elif isinstance(leaf, (list, tuple, dict)):
                for tensor in _tensors(leaf):
                    self._take(tap, tensor)

    def _take(self, tap: "Tap", tensor: Tensor) -> None:
        one = self._known(tensor)
        if one is None:
            self._note(tap, INPUT, tensor)
        elif one.takers is not None and not in_backward():
            one.takers.append(tap.name)

    def _remember(self, tensor: Tensor, one: Seen) -> None:
        self._notes[id(tensor)] = weakref.ref(tensor), _version(tensor), one

    def _known(self, tensor: Tensor) -> Seen | None:
        """What was noted of a tensor; None if nothing was, or it was changed in place since."""
        found, version, one = self._notes.get(id(tensor), (_nothing, 0, None))
        return one if found() is tensor and version == _version(tensor) else None

    def see(self, tap: "Tap", output: Any) -> None:
        """Notes what a module gave."""
        repeated = in_backward()
        if not repeated:
            # The weights' gradients would not say in which of the module's calls they broke.
            tap.hooked = tap.hooked or tap.batch == self.batch
            tap.batch = self.batch
            self.called.add(tap.name)
        outputs = (output,) if type(output) is Tensor else floating(output)
        for tensor in outputs:
            if self._known(tensor) in (None, self.seen[0]):
                self._note(tap, OUTPUT, tensor)
        if tap.root and not repeated:
            self._await_loss(outputs)

    def _await_loss(self, outputs: Any) -> None:
        """Hooks the gradients at what the model returned.

        That of a tensor that modules took as well is a sum: the parts that come from within the
        model are hooked one by one, where they leave the operations that took it.
        """
        taken: dict[tuple[Any, int], Seen] = {}
        for tensor in outputs:
            one = self._known(tensor)
            if one is None or one.returned or tensor.grad_fn is None:
                continue
            one.returned = True
            self._await_gradient(one, tensor)
            if one.takers:
                taken[tensor.grad_fn, tensor.output_nr] = one
        nodes, known = [tensor.grad_fn for tensor in outputs] if taken else [], {None}
        while nodes:
            node = nodes.pop()
            if node in known:
                continue
            known.add(node)
            for i, edge in enumerate(node.next_functions):
                if edge in taken:
                    node.register_hook(partial(self._hand_on, taken[edge], i))
                nodes.append(edge[0])

    def _hand_on(self, one: Seen, number: int, gradients: Any, _: Any) -> None:
        if has_values(gradients[number]):
            self._set(one, "within", gradients[number])

    def _note(self, tap: "Tap", what: str, tensor: Tensor) -> None:
        if tensor.dtype not in _KNOWN or not has_values(tensor):
            return
        if in_backward():
            # Reentrant checkpointing: this forward pass is the one that has a graph.
            one = tap.input if what == INPUT else tap.output
            if one is None:
                return
        else:
            one = Seen(what, tap.name, self.batch)
            self.seen.append(one)
            if what == INPUT:
                tap.input = one
            else:
                tap.output = one
            if self._clock.used:
                one.time = self._clock.ticks.clone()
            self._set(one, "value", tensor)
        self._remember(tensor, one)
        if tap.hooked or not self.batch or self._clock.detailed:
            self._await_gradient(one, tensor)

    def _set(self, one: Seen, name: str, tensor: Tensor) -> None:
        before = getattr(one, name)
        if self._clock.deferred:
            found = look(tensor, self._rows)
            # Of several backward passes through one forward pass.
            more = isinstance(before, Tensor) and isinstance(found, Tensor)
            setattr(one, name, before + found if more else found)
        elif is_finite(before):
            fine = finite_now(tensor)
            setattr(one, name, fine or look(tensor, self._rows))
            self.broken = self.broken or not fine

    def _await_gradient(self, one: Seen, tensor: Tensor) -> None:
        node = tensor.grad_fn
        if node is not None:
            # A hook of the node and not of the tensor: that takes half the time.
            node.register_prehook(partial(self._arrive, one, tensor.output_nr))

    def _arrive(self, one: Seen, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if not has_values(gradient):
            return
        if torch.is_grad_enabled():
            # With create_graph: the loss will contain this gradient, and go back through it.
            self.twice = self._clock.detailed = True
            self._set(one, "gradient", gradient)
            return
        begun = self._await()
        if begun is not None:
            begun(self)
        self.backward = True
        self._set(one, "second" if self.twice else "gradient", gradient)

    def add(self, found: Iterable[Seen]) -> None:
        """Adds what compiled code has noted."""
        found = [*found]
        self.seen += found
        self.called |= {one.name for one in self.seen}
        if not self._clock.deferred:
            numbers = (number for one in found for number in (one.value, one.gradient))
            self.broken = self.broken or not all(map(is_finite, numbers))

    def settle(self) -> None:
        """Lets go of the inputs: another pass begins before its backward pass."""
        if self._inputs:
            found = self._greatest_inputs()
            self.seen[0].value, self._inputs = True if is_finite(found) else found, []

    def _greatest_inputs(self) -> Any:
        """The largest number of each row: a mask may be minus infinity."""
        found = []
        # Those that the model changed in place are no longer what it was given.
        for numbers in [values(x) for x, version in self._inputs if version == _version(x)]:
            rows = self._rows if numbers.ndim and len(numbers) == self._rows else 1
            found.append(numbers.reshape(rows, -1).amax(1).to(exact(numbers.device)))
        if not found:
            return True
        greatest = torch.stack(torch.broadcast_tensors(*found)).amax(0)
        return greatest if self._rows else greatest[0]

    def close(self) -> None:
        """Sends the numbers from a device to the host; nothing waits for them."""
        self._notes = {}
        if not (self._clock.deferred or self._clock.used):
            return
        found = [value.reshape(-1) for _, _, value in self._on_device()]
        if not found:
            return
        column = torch.cat([x.to(found[0].device, torch.float64) for x in found])
        if column.device.type == "cpu":
            self._copied = column, None
            return
        host = torch.empty_like(column, device="cpu", pin_memory=True)
        arrived = torch.cuda.Event()
        self._copied = host.copy_(column, non_blocking=True), arrived
        arrived.record()

    def arrived(self, *, wait: bool) -> bool:
        """Whether all numbers are on the host."""
        if self._copied is None or self._copied[1] is None:
            return True
        if wait:
            self._copied[1].synchronize()
        return bool(self._copied[1].query())

    def strange(self, habits: Habits) -> bool:
        """Whether something is not finite that may be all right, on a CPU."""
        return self.broken and any(
            not is_finite(one.value) and not habits.has(one) for one in self.seen
        )

    def fault(self, habits: Habits) -> Finding | None:
        """The first fault; all numbers must have arrived.

        Args:
            habits: Tensors that are not finite though all is well, to which this pass may add.
        """
        if self._copied is not None:
            self._unpack()
        elif self.broken:
            self.settle()
        elif self.backward and not self.gradients:
            habits.learn([])
            return None
        signals = [f for one in self.seen for f in (one.gradient, one.second)]
        made = [g.name for g in self.gradients if not (is_finite(g.value) or g.name in self.left)]
        if self.backward and not made and all(map(is_finite, signals)):
            if not self.left:
                habits.learn(self.seen)
            return None
        if not (self.backward or not is_finite(self.seen[-1].value)):
            # An evaluation with gradients enabled. Only passes with a backward pass show which
            # infinities are normal.
            return None
        return self.explain(habits, made)

    def explain(self, habits: Habits, broken: Sequence[str]) -> Finding | None:
        """The first fault, given the parameters whose gradients are not finite."""
        self.settle()
        weights = [one.name for one in self.weights if not is_finite(one.value)]
        return first_fault(self.seen, self.called, weights, self.batch, habits, broken)

    def _unpack(self) -> None:
        """Puts the numbers that have arrived in the places of those on the device."""
        assert self._copied is not None
        entries = self._on_device()
        parts = self._copied[0].split([number.numel() for _, _, number in entries])
        fine = bool(self._copied[0].isfinite().all())
        for (one, name, number), part in zip(entries, parts, strict=True):
            if name == "time":
                one.time = float(part)
            else:
                setattr(one, name, True if fine else part.view(number.shape))
        self._copied = None
        self.seen.sort(key=lambda one: -1 if one.what == BATCH else one.time or 0)

    def _on_device(self) -> list[tuple[Seen, str, Tensor]]:
        names = ("value", "gradient", "second", "within", "time")
        every = [(one, name) for one in self.seen for name in names]
        every += [(one, "value") for one in (*self.weights, *self.gradients)]
        found = [(one, name, getattr(one, name)) for one, name in every]
        return [entry for entry in found if isinstance(entry[2], Tensor)]


def in_backward() -> bool:
    """Whether the engine is at work: a forward pass is then one that checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1


def in_fake_mode() -> bool:
    """Whether tensors have shapes only, for a tool that plans or counts."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def has_values(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Whether there is a tensor, with values to look at and one shape."""
    if tensor is None or tensor.is_meta or tensor.is_nested:
        return False
    return type(tensor) is Tensor or not isinstance(tensor, FakeTensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _nothing() -> None:
    return None


def _tensors(nest: Any) -> list[Tensor]:
    """Tensors among a module's inputs or outputs."""
    found = []
    for leaf in (nest,) if isinstance(nest, Tensor) else _pytree.tree_leaves(nest):
        if isinstance(leaf, Tensor):
            found += [leaf] if has_values(leaf) else []
        else:
            found += [tensor for part in attributes(leaf) for tensor in _tensors(part)]
    return found


def floating(nest: Any) -> list[Tensor]:
    """Floating-point tensors among a module's outputs."""
    return [tensor for tensor in _tensors(nest) if tensor.dtype in _KNOWN]


def values(tensor: Tensor) -> Tensor:
    """This process's numbers of a tensor, dense and real."""
    tensor = tensor.detach()
    if type(tensor) is not Tensor:
        tensor = local(tensor)
    if tensor.is_sparse:
        tensor = tensor._values()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    # Sums and norms of float8 do not exist.
    return tensor if tensor.dtype in _REAL else tensor.float()


def largest(tensor: Tensor) -> Any:
    """The largest magnitude, which is not finite if any is not; for a device and compiled code."""
    tensor = values(tensor)
    return torch.linalg.vector_norm(tensor, math.inf) if tensor.numel() else True


def look(tensor: Tensor, rows: int) -> Any:
    """Sums of each row, with shape ``(rows,)``; of all if it has other rows.

    They are not finite where a value is not, and keep the sign of a mask's infinities.

    Args:
        tensor: The tensor.
        rows: Rows of the batch; 0 if they cannot be told.
    """
    numbers = values(tensor)
    if not numbers.numel():
        return True
    told = rows and not tensor.is_sparse and tensor.ndim and len(numbers) == rows
    numbers = (
        numbers.flatten(1)
        if told and numbers.ndim > 1
        else numbers.reshape(rows if told else 1, -1)
    )
    found = numbers.sum(1, dtype=exact(numbers.device))
    return found if told else found[0]


def finite_now(tensor: Tensor) -> bool:
    """Whether all values are finite, on a CPU."""
    tensor = values(tensor)
    # The fastest check; float16 would overflow by adding up what is finite.
    total = tensor.sum(dtype=torch.float32) if tensor.dtype in _NARROW else tensor.sum()
    return math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())
