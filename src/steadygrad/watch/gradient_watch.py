"""Names the module that first made something non-finite, in any training loop."""

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from steadygrad._checks import InputError, check_count, check_type
from steadygrad._names import own_name
from steadygrad.distributed import gather_json, process_world
from steadygrad.shards import PackedSum
from steadygrad.watch.finding import Finding, Habits, Seen, is_finite
from steadygrad.watch.norms import GradientNorms, gradient_norms
from steadygrad.watch.passes import Pass, Shared, has_values, look_each
from steadygrad.watch.taps import Tap, detach, is_watched, witnesses

__all__ = ["GradientWatch"]

# Forward passes that may wait for a backward pass; an older one counts as over.
_MOST_OPEN = 64


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
        stop_after: Number of optimizer steps in a row with gradients that are not finite, after
            which the next forward pass raises a RuntimeError. Default: never.

    Attributes:
        batches: Passes begun so far.

    Raises:
        InputError: If the whole model was compiled in place: nothing outside of it can be hooked;
            if another watch is attached to it; or if a part of it is a ScriptModule.
    """

    def __init__(
        self, model: nn.Module, process_group: Any = "all", *, stop_after: int | None = None
    ) -> None:
        check_type("model", model, nn.Module, "the module that the loop calls")
        if stop_after is not None:
            check_count("stop_after", stop_after)
        _check_hooks(model)
        self.model, self._group, self.batches = model, process_group, 0
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        # Hooks do not keep the watch alive.
        begin, await_backward = map(weakref.WeakMethod, (self.begin, self._await_backward))
        self.shared = Shared(device, begin, await_backward)
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
        # Optimizer steps in a row that were not finite, whether this one is, and how it began.
        self._stop_after, self._bad_steps, self._bad, self._mark = stop_after, 0, False, None
        self._sum: PackedSum | None = None
        # Reduced gradients are those of all processes, and do not say which of them is at fault.
        weights = witnesses(model) if process_world(process_group).size == 1 else {}
        taps = dict[nn.Module, Tap]()
        for name, module in model.named_modules():
            hooked = not any(part in weights for part in module.modules())
            taps[module] = Tap(own_name(name, model), hooked, self.shared)
            taps[module].attach(module, model)
            if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
                # Code that was compiled before has no hooks and would be reused without them.
                torch.compiler.reset()
        # A watch that is dropped leaves no hooks behind either.
        self._detach, self._taps = weakref.finalize(self, detach, [*taps]), [*taps.values()]
        # By module and name, and not by tensor: a cast or a wrapper may put another one there.
        self._witnesses = [(taps[m], m._parameters, leaf) for m, leaf in weights.items()]

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
        """Norms of the gradients as they are now, by parameter and by group.

        See :func:`gradient_norms`. The first call under sharding takes a collective more.
        """
        self._sum = self._sum or PackedSum([*self.model.parameters()])
        return gradient_norms(self.model, group_of, self._sum)

    def begin(self, inputs: Any) -> None:
        """Begins a pass: the model is called.

        Raises:
            RuntimeError: If ``stop_after`` steps in a row were not finite.
        """
        # Tensors have shapes only, or are recorded, for a tool that plans, counts or traces.
        keys = torch._C._TorchDispatchModeKey
        odd = any(map(torch._C._get_dispatch_mode, (keys.FAKE, keys.PROXY)))
        if not torch.is_grad_enabled() or odd or torch._C._is_tracing():
            self.shared.current = None
            return
        self._judge(wait=False)
        if self._stop_after is not None and self._bad_steps + self._bad >= self._stop_after:
            raise RuntimeError(
                f"Expected finite gradients. Found {self._bad_steps + self._bad} steps in a row "
                f"with some that are not: {self._own_fault()}"
            )
        # Weights' gradients would not say in which of several passes they broke.
        every = not self.batches or bool(self._open)
        self.shared.current = Pass(self.batches, self.shared, inputs, every=every)
        self.batches += 1
        self._awaited = False
        self._open.append(self.shared.current)
        if len(self._open) > _MOST_OPEN:
            self._finish([self._open.popleft()])

    def _own_fault(self) -> Finding | None:
        """What this process knows alone: not of gradients that are reduced."""
        found = self._finding or self._parameter_fault()
        if found is None or found.order[0] < 2 or process_world(self._group).size == 1:
            return found
        words = f"{found.seen_in}, which may be that of another process"
        return replace(found, kind="unknown", name="", seen_in=words)

    def _await_backward(self, one: Pass) -> None:
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
        fresh = self._gradient_mark() != self._mark
        for other in self._open:
            other.left, other.fresh = broken, fresh
        engine = Variable._execution_engine
        # Twice, and so after callbacks by which FSDP and DDP put gradients in their places.
        engine.queue_callback(lambda: engine.queue_callback(self._close))

    def _gradient_mark(self) -> Any:
        """Which gradient it is that the first parameter with one has; changes if it is cleared."""
        if self._stop_after is None:
            return None
        named = ((name, p.grad) for name, p in self.model.named_parameters())
        return next(((name, id(g), g._version) for name, g in named if g is not None), None)

    def _close(self) -> None:
        if self._open:
            last = self._open[-1]
            if self.shared.compiled:
                for tap in self._taps:
                    tap.hand_over(last)
            # From now on each of several forward passes has its own hooks.
            several = sum(one.backward for one in self._open) > 1
            if (last.backward and not several) or self.shared.compiled:
                self._ask_witnesses(last)
            self.shared.detailed = self.shared.detailed or several
        self.shared.current, self._awaited = None, False
        self._mark = self._gradient_mark()
        self._finish([*self._open])
        self._open.clear()
        self._judge(wait=False)

    def _ask_witnesses(self, last: Pass) -> None:
        """Notes gradients of weights in the place of gradients at their modules' outputs."""
        asked = list[tuple[Seen, str, Tensor]]()
        for tap, parameters, leaf in self._witnesses:
            weight, name = parameters.get(leaf), f"{tap.name}.{leaf}".lstrip(".")
            if weight is None and not tap.hooked:
                # Its bias was set to None, or pruning put another weight there.
                tap.hooked = True
                words = (
                    f"{name} is no parameter any longer, and stands for no gradient in this pass"
                )
                warnings.warn(words, stacklevel=2)
            one, gradient = tap.last.get("output"), None if weight is None else weight.grad
            # Weights of a module that was not called itself have a gradient all the same.
            if one is None or tap.batch != last.batch or tap.hooked or one.gradient is not None:
                continue
            if has_values(gradient) and name not in last.left:
                asked.append((one, name, gradient))
        looks = look_each((gradient for *_, gradient in asked), now=not self.shared.deferred)
        for (one, name, _), found in zip(asked, looks, strict=True):
            one.weight = name
            setattr(one, "second" if last.twice else "gradient", found)
            last.broken = last.broken or found is False

    def _finish(self, together: list[Pass]) -> None:
        self._closed.append(together)
        for over in together:
            every = self.shared.deferred or (
                over.broken
                and any(not is_finite(x.value) and not self._habits.has(x) for x in over.seen)
            )
            if every:
                # A fault has to be explained, and weights are still those of the pass.
                over.weights, names = self._look(lambda p: p), dict[int, str]()
                for use, p in self.model.named_parameters(remove_duplicate=False):
                    name = own_name(use, self.model)
                    over.uses[name] = names.setdefault(id(p), name)
            if over.backward and (every or self._stop_after is not None):
                over.gradients = self._look(lambda p: p.grad)
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
            if over.fresh:
                self._bad_steps, self._bad = self._bad_steps + 1 if self._bad else 0, False
            self._bad = self._bad or bool(found)
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
        named = ((own_name(n, self.model), of(p)) for n, p in self.model.named_parameters())
        known = ((n, x) for n, x in named if has_values(x))
        some = {n: x for n, x in known if x.is_floating_point() or x.is_complex()}
        looks = look_each(some.values(), now=not self.shared.deferred)
        return dict(zip(some, looks, strict=True))


def _check_hooks(model: nn.Module) -> None:
    if model._compiled_call_impl is not None:
        raise InputError("Expected torch.compile(model), as hooks need. Found model.compile().")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"Expected a model before torch.jit. Found a ScriptModule at {name!r}."
            )
        if is_watched(module):
            raise InputError(
                f"Expected modules without a GradientWatch. Found one at {name!r}. "
                "Remedy: close() the other watch first."
            )
