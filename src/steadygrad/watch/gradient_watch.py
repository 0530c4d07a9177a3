"""Names the module that first made something non-finite, in any training loop."""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from steadygrad._checks import InputError, check_type
from steadygrad._names import own_name
from steadygrad.distributed import gather_json, process_world
from steadygrad.numerics import exact, square_sums
from steadygrad.shards import PackedSum, aligned
from steadygrad.watch.finding import Finding, Habits, is_finite
from steadygrad.watch.passes import Pass, Shared, has_values, look_each, values
from steadygrad.watch.taps import Tap, detach, is_watched

__all__ = ["GradientNorms", "GradientWatch"]

# Forward passes that may wait for a backward pass; an older one counts as over.
_MOST_OPEN = 64


@dataclass(frozen=True)
class GradientNorms:
    """Norms of gradients; reading them waits for the device.

    Attributes:
        names: Parameters that have a gradient on this process.
        groups: Groups of the parameters.
        squares: Squares of their norms, float64, with shape ``(len(names),)``.
    """

    names: Sequence[str]
    groups: Sequence[str]
    squares: Tensor

    @property
    def total(self) -> float:
        """The norm of all gradients together."""
        return float(self.squares.sum().sqrt())

    @property
    def by_parameter(self) -> Mapping[str, float]:
        """The norm of each parameter's gradient."""
        return dict(zip(self.names, self.squares.sqrt().tolist(), strict=True))

    @property
    def by_group(self) -> Mapping[str, float]:
        """The norm of each group's gradients together."""
        sums = dict.fromkeys(self.groups, 0.0)
        for group, square in zip(self.groups, self.squares.tolist(), strict=True):
            sums[group] += square
        return {group: total**0.5 for group, total in sums.items()}


