"""Names the module that first made something non-finite, in any training loop."""

import math
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad._checks import check_type
from steadygrad._names import own_name
from steadygrad.distributed import gather_json, process_world
from steadygrad.numerics import exact, square_sums
from steadygrad.shards import PackedSum, aligned
from steadygrad.watch.finding import Finding, Habits, is_finite
from steadygrad.watch.hooks import Shared, has_values, hook_modules, is_planned, values
from steadygrad.watch.passes import Pass

__all__ = ["GradientWatch"]

# Forward passes that may wait for a backward pass; with more of them these count as over.
_MOST_OPEN = 64


class GradientWatch(AbstractContextManager["GradientWatch"]):
    """Watches every module's output and its gradient, in any loop, with or without a scaler.

    .. code-block:: python

        watch = GradientWatch(model)
        ...
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not norm.isfinite():
            print(watch.report())

    A pass begins when the model itself is called with gradients enabled, and ends with the backward
    pass. A fault is a gradient that is not finite; or an output, where no backward pass followed.

    Args:
        model: The model as it is called, after DDP, ``fully_shard`` and ``torch.compile``, on the
            device where it trains.
        process_group: Processes whose findings :meth:`report` compares: ``"all"``, None for this
            one alone, or a process group.

    Attributes:
        batches: Passes begun so far.

    Raises:
        InputError: If a part of the model is a ScriptModule.
    """

    def __init__(self, model: nn.Module, process_group: Any = "all") -> None:
        check_type("model", model, nn.Module, "the module that the loop calls")
        self.model, self._group, self.batches = model, process_group, 0
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.shared = Shared(device, weakref.ref(self))
        # Passes that began, and those that are over, with the others of one backward pass.
        self._open, self._closed, self._awaited = list[Pass](), deque[list[Pass]](), False
        self._habits = Habits()
        # The fault, and the last pass that was over, since the last report.
        self._finding: Finding | None = None
        self._last: Pass | None = None
        # Whether gradients may be left that were not finite before a pass.
        self._stale = False
        self._sum: PackedSum | None = None
        with ExitStack() as hooks:
            hook_modules(model, self.shared, hooks)
            # A watch that is dropped leaves no hooks behind either.
            self._detach = weakref.finalize(self, hooks.pop_all().close)

    def close(self) -> None:
        """Takes the hooks away; the model is as it was. Findings can still be reported."""
        self._close()
        self._detach()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def report(self) -> Finding | None:
        """Returns the first fault of the newest run of consecutive faulty batches, and clears it.

        None if all was finite. Waits for the device. Every process of the group must call it: all
        of them receive the finding that came first in the order of execution.
        """
        self._close(wait=True)
        mine, broken = self._finding, [] if self._finding else self._broken_gradients()
        if broken and self._last is not None and broken[0] not in self._last.left:
            mine = self._last.first_fault(self._habits, broken[:1])
        elif broken:
            # No pass shows why.
            seen_in, last = f"the gradient of {broken[0]!r}", self.batches - 1
            mine = Finding("unseen", broken[0], seen_in, batch=last, last=last)
        self._finding = self._last = None
        self._stale = self._stale or mine is not None
        self.shared.detailed = self.shared.detailed or self._stale
        world = process_world(self._group)
        found = enumerate(gather_json(mine and asdict(mine), world, self.shared.device))
        faults = [Finding(**{**f, "rank": i, "rows": tuple(f["rows"])}) for i, f in found if f]
        # A fault that is seen only in reduced gradients comes after all others: another process may
        # know the pass that caused it.
        return min(faults, key=lambda f: (f.order[0] > 2, -f.last, f.batch, *f.order), default=None)

    def norms(self) -> dict[str, float]:
        """Takes the norm of each parameter's whole gradient as it is now, by name.

        ``math.hypot(*watch.norms().values())`` is that of all together. Waits for the device.
        Under sharding it is a collective, which every process of the mesh must join.
        """
        named = [(own_name(n, self.model), p) for n, p in self.model.named_parameters()]
        self._sum = self._sum or PackedSum([p for _, p in named])
        present = [i for i, (_, p) in enumerate(named) if p.grad is not None]
        device = self.shared.device
        squares = torch.zeros(len(named), dtype=exact(device), device=device)
        if present:
            some = [(named[i][1], named[i][1].grad) for i in present]
            # A sparse one may have several parts of a row.
            dense = [(p, g.coalesce() if g.is_sparse else g) for p, g in some if g is not None]
            squares[present] = square_sums([values(aligned(g, p)) for p, g in dense], squares.dtype)
        # All parameters travel, those without a gradient as zeros: one length on every process.
        norms = self._sum.of_all(squares[None])[0].sqrt().tolist()
        return {named[i][0]: norms[i] for i in present}

    def begin(self, inputs: Any) -> None:
        """Begins a pass: the model is called."""
        if not torch.is_grad_enabled() or is_planned():
            self.shared.current = None
            return
        self._judge(wait=False)
        if len(self._open) == _MOST_OPEN:
            self._close()
        self.shared.current = Pass(self.batches, self.shared, inputs)
        self.batches += 1
        self._awaited = False
        self._open.append(self.shared.current)

    def await_backward(self, one: Pass) -> None:
        """Begins a backward pass: asks the engine to close the open passes when it is over."""
        if one not in self._open:
            # The graph was kept: the same forward pass again.
            self._closed = deque([x for x in some if x is not one] for some in self._closed)
            self._open.append(one)
        if self._awaited:
            return
        self._awaited = True
        # Here and not in the forward pass, because a loop may clear gradients between the two.
        broken = {*self._broken_gradients()} if self._stale else set[str]()
        self._stale = bool(broken)
        for other in self._open:
            other.left = broken
        engine = torch.autograd.Variable._execution_engine
        # Twice, and so after callbacks by which FSDP and DDP put gradients in their places.
        engine.queue_callback(lambda: engine.queue_callback(self._close))

    def _close(self, *, wait: bool = False) -> None:
        """Ends all open passes."""
        for over in self._open:
            new = (not (is_finite(x.value) or self._habits.has(x)) for x in over.seen)
            # On a device that look would wait for it.
            if self.shared.deferred or any(new):
                # A fault has to be explained, and weights are still those of the pass.
                over.weights = self._look(lambda p: p)
                over.gradients = self._look(lambda p: p.grad) if over.backward else {}
            over.close()
        self._closed.append(self._open)
        self.shared.current, self._awaited, self._open = None, False, []
        self._judge(wait=wait)

    def _judge(self, *, wait: bool) -> None:
        """Looks at passes that have arrived on the host, together at those of a backward pass."""
        while self._closed and all(one.arrived(wait=wait) for one in self._closed[0]):
            together = self._closed.popleft()
            if not together:
                continue
            before, self._last = self._last, together[-1]
            found = [fault for one in together if (fault := one.fault(self._habits))]
            # What any of them saw in its forward pass comes first; backward goes from the last.
            found.sort(key=lambda f: (f.order[0], f.batch if f.in_forward else -f.batch))
            if found:
                goes_on = self._finding and before and self._finding.last == before.batch
                begun = self._finding if goes_on else None
                self._finding = replace(begun or found[0], last=self._last.batch)
                self._stale = self.shared.detailed = True

    def _broken_gradients(self) -> list[str]:
        """Names of the parameters whose gradients are not finite now."""
        return [n for n, x in self._look(lambda p: p.grad).items() if not is_finite(x)]

    def _look(self, of: Callable[[Tensor], Any]) -> dict[str, Any]:
        """Largest magnitudes, on the device: finite exactly where something of a parameter is."""
        # A tied one by each of its names.
        uses = self.model.named_parameters(remove_duplicate=False)
        known = ((own_name(n, self.model), x) for n, p in uses if has_values(x := of(p)))
        some = {n: values(x) for n, x in known if x.is_floating_point() or x.is_complex()}
        # An empty tensor has no largest magnitude.
        numbers = [x if x.numel() else x.new_zeros(1) for x in some.values()]
        return dict(zip(some, torch._foreach_norm(numbers, math.inf), strict=True)) if some else {}
