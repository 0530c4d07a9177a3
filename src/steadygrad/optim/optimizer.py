"""The life of a step, which all optimizers with per-tensor norms share.

A step is a few passes over plain local tensors with a packed sum over shards after each, and a
little arithmetic on columns with one number for each tensor in between. Everything it decides it
decides on the device: nothing here makes the host wait for one.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadygrad import kernels
from steadygrad._checks import check_count, check_number
from steadygrad.optim.batch import Gradients, ParamBatch
from steadygrad.optim.building import BatchBuilder
from steadygrad.optim.checks import check_capture, dense_gradient
from steadygrad.optim.diagnostics import Report
from steadygrad.optim.skipping import SkipMonitor
from steadygrad.shards import PackedSum, PartialGradients, ZeroSum

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(BatchBuilder):
    """An optimizer whose norms are of whole tensors, however they are sharded.

    A subclass says how a step goes; this class keeps torch's contract.

    Attributes:
        skipped: Steps left out because a gradient was not finite, a tensor.
        warn_after_skips: Skipped steps in a row to warn after; None: never.
    """

    warn_after_skips: int | None = 100
    # First sums of each parameter.
    _first_rows = 1
    # Caches, neither saved nor copied.
    _built: Sequence[ParamBatch] = ()
    _recorded: Sequence[ParamBatch] = ()
    _partial: PartialGradients | None = None
    # Whether any process has a gradient that is partial, with one flag for each parameter.
    _anywhere: Tensor | None = None
    _packed_sum: PackedSum | None = None
    _skips: SkipMonitor | None = None
    # Where ZeroRedundancyOptimizer gave it some of the parameters only.
    _zero_sum: ZeroSum | None = None

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._zero_sum = ZeroSum.of_caller()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler hands over its scale and its verdict, without a wait.

        As in torch only where ``fused=True`` was asked for: trainers conclude from this flag that
        they must not clip the gradients, and they cannot see which steps are skipped.
        """
        return all(group["fused"] is True for group in self.param_groups)

    @property
    def skipped(self) -> Tensor:
        """Steps left out because a gradient was not finite, with shape ``()``."""
        self._fill_state()
        first = next((p for group in self.param_groups for p in group["params"]), None)
        return torch.zeros(()) if first is None else self.state[first]["skipped"]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step.

        If any gradient is not finite, on any process that shares a parameter, no weight and no
        state moves, and the step is counted in ``skipped``. Processes that share no parameter
        (stages of a pipeline) agree through a gradient scaler's ``found_inf`` only.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            The closure's loss.
        """
        check_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            self._step()
            return loss
        try:
            # State tensors that are made in inference mode could not be changed outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self._step()
        except BaseException:
            # A gradient scaler takes these back after a step, and not after an error.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        return loss

    def _step(self) -> None:
        batches = self._batches()
        # Where others may have work they wait for this process, too.
        if batches or self._over_shards() is not None:
            ok = self._update(batches)
            self._skips = self._skips or SkipMonitor(type(self).__name__)
            self._skips.count(ok, self.state.values(), self.warn_after_skips)
            for batch in batches:
                batch.finish()

    def _update(self, batches: Sequence[ParamBatch]) -> Tensor:
        """Moves weights and states.

        Args:
            batches: All parameters that take part.

        Returns:
            Whether the step was taken, with shape ``()``.
        """
        raise NotImplementedError

    def _batches(self) -> list[ParamBatch]:
        """The parameters of this step with their gradients."""
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self._check_edited()
        self._find_params()
        # A gradient scaler sets it for a step whose gradients it has not unscaled.
        given = self._gradients(getattr(self, "grad_scale", None))
        batches, key = self._built, None if compiling else (self._modes, len(kernels.BROKEN))
        if compiling or self._built_for != key or not _refresh(batches, given):
            batches = self._build(given.grads)
            if not _refresh(batches, given):
                raise RuntimeError(
                    "Expected gradients that stay the same during a step. Found one that changed. "
                    "Remedy: no backward pass and no zero_grad() in another thread meanwhile."
                )
            if not compiling:
                # Replays of a graph keep writing to what it has recorded: none of it is freed.
                self._recorded = [*self._recorded, *(b for b in self._built if b.recorded)]
                self._built, self._built_for = batches, key
        return _in_step(batches, given)

    def _gradients(self, grad_scale: Tensor | None) -> Gradients:
        """Local gradients of all parameters.

        Args:
            grad_scale: Loss scale that is still in them; None: none is.
        """
        grads: list[Tensor | None] = [p.grad for p in self._params]
        given = [g for g in grads if g is not None]
        has_grad = [True] * len(grads)
        if len(given) < len(grads):
            has_grad = [
                g is not None or (self._none_is_zero and p.requires_grad)
                for p, g in zip(self._params, grads, strict=True)
            ]
        is_odd = {torch.strided} < {torch.strided, *map(attrgetter("layout"), given)}
        if not is_odd and not any(self._sharded):
            self._anywhere = None
            return Gradients(grads, has_grad, has_grad, grad_scale)
        grads = [
            g if g is None else dense_gradient(p) for p, g in zip(self._params, grads, strict=True)
        ]
        if self._partial is None or not self._partial.is_of(self._params):
            self._partial, self._packed_sum = PartialGradients(self._params), None
        grads, self._anywhere = self._partial(grads, self._params)
        # Another process may have a gradient where this one has none.
        in_step = [
            here or (shared and p.requires_grad)
            for here, shared, p in zip(has_grad, self._sharded, self._params, strict=True)
        ]
        return Gradients(grads, has_grad, in_step, grad_scale)

    # Sums over shards, and what all processes decide from them.

    def _first_sums(
        self,
        batches: Sequence[ParamBatch],
        own: Sequence[Tensor],
        finite: Sequence[Callable[[Tensor], Tensor]] | None = None,
        terms: Callable[[], Sequence[tuple[int | slice, Tensor]]] = tuple,
    ) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Adds up a step's first sums, and decides whether the step is taken.

        Args:
            batches: The batches; ``taken`` of each is set.
            own: Local sums of the batches, each with shape ``(k, tensors)``.
            finite: For each a function from its sums to whether each parameter's are finite, with
                shape ``(tensors)``; None: the first row decides.
            terms: Says for each the numbers of joint sums of several parameters, at most two a
                group, and each parameter's local parts of them, the last axis by tensor.

        Returns:
            The sums over all shards; whether any parameter takes the step, with shape ``()``; and
            the joint sums, None where every process finds the same from the sums over shards.
        """
        finite = finite or [_finite_norms] * len(batches)
        bad, joint = _bad(own, finite, getattr(self, "found_inf", None)), None
        total, totals, has_grad = self._over_shards(), list(own), [b.has_grad for b in batches]
        if (found := self._anywhere) is not None:
            has_grad = [b.has_grad | found.to(b.device)[b.index] for b in batches]
        if total is not None:
            # A plain tensor's infinity, and who has a gradient, travel with the sums.
            rows = [torch.cat([c, a.to(c)[None]]) for a, c in zip(has_grad, own, strict=True)]
            parts = () if total.is_uniform else terms()
            index, count = [b.index for b in batches], 2 * len(self.param_groups)
            totals, bad, means = total(index, rows, self._first_rows + 1, bad, parts, count)
            joint = None if total.is_uniform else means
            has_grad = [sums[-1] > 0 for sums in totals]
            totals = [sums[:-1] for sums in totals]
            bad = bad | _bad(totals, finite, None).to(bad.device)
        ok = ~bad
        for batch, anywhere in zip(batches, has_grad, strict=True):
            batch.taken = anywhere & ok.to(batch.device)
        return totals, ok, joint

    def _sums(
        self, batches: Sequence[ParamBatch], own: Sequence[Tensor], rows: int
    ) -> list[Tensor]:
        """Sums over all shards of local sums, each with shape ``(rows, tensors)``.

        Every process gets here, also one that works on nothing.
        """
        total = self._over_shards()
        return list(own) if total is None else total([b.index for b in batches], own, rows)[0]

    def _over_shards(self) -> PackedSum | ZeroSum | None:
        """Adds up columns of all parameters over shards; None: nothing is sharded."""
        if not any(self._sharded):
            return self._zero_sum
        if self._packed_sum is None:
            self._packed_sum = PackedSum(self._params)
        return self._packed_sum if self._packed_sum.collectives else None

    def diagnostics(self, top: int = 10, *, grad_scale: float = 1.0) -> list[dict[str, Any]]:
        """Reports the parameters that stand out, by group; see :mod:`steadygrad.optim.diagnostics`.

        Call it after ``backward`` and before ``zero_grad``, on every process. It reads tensors, and
        so waits for the device; nothing of it is computed unless it is called.

        Args:
            top: How many parameters to name in each list.
            grad_scale: Loss scale that is still in the gradients: ``scaler.get_scale()`` where
                ``scaler.unscale_(optimizer)`` has not been called.

        Returns:
            A dictionary of plain numbers for each group.
        """
        check_count("top", top)
        check_number("grad_scale", grad_scale, low=0, low_open=True)
        with torch.inference_mode(False), torch.no_grad():
            self._find_params()
            scale = torch.tensor(grad_scale, dtype=torch.float64, device="cpu")
            given = self._gradients(scale)
            reports = []
            for i, (group, places) in enumerate(self._grouped()):
                batches = self._build_group(group, places, given.grads, is_report=True)
                _refresh(batches, given)
                own = _in_step(batches, given)
                reports.append(Report(i, group, own, self.state, top))
            return self._diagnose(reports)

    def _diagnose(self, reports: Sequence[Report]) -> list[dict[str, Any]]:
        """Reports on the batches of all groups, without a step."""
        raise NotImplementedError


