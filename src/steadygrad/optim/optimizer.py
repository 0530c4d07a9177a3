"""The life of a step, which all optimizers with per-tensor norms share.

A step is a few passes over plain local tensors with a packed sum over shards after each, and a
little arithmetic on columns with one number for each tensor in between. Everything it decides it
decides on the device: nothing here makes the host wait for one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from steadygrad._checks import check_count, check_number
from steadygrad.formulas.tensors import exact
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.diagnostics import Report
from steadygrad.optim.gathering import GatheringOptimizer, refresh, working
from steadygrad.optim.skipping import SkipMonitor
from steadygrad.sharding import PackedSum

__all__ = ["AmpState", "ShardedOptimizer", "finite_norms"]


@dataclass(frozen=True)
class AmpState:
    """What a gradient scaler has left to the optimizer.

    Attributes:
        grad_scale: Loss scale that is still in the gradients, with one element; None: none is.
        found_inf: Positive where the scaler found a gradient that is not finite; None: it did not
            look.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def unscale(self, device: torch.device, *, maximize: bool) -> Tensor:
        """Factor that removes the loss scale and gives gradients their direction."""
        sign = torch.full((), -1.0 if maximize else 1.0, dtype=exact(device), device=device)
        if self.grad_scale is None:
            return sign
        return sign / self.grad_scale.to(device).to(sign.dtype).reshape(())


