"""The measurements kept by an estimator, and the estimate made from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from steadygrad.noise.equations import SignalNoise
from steadygrad.noise.intervals import present_ratio, ratio_of_averages
from steadygrad.numerics import exact

_NONE = torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True)
class NoiseEstimate:
    r"""A noise scale with its interval. Every number is a tensor with shape ``()``.

    It is the value of the newest ``measurements`` measurements: the whole history, or where drift
    is found, its newest part, so that the interval is one for the present value.

    Attributes:
        value: Noise scale :math:`\mathrm{tr}(\Sigma)/|G|^2`, in samples. NaN where the averaged
            signal is not positive or the noise is negative.
        low: Lower end of the interval, in samples; meaningful even when nothing else is.
        high: Upper end; infinite when the data do not bound the noise scale.
        grad_sq_norm: Averaged signal :math:`|G|^2`.
        noise_trace: Averaged noise :math:`\mathrm{tr}(\Sigma)` of one sample's gradient.
        resolved: Whether the interval is bounded. Where it is false, the truth may be anything
            above ``low``; :attr:`reason` says why, if more measurements would not help.
        measurements: Number of measurements in the averages, the newest ones there are.
        effective: Number of independent measurements they are worth.
        drifting: Whether the newer half of the history, or of its newest part, differs from the
            older half: a false alarm in 1 to 2 % of the cases, false where the data cannot say.
        age: Mean age of the measurements in the averages, weighted as they are, in measurements
            (each stands for ``every`` steps); 0 is the newest. NaN where there are none.
        by_group: Estimates for each group of parameters.
        skipped: Number of steps in the history that were left out.
        altered: Number of steps left out as ``.grad`` was not the parts' sum, alike on all ranks.
        selected: Share of steps left out for what their gradients were, altered or not finite.
            Nothing is resolved where it can move the averages by their standard errors.
    """

    value: Tensor
    low: Tensor
    high: Tensor
    grad_sq_norm: Tensor
    noise_trace: Tensor
    resolved: Tensor
    measurements: Tensor
    effective: Tensor
    drifting: Tensor
    age: Tensor
    by_group: Mapping[str, "NoiseEstimate"] = field(default_factory=dict)
    skipped: Tensor = _NONE
    altered: Tensor = _NONE
    selected: Tensor = _NONE

    @property
    def reason(self) -> str | None:
        """Why more measurements would not resolve it, if they would not; waits for the device."""
        if _moved(self.selected, self.effective):
            return (
                f"{float(self.selected):.0%} of the steps were altered, dropped or not finite. "
                "Remedy: a smaller loss scale, and noise.step() before clipping."
            )
        return None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for logs and records; waits for the device."""
        numbers = {name: x.item() for name, x in vars(self).items() if isinstance(x, Tensor)}
        return {**numbers, "reason": self.reason}


def default_capacity(decay: float, most: int) -> int:
    """Number of measurements to keep: until the weight left out is 0.1 %, at most ``most``."""
    if decay == 1:
        return most
    # Three are the fewest that an interval can be made of.
    return max(3, min(most, math.ceil(math.log(1e-3, decay)) + 1)) if decay > 0 else 3


def empty_ring(capacity: int, groups: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for measurements, each a row of signals and one of noises by group, and their number.

    Nothing here waits for the device: a measurement that is not finite takes its place, and is left
    out by arithmetic. It is NaN if left out for what its gradients were, else infinite.
    """
    ring = torch.zeros(capacity, 2, groups, dtype=exact(device), device=device)
    return ring, torch.zeros((), dtype=torch.int64, device=device)


def push(ring: Tensor, pushed: Tensor, measured: SignalNoise, where: Tensor | None = None) -> None:
    """Takes in one measurement, each of its two tensors with shape ``(groups)``.

    Nothing where ``where`` is false: no gap is left, so that the weights are those of a
    :class:`~steadygrad.averages.MovingAverage`.
    """
    slot = (pushed % len(ring)).view(1)
    row = torch.stack(measured).to(ring).view(1, 2, -1)
    if where is not None:
        row = torch.where(where, row, ring.index_select(0, slot))
    ring.index_copy_(0, slot, row)
    pushed += 1 if where is None else where


def skipped_in(ring: Tensor, pushed: Tensor) -> Tensor:
    """Number of kept measurements that are not finite, with shape ``()``."""
    return pushed.clamp(max=len(ring)) - _newest_first(ring, pushed)[1].sum()


def estimate_from(
    ring: Tensor,
    pushed: Tensor,
    decay: float,
    level: float,
    *,
    skipped: Tensor | None = None,
    groups: Sequence[str] = (),
    drift: bool = True,
    **facts: Tensor,
) -> NoiseEstimate:
    """The noise scale of the whole, with that of each group.

    ``skipped`` is the number of measurements that were not pushed (default: those not finite),
    and ``facts`` are other fields of the estimate.
    """
    kept, finite, lost = _newest_first(ring, pushed)
    age = torch.arange(len(kept), device=kept.device)
    weights = decay ** age.to(kept.dtype)
    if skipped is None:
        skipped, share = skipped_in(ring, pushed), weights @ lost.to(weights)
        selected = (share / (weights @ (finite | lost).to(weights))).nan_to_num()
    else:
        # A batch too small to be split is left out too, and then all are.
        selected = skipped / (skipped + pushed).clamp(min=1) * (pushed > 0)
    facts = {**facts, "skipped": skipped, "selected": selected}
    series = kept.permute(1, 2, 0)
    # Signal and noise both add up over groups, so the whole is their sum.
    signal, noise = torch.cat([series.sum(1, keepdim=True), series[:, : len(groups)]], 1)
    weights = torch.where(finite, weights, 0.0)
    ratio = present_ratio if drift else ratio_of_averages
    found = ratio(noise, signal, weights, level=level)
    doubtful = _moved(selected, found.effective)
    found = found._replace(
        low=torch.where(doubtful, 0.0, found.low),
        high=torch.where(doubtful, torch.inf, found.high),
        resolved=found.resolved & ~doubtful,
    )
    rows = zip(*(column.unbind() for column in found), strict=True)
    whole, *each = (NoiseEstimate(*row, **facts) for row in rows)  # type: ignore[arg-type]
    return replace(whole, by_group=dict(zip(groups, each, strict=True)))


def _newest_first(ring: Tensor, pushed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A ring's rows by age, zeros if not finite; which of them are finite, and which NaN."""
    age = torch.arange(len(ring), device=ring.device)
    rows = ring[(pushed - 1 - age) % len(ring)]
    there = age < pushed
    finite = there & torch.isfinite(rows).flatten(1).all(1)
    lost = there & torch.isnan(rows).flatten(1).any(1)
    # Zero, not NaN, where the weight is zero: their product must vanish.
    return torch.where(finite.view(-1, 1, 1), rows, 0.0), finite, lost


def _moved(selected: Tensor, effective: Tensor) -> Tensor:
    """Whether an average moves by its standard error if this share, the largest, is left out.

    That is so for 4 steps of 60, 7 of 200, 23 of 4,096, were the measurements normal.
    """
    z = torch.special.ndtri(selected)
    shift = torch.exp(-z * z / 2) / (2 * math.pi) ** 0.5 / (1 - selected)
    # Not a number where all are left out.
    moved: Tensor = ~(shift * effective.nan_to_num().sqrt() <= 1)
    return moved