def _finite_norms(sums: Tensor) -> Tensor:
    # A sum of squares is below infinity unless it is infinite or NaN.
    return sums[0] < torch.inf


def _bad(
    sums: Sequence[Tensor],
    finite: Sequence[Callable[[Tensor], Tensor]],
    found_inf: Tensor | None,
) -> Tensor:
    """Whether any sum of this process is not finite, or a scaler has seen such a gradient."""
    flags = [(~look(own)).any() for look, own in zip(finite, sums, strict=True)]
    # A number where the scaler has seen no gradient at all.
    if isinstance(found_inf, Tensor):
        flags.append((found_inf != 0).reshape(()))
    if len(flags) < 2:
        return flags[0] if flags else torch.zeros((), dtype=torch.bool)
    device = next((f.device for f in flags if f.device.type != "cpu"), flags[0].device)
    return torch.stack([flag.to(device) for flag in flags]).any()


def _refresh(batches: Sequence[ParamBatch], given: Gradients) -> bool:
    """Reads weights and gradients of all batches; False if they must be built anew."""
    return all(batch.refresh(given) for batch in batches)


def _in_step(batches: Sequence[ParamBatch], given: Gradients) -> list[ParamBatch]:
    """Batches of which at least one parameter is worked on."""
    return [batch for batch in batches if any(given.in_step[i] for i in batch.places)]
