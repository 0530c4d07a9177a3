"""A pass of one batch through the model, and the tensors that its modules took and gave.

On a CPU, where reading a value needs no synchronisation, each tensor is checked immediately. On
other devices the largest magnitude of each is left on the device, all travel to the host together,
and they are checked when they have arrived.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from steadygrad._nests import attributes
from steadygrad.sharding import local
from steadygrad.watch.finding import BATCH, INPUT, OUTPUT, Finding, Seen, first_fault, is_finite

if TYPE_CHECKING:
    from steadygrad.watch.taps import Tap

__all__ = ["Clock", "Pass", "finite_now", "in_backward", "largest", "values"]

_TAG = "_steadygrad_watch"
_NARROW = (torch.float16, torch.bfloat16)
_KNOWN = (*_NARROW, torch.float32, torch.float64)


class Clock:
    """Counts module calls in compiled code, which cannot append to lists but can update a tensor.

    Attributes:
        ticks: Number of calls, with shape ``()``.
        used: Whether there is compiled code.
        deferred: Whether a read waits for a device, so that it is left until later.
        detailed: Whether to hook what goes into layers, and what comes out of modules around them,
            in every pass: after the first fault.
    """

    def __init__(self, device: torch.device) -> None:
        self.ticks = torch.zeros((), dtype=torch.int64, device=device)
        self.used, self.deferred = False, device.type != "cpu"
        self.detailed = False


class Pass:
    """Collects the observations of one batch.

    Args:
        batch: Index of the batch.
        clock: The watch's clock, which says whether reads are deferred.
        inputs: What the model was given.
        await_backward: Called when a gradient arrives.

    Attributes:
        seen: Tensors in the order of the forward pass.
        weights: Names of weights, and whether they are finite, where that was asked.
        called: Names of the modules that were called.
        spoiled: Layers whose gradient was not finite before the pass.
        backward: Whether a gradient has arrived.
        broken: Whether something is known not to be finite.
    """

    def __init__(
        self, batch: int, clock: Clock, inputs: Any, await_backward: Callable[[], None]
    ) -> None:
        self.batch, self._clock, self._await = batch, clock, await_backward
        # A mask may be minus infinity.
        self._inputs = [x.detach() for x in floating(inputs) if x.numel()]
        self.seen = [Seen(BATCH, "", batch)]
        if clock.deferred:
            self.seen[0].value, self._inputs = self._greatest_inputs(), []
        self.weights: list[Seen] = []
        self.called: set[str] = set()
        self.spoiled: set[Tap] = set()
        self.backward = self.broken = False
        self._copied: tuple[Tensor, Any] | None = None

    def see(
        self, tap: "Tap", args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Notes a module's inputs and outputs."""
        repeated = in_backward()
        if not repeated:
            # The weights' gradients would not say in which of the module's calls they broke.
            tap.hooked = tap.hooked or tap.batch == self.batch
            tap.batch = self.batch
            self.called.add(tap.name)
        outputs = (output,) if type(output) is Tensor else floating(output)
        for tensor in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(tensor, Tensor):
                self._take(tap, tensor, outputs, repeated)
        for tensor in outputs:
            tag = tensor.__dict__.get(_TAG)
            if tag is None or tag[0].batch != self.batch or tag[1] != tensor._version:
                self._note(tap, OUTPUT, tensor, repeated)
            if tap.root and not repeated:
                one = tensor.__dict__[_TAG][0] if _TAG in tensor.__dict__ else None
                if one is not None and not one.returned:
                    one.returned = True
                    self._await_gradient(one, tensor)

    def _take(self, tap: "Tap", tensor: Tensor, outputs: Any, repeated: bool) -> None:
        """Notes a tensor that a module was given."""
        tag = tensor.__dict__.get(_TAG)
        if tag is not None and tag[0].batch == self.batch:
            if not repeated:
                tag[0].takers.append(tap.name)
        elif tap.leaf and not any(tensor is other for other in outputs):
            self._note(tap, INPUT, tensor, repeated)

    def _note(self, tap: "Tap", what: str, tensor: Tensor, repeated: bool) -> None:
        if tensor.dtype not in _KNOWN:
            return
        if repeated:
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
        tensor.__dict__[_TAG] = one, tensor._version
        detailed = not self.batch or self._clock.detailed
        if tap.hooked or (detailed and (what == INPUT or not tap.leaf)):
            self._await_gradient(one, tensor)

    def _set(self, one: Seen, field: str, tensor: Tensor) -> None:
        if self._clock.deferred:
            setattr(one, field, largest(tensor))
        else:
            found = finite_now(tensor)
            setattr(one, field, found)
            self.broken = self.broken or not found

    def _await_gradient(self, one: Seen, tensor: Tensor) -> None:
        node = tensor.grad_fn
        if node is not None:
            # A hook of the node and not of the tensor: that takes half the time.
            node.register_prehook(partial(self._arrive, one, tensor.output_nr))

    def _arrive(self, one: Seen, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if gradient is not None:
            self._await()
            # Not if a report has ended the pass before.
            if self._copied is None:
                self.backward = True
                self._set(one, "gradient", gradient)

    def settle(self) -> None:
        """Lets go of the inputs: another pass begins before its backward pass."""
        if self._inputs:
            self.seen[0].value, self._inputs = is_finite(self._greatest_inputs()), []

    def _greatest_inputs(self) -> Any:
        found = [x.amax().float() for x in map(local, self._inputs)]
        return torch.stack(found).amax() if found else True

    def close(self) -> None:
        """Sends the flags from a device to the host; nothing waits for them."""
        if not (self._clock.deferred or self._clock.used):
            return
        found = [value for _, _, value in self._on_device()]
        if not found:
            return
        column = torch.stack([x.to(found[0].device, torch.float64) for x in found])
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

    def fault(self, usual: set[tuple[str, str]]) -> Finding | None:
        """The first fault; all numbers must have arrived.

        Args:
            usual: Tensors that are infinite though all is well, to which this pass may add.
        """
        if self._copied is not None:
            for (one, name, _), number in zip(
                self._on_device(), self._copied[0].tolist(), strict=True
            ):
                setattr(one, name, number)
            self._copied = None
            self.seen.sort(key=lambda one: -1 if one.what == BATCH else one.time or 0)
        elif not self.broken:
            return None
        bad = [one for one in self.seen if not is_finite(one.value)]
        if self.backward and all(is_finite(one.gradient) for one in self.seen):
            usual |= {(one.what, one.name) for one in bad}
            return None
        if not self.backward and is_finite(self.seen[-1].value):
            # An evaluation with gradients enabled. Only passes with a backward pass show which
            # infinities are normal.
            return None
        for one in bad:
            one.value = (one.what, one.name) in usual
        self.settle()
        weights = [one.name for one in self.weights if not is_finite(one.value)]
        return first_fault(self.seen, self.called, weights, self.batch)

    def _on_device(self) -> list[tuple[Seen, str, Tensor]]:
        fields = ("value", "gradient", "time")
        found = [(one, name, getattr(one, name)) for one in self.seen for name in fields]
        found += [(one, "value", one.value) for one in self.weights]
        return [entry for entry in found if isinstance(entry[2], Tensor)]


def in_backward() -> bool:
    """Whether the engine is at work: a forward pass is then one that checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1


def floating(nest: Any) -> list[Tensor]:
    """Floating-point tensors among a module's inputs or outputs."""
    found = []
    for leaf in (nest,) if isinstance(nest, Tensor) else _pytree.tree_leaves(nest):
        if not isinstance(leaf, Tensor):
            found += [tensor for part in attributes(leaf) for tensor in floating(part)]
        elif leaf.dtype in _KNOWN:
            found.append(leaf)
    return found


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
    return tensor if tensor.dtype in _KNOWN else tensor.float()


def largest(tensor: Tensor) -> Any:
    """The largest magnitude, which is not finite if any is not; for a device and compiled code."""
    tensor = values(tensor)
    return torch.linalg.vector_norm(tensor, math.inf) if tensor.numel() else True


def finite_now(tensor: Tensor) -> bool:
    """Whether all values are finite, on a CPU."""
    tensor = values(tensor)
    # The fastest check; float16 would overflow by adding up what is finite.
    total = tensor.sum(dtype=torch.float32) if tensor.dtype in _NARROW else tensor.sum()
    return math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())