class ShardedOptimizer(GatheringOptimizer):
    """An optimizer whose norms are those of whole tensors, however they are sharded.

    A subclass says how a step goes; this class keeps torch's contract.

    Attributes:
        skipped: Steps left out because a gradient was not finite, a tensor.
        warn_after_skips: Skipped steps in a row to warn after; None: never.
    """

    warn_after_skips: int | None = 100
    _skip_monitor: SkipMonitor | None = None
    _packed_sum: PackedSum | None = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler hands over its scale and what it found, without a wait.

        As in torch only where ``fused=True`` was asked for: trainers take it for a promise about
        gradients that they must not clip, and about steps that they cannot see to be skipped.
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
            What the closure returned.
        """
        self._check_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = self._batches()
        if batches:
            amp = AmpState(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
            ok = self._update(batches, amp)
            self._count_skipped(ok)
            for batch in batches:
                batch.finish()
        return loss

    def _update(self, batches: Sequence[ParamBatch], amp: AmpState) -> Tensor:
        """Moves weights and states.

        Args:
            batches: All parameters that take part.
            amp: What a gradient scaler has left.

        Returns:
            Whether the step was taken, with shape ``()``.
        """
        raise NotImplementedError

    def _check_capture(self) -> None:
        """A graph keeps what it has seen: the user must have said that this is meant."""
        if torch.compiler.is_compiling() or not is_capturing():
            return
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor) and group["lr"].device.type == "cpu":
                raise RuntimeError(
                    "Expected an `lr` on the device while a CUDA graph records the step. Found a "
                    "tensor on the CPU, whose value now would hold for ever. Remedy: lr.cuda()."
                )
        if not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError(
                "Expected capturable=True while a CUDA graph records the step. Found False. "
                f"Remedy: {type(self).__name__}(..., capturable=True), and a tensor `lr` on the "
                "device if it is to change."
            )

    def _count_skipped(self, ok: Tensor) -> None:
        if torch.compiler.is_compiling() or ok.device.type != "cpu" or not bool(ok.numpy()):
            self._add_skipped(ok)
        if self.warn_after_skips is None or torch.compiler.is_compiling() or is_capturing():
            return
        if self._skip_monitor is None:
            self._skip_monitor = SkipMonitor(type(self).__name__)
        self._skip_monitor.note(ok, self.skipped, self.warn_after_skips)

    def _add_skipped(self, ok: Tensor) -> None:
        everywhere = (self.state[p]["skipped"] for g in self.param_groups for p in g["params"])
        for count in {id(count): count for count in everywhere}.values():
            count.add_((~ok).to(count.device))

    # Sums over shards, and what all processes decide from them.

    def _first_sums(
        self,
        batches: Sequence[ParamBatch],
        own: Sequence[Tensor],
        finite: Sequence[Callable[[Tensor], Tensor]],
        amp: AmpState,
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Adds up a step's first sums, and decides whether the step is taken.

        Args:
            batches: The batches.
            own: Their local sums, each with shape ``(k, tensors)``.
            finite: For each a function that says of sums which are finite, with shape
                ``(tensors)``.
            amp: What a gradient scaler has left.

        Returns:
            The sums over all shards, whether each parameter takes the step, with shape
            ``(tensors)``, and whether any does, with shape ``()``.
        """
        bad = self._bad(own, finite, amp)
        total = self._over_shards()
        if total is None:
            totals, actives = list(own), [b.active for b in batches]
        else:
            # A plain tensor's infinity, and who has a gradient, travel with the sums.
            rows = [torch.cat([c, b.active.to(c)[None]]) for b, c in zip(batches, own, strict=True)]
            totals, bad = total([b.index for b in batches], rows, bad)
            actives = [sums[-1] > 0 for sums in totals]
            totals = [sums[:-1] for sums in totals]
            bad = bad | self._bad(totals, finite, AmpState()).to(bad.device)
        ok = ~bad
        taken = [active & ok.to(active.device) for active in actives]
        return totals, taken, ok

    @staticmethod
    def _bad(
        sums: Sequence[Tensor], finite: Sequence[Callable[[Tensor], Tensor]], amp: AmpState
    ) -> Tensor:
        flags = [(~look(own)).any() for look, own in zip(finite, sums, strict=True)]
        if amp.found_inf is not None:
            flags.append((amp.found_inf != 0).reshape(()))
        if len(flags) == 1:
            return flags[0]
        device = next((f.device for f in flags if f.device.type != "cpu"), flags[0].device)
        return torch.stack([flag.to(device) for flag in flags]).any()

    def _sums(self, batches: Sequence[ParamBatch], own: Sequence[Tensor]) -> list[Tensor]:
        """Sums over all shards of local sums, each with shape ``(k, tensors)``."""
        total = self._over_shards()
        return list(own) if total is None else total([b.index for b in batches], own)[0]

    def _over_shards(self) -> PackedSum | None:
        """Adds up columns of all parameters over shards; None: nothing is sharded."""
        if not any(self._sharded):
            return None
        if self._packed_sum is None or not self._packed_sum.is_of(self._params):
            self._packed_sum = PackedSum(self._params)
        return self._packed_sum if self._packed_sum.collectives else None

    def diagnostics(self, top: int = 10, *, grad_scale: float = 1.0) -> list[dict[str, Any]]:
        """What stands out, by group; see :mod:`steadygrad.optim.diagnostics`.

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
        with torch.no_grad():
            self._find_params()
            gathered = self._gradients()
            reports, first = [], 0
            for i, group in enumerate(self.param_groups):
                count = sum(p.numel() > 0 for p in group["params"])
                places = range(first, first + count)
                first += count
                batches = self._build_group(group, places, gathered[0], is_report=True)
                refresh(batches, *gathered)
                batches = working(batches, gathered[2])
                report = Report(i, group, self.state, top, grad_scale)
                reports.append(self._diagnose(group, batches, report, grad_scale))
        return reports

    def _diagnose(
        self,
        group: dict[str, Any],
        batches: Sequence[ParamBatch],
        report: Report,
        grad_scale: float,
    ) -> dict[str, Any]:
        raise NotImplementedError


def is_capturing() -> bool:
    """Whether a CUDA graph records what is done now."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def finite_norms(sums: Tensor) -> Tensor:
    """Whether sums whose first row are squared norms can be used, with shape ``(tensors)``."""
    return torch.isfinite(sums[0])
