"""Names the module that first made something non-finite, in any training loop."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from steadygrad._checks import InputError, check_type
from steadygrad._names import plain_name
from steadygrad.sharding import gather_json, local, process_world
from steadygrad.watch.finding import (
    BATCH,
    GRADIENT,
    OUTPUT,
    PARAMETER,
    WEIGHT,
    Finding,
    first_fault,
)
from steadygrad.watch.norms import GradientNorms, gradient_norms
from steadygrad.watch.passes import Clock, Pass, floating
from steadygrad.watch.taps import Tap, in_backward

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
    What is infinite in passes without a fault, as a mask is, is never blamed.

    Args:
        model: The model as it is called, after DDP, ``fully_shard`` and ``torch.compile``.
        process_group: Processes whose findings :meth:`report` compares: ``"all"``, None for this
            one alone, or a process group.

    Attributes:
        batches: Passes begun so far.
        current: The last pass begun; None once it is over.

    Raises:
        InputError: If the whole model was compiled in place: nothing outside of it can be hooked.
    """

    def __init__(self, model: nn.Module, process_group: Any = "all") -> None:
        check_type("model", model, nn.Module, "the module that the loop calls")
        if model._compiled_call_impl is not None:
            raise InputError(
                "Expected a model that is compiled by torch.compile(model), or not as a whole. "
                "Found one after model.compile(). Remedy: `compiled = torch.compile(model)`, then "
                "GradientWatch(compiled)."
            )
        self.model, self._group = model, process_group
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.batches, self.clock = 0, Clock(device)
        self.current: Pass | None = None
        self._open: deque[Pass] = deque()
        self._closed: deque[Pass] = deque()
        self._awaited = False
        self._finding: Finding | None = None
        # Names of outputs that are infinite though all is well.
        self._usual: set[str] = set()
        self._taps: dict[nn.Module, Tap] = {}
        self._handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        # A leaf module's weights tell whether the gradient at its output is finite: theirs are sums
        # over it. By their places, for wrappers exchange parameters.
        self._witnesses: list[tuple[str, nn.Module, str]] = []
        # Weights' gradients are those of all processes, and do not say which of them is at fault.
        alone = process_world(process_group).size == 1
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        for full, module in model.named_modules():
            name, witness = _own_name(full, model), _witness(module, uses) if alone else None
            if witness is not None:
                self._witnesses.append((name, module, witness))
            tap = self._taps[module] = Tap(name, self, device, hooked=witness is None)
            self._handles.append(tap.attach(module))

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        for module, tap in self._taps.items():
            tap.detach(module)

    def report(self) -> Finding | None:
        """The first fault since the last report, and forgets it; None if all was finite.

        Waits for the device. Every process of the group must call it: all of them are handed the
        finding of the one that came first in the order of execution.
        """
        self._close()
        self._look(wait=True)
        if self._finding is None:
            self._note_gradients()
        mine, self._finding = self._finding, None
        world = process_world(self._group)
        if world.size == 1:
            return mine
        found = gather_json(mine and asdict(mine), world, self.clock.ticks.device)
        faults = [Finding(**{**one, "rank": rank}) for rank, one in enumerate(found) if one]
        return min(faults, key=lambda fault: (fault.batch, *fault.order), default=None)

    def norms(self, group_of: Callable[[str], str] | None = None) -> GradientNorms:
        """Norms of the gradients as they are now, by parameter and by group.

        See :func:`gradient_norms`.
        """
        return gradient_norms(self.model, group_of)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or in_backward():
            return
        if not torch.is_grad_enabled():
            self.current = None
            return
        self.current = current = Pass(self.batches, self.clock)
        self.batches += 1
        self._awaited = False
        for tensor in [*floating(args), *floating(kwargs)]:
            # A mask may be minus infinity.
            current.note(BATCH, "", tensor.detach().clamp(min=-1.0))
        self._open.append(current)
        if len(self._open) > _MOST_OPEN:
            self._finish(self._open.popleft())

    def await_backward(self) -> None:
        """Asks the engine to close the open passes when the backward pass is over."""
        if not self._awaited:
            self._awaited = True
            Variable._execution_engine.queue_callback(self._close)

    def _close(self) -> None:
        if self._open:
            last = self._open[-1]
            for tap in self._taps.values() if self.clock.used else ():
                tap.take(last)
            if last.backward:
                self._note_weights(last)
        self.current, self._awaited = None, False
        while self._open:
            self._finish(self._open.popleft())
        self._look(wait=False)

    def _finish(self, over: Pass) -> None:
        over.close()
        self._closed.append(over)

    def _note_weights(self, current: Pass) -> None:
        names, gradients = [], []
        for name, module, leaf in self._witnesses:
            parameter = module._parameters.get(leaf)
            if parameter is not None and parameter.grad is not None:
                names.append(name)
                gradients.append(_values(parameter.grad))
        current.note_all(GRADIENT, names, gradients)
        if self.clock.deferred:
            # Otherwise they are looked at where a fault has to be explained.
            named = self.model.named_parameters()
            weights = {_own_name(name, self.model): local(p.detach()) for name, p in named}
            current.note_all(WEIGHT, [*weights], [*weights.values()])

    def _note_gradients(self) -> None:
        """Looks for a fault that no module saw: in the gradients of weights themselves."""
        last, named = Pass(self.batches - 1, self.clock), self.model.named_parameters()
        found = [(_own_name(name, self.model), p.grad) for name, p in named if p.grad is not None]
        last.note_all(PARAMETER, [name for name, _ in found], [_values(g) for _, g in found])
        last.backward = True
        self._finish(last)
        self._look(wait=True)

    def _look(self, *, wait: bool) -> None:
        """Looks at passes that have arrived on the host."""
        while self._closed and self._closed[0].arrived(wait=wait):
            over = self._closed.popleft()
            if self._finding is None:
                self._finding = self._judge(over)

    def _judge(self, over: Pass) -> Finding | None:
        """The first fault of a pass; what is infinite without one is remembered as usual."""
        if over.finite():
            return None
        events = over.events()
        if over.backward and all(e.finite for e in events if e.what in (GRADIENT, PARAMETER)):
            self._usual |= {e.name for e in events if not e.finite}
            return None
        made = [e.finite for e in events if e.what in (BATCH, OUTPUT)]
        if not over.backward and made[-1:] != [False]:
            # Evaluated with gradients enabled: nobody knows yet what is usual.
            return None
        known = [e for e in events if e.finite or e.name not in self._usual]
        return first_fault(known, over.consumers, over.batch)


def _witness(module: nn.Module, uses: Mapping[int, int]) -> str | None:
    """The smallest weight of a module without submodules that only it uses, and that is trained."""
    own = {leaf: p for leaf, p in module._parameters.items() if p is not None}
    if [*module.children()] or any(uses[id(p)] > 1 for p in own.values()):
        return None
    sizes = {leaf: p.numel() for leaf, p in own.items() if p.requires_grad}
    return min(sizes, key=lambda leaf: sizes[leaf], default=None)


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else local(gradient)


def _own_name(name: str, model: nn.Module) -> str:
    """A name in the model that DDP or torch.compile wrapped."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        name = name.partition(".")[2]
    return plain_name(name)
