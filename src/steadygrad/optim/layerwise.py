"""The step that LAMB and LANS share: Adam's directions, each as long as its layer's weight."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_number
from steadygrad.formulas.lans import trust_ratio
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.diagnostics import OWN_SUMS, Report
from steadygrad.optim.optimizer import ShardedOptimizer
from steadygrad.optim.state import ADAM_FIELDS

__all__ = ["LayerwiseOptimizer"]


class LayerwiseOptimizer(ShardedOptimizer):
    """An optimizer with a trust ratio for each layer, and two sums over shards a step.

    A subclass works out the factors of its pass over the moments.
    """

    _fields = ADAM_FIELDS
    # Names in reports of the ratios to each direction's norm.
    _ratios: tuple[str, ...] = ("trust_ratio",)
    # Sums of a report's second pass.
    _report_rows = 2
    # Options of a group that the coefficients depend on besides the bounds.
    _ratio_options: tuple[str, ...] = ()

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_number("eps", group["eps"], low=0, low_open=True)
        check_number("weight_decay", group["weight_decay"], low=0)
        low, high = _bounds(group)
        for name in ("lower_bound", "upper_bound"):
            if group[name] is not None:
                check_number(name, group[name], low=0)
        if low is not None and high is not None and low > high:
            raise InputError(
                "Parameter `lower_bound` should be at most `upper_bound`. "
                f"Found {low} and {high}. Remedy: exchange them."
            )

    def _rule(self, group: Mapping[str, Any]) -> Any:
        """The options that all passes need."""
        return self._passes.Rule(*group["betas"], group["eps"], group["weight_decay"])

    def _scales(
        self,
        batches: Sequence[ParamBatch],
        norms: Sequence[Tensor],
        rules: Sequence[Any],
        joint: Tensor | None,
    ) -> Sequence[Any]:
        """Factors of the pass over the moments.

        Args:
            batches: The batches, with this step counted where it is taken.
            norms: Sums of each over all shards, the first row of squared gradients.
            rules: Options of each that all passes need.
            joint: Joint sums of :meth:`_joint_terms` that all processes agree on, if they had to.
        """
        raise NotImplementedError

    def _joint_terms(
        self, batches: Sequence[ParamBatch], own: Sequence[Tensor]
    ) -> Sequence[tuple[int | slice, Tensor]]:
        """Local parts of a norm of several parameters; none if there is no such norm."""
        return ()

    def _update(self, batches: Sequence[ParamBatch]) -> Tensor:
        own = [b.passes.grad_sq_norms(b) for b in batches]
        norms, ok, joint = self._first_sums(
            batches, own, terms=lambda: self._joint_terms(batches, own)
        )
        for batch in batches:
            batch.store("step", batch.columns["step"] + batch.taken)
        rules = [self._rule(batch.group) for batch in batches]
        by = self._scales(batches, norms, rules, joint)
        passes = list(zip(batches, by, rules, strict=True))
        own = [b.passes.update_moments(b, x, rule) for b, x, rule in passes]
        totals = self._sums(batches, own, 1 + len(self._ratios))
        for (b, x, rule), sums in zip(passes, totals, strict=True):
            options = {name: b.group[name] for name in self._ratio_options}
            bounds = _bounds(b.group)
            found = self._passes.coefficients(sums, x, rule, lr=b.lr, bounds=bounds, **options)
            b.passes.apply(b, found, rule)
        return ok

    def _diagnose(self, reports: Sequence[Report]) -> list[dict[str, Any]]:
        # All groups at once: a norm may be that of all gradients.
        owners = [(report, b) for report in reports for b in report.batches]
        batches = [b for _, b in owners]
        own = [
            torch.cat([b.passes.grad_sq_norms(b), Report.own_sums(b, b.moments[1])])
            for b in batches
        ]
        norms = self._sums(batches, own, 1 + OWN_SUMS)
        for (report, batch), sums in zip(owners, norms, strict=True):
            report.add_gradients(batch, sums)
            batch.taken = batch.has_grad & torch.isfinite(sums[0])
        rules = [self._rule(batch.group) for batch in batches]
        by = self._scales(batches, norms, rules, None)
        passes = list(zip(batches, by, rules, strict=True))
        more = [self._report_sums(*given) for given in passes]
        more = self._sums(batches, more, self._report_rows)
        for (report, batch), first, x, sums in zip(owners, norms, by, more, strict=True):
            self._add_ratios(batch, sums, report)
            report.add_unusual(batch, *self._unusual(batch, first, x, sums))
        return [report.finish() for report in reports]

    def _report_sums(self, batch: ParamBatch, by: Any, rule: Any) -> Tensor:
        """This process's squared norms of weights and directions, with shape ``(k, tensors)``."""
        sums: Tensor = self._passes.direction_sums(batch, by, rule)
        return sums

    def _unusual(
        self, batch: ParamBatch, norms: Tensor, by: Any, sums: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Squared size of each gradient, and the one expected from its history."""
        raise NotImplementedError

    def _add_ratios(self, batch: ParamBatch, sums: Tensor, report: Report) -> None:
        weight, *directions = sums[: 1 + len(self._ratios)].sqrt().unbind()
        low, high = _bounds(batch.group)
        if low is not None or high is not None:
            weight = weight.clamp(low, high)
        for name, direction in zip(self._ratios, directions, strict=True):
            report.add(name, batch, trust_ratio(weight, direction))


def _bounds(group: Mapping[str, Any]) -> tuple[float | None, float | None]:
    return group["lower_bound"], group["upper_bound"]
