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
from steadygrad.watch.passes import Clock, Pass, has_values, look_each
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
        current: The last pass begun; None once it is over.

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
        if model._compiled_call_impl is not None:
            raise InputError(
                "Expected a model that is compiled by torch.compile(model), or not as a whole. "
                "Found one after model.compile(). Remedy: `compiled = torch.compile(model)`, then "
                "GradientWatch(compiled)."
            )
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise InputError(
                    f"Expected modules of Python code. Found a ScriptModule at {name!r}, whose "
                    "hooks see no gradients. Remedy: watch the model before torch.jit."
                )
            if is_watched(module):
                raise InputError(
                    f"Expected modules without a GradientWatch. Found one at {name!r}. "
                    "Remedy: close() the other watch first."
                )
        self.model, self._group = model, process_group
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.batches, self.clock = 0, Clock(device, self)
        self.current: Pass | None = None
        self._open: deque[Pass] = deque()
        self._closed: deque[Pass] = deque()
        self._awaited = False
        self._finding: Finding | None = None
        # Whether a pass without a fault came after the finding.
        self._recovered = True
        # Whether a pass ended since the last report, and gradients that were not finite then.
        self._passed, self._left = False, set[str]()
        # Whether gradients may be left that were not finite before a pass.
        self._stale = False
        self._habits = Habits()
        self._last: Pass | None = None
        self._stop_after, self._bad_steps, self._bad = stop_after, 0, False
        self._mark: Any = None
        self._sum: PackedSum | None = None
        # Reduced gradients are those of all processes, and do not say which of them is at fault.
        weights = witnesses(model) if process_world(process_group).size == 1 else {}
        self._taps: dict[nn.Module, Tap] = {}
        for name, module in model.named_modules():
            hooked = not any(part in weights for part in module.modules())
            self._taps[module] = Tap(own_name(name, model), hooked, self.clock)
            self._taps[module].attach(module, model)
            if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
                # Code that was compiled before has no hooks and would be reused without them.
                torch.compiler.reset()
        # A watch that is dropped leaves no hooks behind either.
        self._detach = weakref.finalize(self, detach, [*self._taps])
        # By module and name, and not by tensor: a cast or a wrapper may put another one there.
        self._witnesses = [(self._taps[m], m._parameters, leaf) for m, leaf in weights.items()]

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
        self._finding, self._recovered, self._passed = None, True, False
        self._left = {*self._broken_gradients()} if mine is not None else set()
        world = process_world(self._group)
        if world.size == 1:
            return mine
        found = gather_json(mine and asdict(mine), world, self.clock.ticks.device)
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
            self.current = None
            return
        self._judge(wait=False)
        if self._stop_after is not None and self._bad_steps + self._bad >= self._stop_after:
            found = self._finding or self._parameter_fault()
            if found and found.order[0] > 1 and process_world(self._group).size > 1:
                words = f"{found.seen_in}, which may be that of another process"
                found = replace(found, kind="unknown", name="", seen_in=words)
            raise RuntimeError(
                f"Expected finite gradients. Found {self._bad_steps + self._bad} steps in a row "
                f"with some that are not: {found} "
                "Remedy: mend the cause, or a larger `stop_after`."
            )
        self._last = None
        # Weights' gradients would not say in which of several passes they broke.
        every = not self.batches or bool(self._open)
        self.current = Pass(self.batches, self.clock, inputs, every=every)
        self.batches += 1
        self._awaited = False
        self._open.append(self.current)
        if len(self._open) > _MOST_OPEN:
            self._finish(self._open.popleft())

    def await_backward(self, one: Pass) -> None:
        """Begins a backward pass: asks the engine to close the open passes when it is over."""
        if one not in self._open:
            # The graph was kept: the same forward pass again.
            if one in self._closed:
                self._closed.remove(one)
            self._open.append(one)
        if self._awaited:
            return
        self._awaited = True
        # Here and not in the forward pass, because a loop may clear gradients between the two.
        broken = {*self._broken_gradients()} if self._left or self._stale else set[str]()
        self._left &= broken
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
            if self.clock.used:
                for tap in self._taps.values():
                    tap.hand_over(last)
            # From now on each of several forward passes has its own hooks.
            several = sum(one.backward for one in self._open) > 1
            if (last.backward and not several) or self.clock.used:
                self._ask_witnesses(last)
            self.clock.detailed = self.clock.detailed or several
        self.current, self._awaited = None, False
        self._mark = self._gradient_mark()
        while self._open:
            self._finish(self._open.popleft())
        self._judge(wait=False)

    def _finish(self, over: Pass) -> None:
        self._passed, over.window = True, self.batches
        every = self.clock.deferred or (
            over.broken
            and any(not is_finite(x.value) and not self._habits.has(x) for x in over.seen)
        )
        if every:
            # A fault has to be explained, and weights are still those of the pass.
            over.weights, names = self._look(lambda p: p), dict[int, str]()
            uses = self.model.named_parameters(remove_duplicate=False)
            for name, p in ((own_name(n, self.model), p) for n, p in uses):
                over.uses[name] = names.setdefault(id(p), name)
        if over.backward and (every or self._stop_after is not None):
            over.gradients = self._look(lambda p: p.grad)
            over.broken = over.broken or False in over.gradients.values()
        over.close()
        self._closed.append(over)

    def _look(self, of: Callable[[Tensor], Any]) -> dict[str, Any]:
        """Looks at something of all parameters."""
        named = ((own_name(n, self.model), of(p)) for n, p in self.model.named_parameters())
        known = ((n, x) for n, x in named if has_values(x))
        some = {n: x for n, x in known if x.is_floating_point() or x.is_complex()}
        looks = look_each(some.values(), now=not self.clock.deferred)
        return dict(zip(some, looks, strict=True))

    def _ask_witnesses(self, last: Pass) -> None:
        """Notes gradients of weights in the place of gradients at their modules' outputs."""
        found: list[tuple[Seen, Tensor]] = []
        for tap, parameters, leaf in self._witnesses:
            weight, name = parameters.get(leaf), f"{tap.name}.{leaf}".lstrip(".")
            if weight is None and not tap.hooked:
                # Its bias was set to None, or pruning put another weight there.
                tap.hooked = True
                warnings.warn(
                    f"{name} is no parameter any longer. GradientWatch does not see the gradient "
                    f"at the output of {tap.name!r} in this pass.",
                    stacklevel=2,
                )
            one, gradient = tap.output, weight.grad if weight is not None else None
            # Weights of a module that was not called itself have a gradient all the same.
            if one is None or tap.batch != last.batch or tap.hooked or one.gradient is not None:
                continue
            if has_values(gradient) and name not in last.left:
                one.weight = name
                found.append((one, gradient))
        looks = look_each((gradient for _, gradient in found), now=not self.clock.deferred)
        for (one, _), fine in zip(found, looks, strict=True):
            setattr(one, "second" if last.twice else "gradient", fine)
            last.broken = last.broken or fine is False

    def _judge(self, *, wait: bool) -> None:
        """Looks at passes that have arrived on the host, together at those of a backward pass."""
        while self._closed:
            window = self._closed[0].window
            together = [one for one in self._closed if one.window == window]
            if not all(one.arrived(wait=wait) for one in together):
                return
            for _ in together:
                self._last = over = self._closed.popleft()
            found = [fault for one in together if (fault := one.fault(self._habits))]
            # What any of them saw in its forward pass comes first; backward goes from the last.
            found.sort(key=lambda f: (f.order[0], f.batch if f.in_forward else -f.batch))
            fault = found[0] if found else None
            if fault is not None:
                begun = None if self._recovered else self._finding
                self._finding = replace(begun or fault, last=over.batch)
            self._recovered = fault is None
            if over.fresh:
                self._bad_steps, self._bad = self._bad_steps + 1 if self._bad else 0, False
            self._bad = self._bad or fault is not None
            self._stale = fault is not None or bool(over.left)
            self.clock.detailed = self.clock.detailed or self._stale

    def _parameter_fault(self) -> Finding | None:
        """A gradient that is not finite though no pass shows why."""
        broken = self._broken_gradients()
        if not broken:
            return None
        name = broken[0]
        if self._last is not None and self._passed and name not in self._left:
            return self._last.explain(self._habits, [name])
        kind, last = "left" if self.batches else "unseen", self.batches - 1
        return Finding(kind, name, f"the gradient of {name!r}", "", "", last, last=last)

    def _broken_gradients(self) -> list[str]:
        """Names of the parameters whose gradients are not finite now."""
        return [n for n, x in self._look(lambda p: p.grad).items() if not is_finite(x)]