class GradientWatch:
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
    What is infinite in passes without a fault, as a mask is, is not blamed later.

    Args:
        model: The model as it is called, after DDP, ``fully_shard`` and ``torch.compile``, on the
            device where it trains.
        process_group: Processes whose findings :meth:`report` compares: ``"all"``, None for this
            one alone, or a process group.

    Attributes:
        batches: Passes begun so far.

    Raises:
        InputError: If the whole model was compiled in place: nothing outside of it can be hooked;
            if another watch is attached to it; or if a part of it is a ScriptModule.
    """

    def __init__(self, model: nn.Module, process_group: Any = "all") -> None:
        check_type("model", model, nn.Module, "the module that the loop calls")
        _check_hooks(model)
        self.model, self._group, self.batches = model, process_group, 0
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.shared = Shared(device, weakref.ref(self))
        # Passes that began, and those that are over, with the others of one backward pass.
        self._open, self._closed, self._awaited = deque[Pass](), deque[list[Pass]](), False
        self._habits = Habits()
        self._finding: Finding | None = None
        # Whether a pass without a fault came after the finding.
        self._recovered = True
        # The last pass that was over since the last report.
        self._last: Pass | None = None
        # Whether gradients may be left that were not finite before a pass.
        self._stale = False
        self._sum: PackedSum | None = None
        taps = dict[nn.Module, Tap]()
        for name, module in model.named_modules():
            taps[module] = Tap(own_name(name, model), self.shared)
            taps[module].attach(module, model)
            if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
                # Code that was compiled before has no hooks and would be reused without them.
                torch.compiler.reset()
        # A watch that is dropped leaves no hooks behind either.
        self._detach, self._taps = weakref.finalize(self, detach, [*taps]), [*taps.values()]

    def close(self) -> None:
        """Takes the hooks away; the model is as it was. Findings can still be reported."""
        self._close()
        self._detach()

    def __enter__(self) -> "GradientWatch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def report(self) -> Finding | None:
        """Returns the first fault of the newest run of consecutive faulty batches, and clears it.

        None if all was finite.
        Waits for the device. Every process of the group must call it: all of them receive the
        finding that came first in the order of execution.
        """
        self._close()
        self._judge(wait=True)
        mine = self._finding or self._parameter_fault()
        self._finding, self._recovered, self._last = None, True, None
        self._stale = self._stale or mine is not None
        world = process_world(self._group)
        if world.size == 1:
            return mine
        found = gather_json(mine and asdict(mine), world, self.shared.ticks.device)
        faults = [
            Finding(**{**one, "rank": rank, "rows": tuple(one["rows"])})
            for rank, one in enumerate(found)
            if one
        ]
        # A fault that is seen only in reduced gradients is dropped if another process knows the
        # pass that caused it.
        faults = [fault for fault in faults if fault.order[0] < 3] or faults
        return min(faults, key=lambda f: (-f.last, f.batch, *f.order), default=None)

    def norms(self, group_of: Callable[[str], str] | None = None) -> GradientNorms:
        """Takes the norms of whole gradients as they are now, also of a watch that is closed.

        Under sharding in one collective for each mesh, and one more in the first call, which every
        process of the mesh must make.

        Args:
            group_of: Gives a parameter's group by its name. Default: the part of the model, a child
                or an item of a list of modules.
        """
        named = [(own_name(n, self.model), p) for n, p in self.model.named_parameters()]
        self._sum = self._sum or PackedSum([p for _, p in named])
        present = [i for i, (_, p) in enumerate(named) if p.grad is not None]
        device = self.shared.ticks.device
        squares = torch.zeros(len(named), dtype=exact(device), device=device)
        if present:
            some = [(named[i][1], named[i][1].grad) for i in present]
            # A sparse one may have several parts of a row.
            dense = [(p, g.coalesce() if g.is_sparse else g) for p, g in some if g is not None]
            squares[present] = square_sums([values(aligned(g, p)) for p, g in dense], squares.dtype)
        # All parameters travel, those without a gradient as zeros: one length on every process.
        squares = self._sum.of_all(squares[None])[0]
        names = [named[i][0] for i in present]
        return GradientNorms(names, [(group_of or _part)(name) for name in names], squares[present])

    def begin(self, inputs: Any) -> None:
        """Begins a pass: the model is called."""
        # Tensors have shapes only, or are recorded, for a tool that plans, counts or traces.
        keys = torch._C._TorchDispatchModeKey
        odd = any(map(torch._C._get_dispatch_mode, (keys.FAKE, keys.PROXY)))
        if not torch.is_grad_enabled() or odd or torch._C._is_tracing():
            self.shared.current = None
            return
        self._judge(wait=False)
        self.shared.current = Pass(self.batches, self.shared, inputs, every=not self.batches)
        self.batches += 1
        self._awaited = False
        self._open.append(self.shared.current)
        if len(self._open) > _MOST_OPEN:
            self._finish([self._open.popleft()])

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
        engine = Variable._execution_engine
        # Twice, and so after callbacks by which FSDP and DDP put gradients in their places.
        engine.queue_callback(lambda: engine.queue_callback(self._close))

    def _close(self) -> None:
        if self._open:
            last = self._open[-1]
            if self.shared.compiled:
                for tap in self._taps:
                    tap.hand_over(last)
        self.shared.current, self._awaited = None, False
        self._finish([*self._open])
        self._open.clear()
        self._judge(wait=False)

    def _finish(self, together: list[Pass]) -> None:
        self._closed.append(together)
        for over in together:
            every = self.shared.deferred or (
                over.broken
                and any(not is_finite(x.value) and not self._habits.has(x) for x in over.seen)
            )
            if every:
                # A fault has to be explained, and weights are still those of the pass.
                over.weights = self._look(lambda p: p)
                over.gradients = self._look(lambda p: p.grad) if over.backward else {}
                over.broken = over.broken or False in over.gradients.values()
            over.close()

    def _judge(self, *, wait: bool) -> None:
        """Looks at passes that have arrived on the host, together at those of a backward pass."""
        while self._closed and all(one.arrived(wait=wait) for one in self._closed[0]):
            together = self._closed.popleft()
            if not together:
                continue
            self._last = over = together[-1]
            found = [fault for one in together if (fault := one.fault(self._habits))]
            # What any of them saw in its forward pass comes first; backward goes from the last.
            found.sort(key=lambda f: (f.order[0], f.batch if f.in_forward else -f.batch))
            if found:
                begun = None if self._recovered else self._finding
                self._finding = replace(begun or found[0], last=over.batch)
            self._recovered = not found
            self._stale = self._stale or bool(found)
            self.shared.detailed = self.shared.detailed or self._stale

    def _parameter_fault(self) -> Finding | None:
        """A gradient that is not finite though no pass shows why."""
        broken = self._broken_gradients()
        if not broken:
            return None
        if self._last is not None and broken[0] not in self._last.left:
            return self._last.explain(self._habits, broken[:1])
        kind, last = "left" if self.batches else "unseen", self.batches - 1
        return Finding(kind, broken[0], f"the gradient of {broken[0]!r}", batch=last, last=last)

    def _broken_gradients(self) -> list[str]:
        """Names of the parameters whose gradients are not finite now."""
        return [n for n, x in self._look(lambda p: p.grad).items() if not is_finite(x)]

    def _look(self, of: Callable[[Tensor], Any]) -> dict[str, Any]:
        """Looks at something of all parameters."""
        # A tied one by each of its names.
        uses = self.model.named_parameters(remove_duplicate=False)
        known = ((own_name(n, self.model), x) for n, p in uses if has_values(x := of(p)))
        some = {n: x for n, x in known if x.is_floating_point() or x.is_complex()}
        looks = look_each(some.values(), now=not self.shared.deferred)
        return dict(zip(some, looks, strict=True))


def _check_hooks(model: nn.Module) -> None:
    if model._compiled_call_impl is not None:
        raise InputError(
            "Expected a `model` without model.compile(), which hooks need. Found one with it. "
            "Remedy: torch.compile(model)."
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"Expected a model of Python modules. Found a ScriptModule at {name!r}. "
                "Remedy: watch it before torch.jit."
            )
        if is_watched(module):
            raise InputError(
                f"Expected modules without a GradientWatch. Found one at {name!r}. "
                "Remedy: close() the other watch first."
            )


def _part(name: str) -> str:
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first
