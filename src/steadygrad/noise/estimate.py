"""The measurements kept by an estimator, and the estimate made from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_count, check_number
from steadygrad.formulas.intervals import RatioInterval, ratio_of_averages
from steadygrad.formulas.noise_scale import SignalNoise

__all__ = ["History", "NoiseEstimate"]


@dataclass(frozen=True)
class NoiseEstimate:
    r"""A noise scale with its interval. Every number is a tensor with shape ``()``.

    Attributes:
        value: Noise scale :math:`\mathrm{tr}(\Sigma)/|G|^2`, in samples. NaN where the averaged
            signal is not positive, or the noise is negative (``.grad`` held more than the step).
        low: Lower end of the interval, in samples; meaningful even when nothing else is.
        high: Upper end; infinite when the data do not bound the noise scale.
        grad_sq_norm: Averaged signal :math:`|G|^2`; for ``"l1"`` the squared descent.
        noise_trace: Averaged noise :math:`\mathrm{tr}(\Sigma)` of one sample's gradient; for
            ``"l1"`` :math:`\|\sigma\|_1^2`.
        resolved: Whether the interval is bounded. Where it is false, the truth may be anything
            above ``low``.
        measurements: Number of measurements in the averages.
        effective: Number of independent measurements they are worth.
        by_group: The same for each group of parameters.
    """

    value: Tensor
    low: Tensor
    high: Tensor
    grad_sq_norm: Tensor
    noise_trace: Tensor
    resolved: Tensor
    measurements: Tensor
    effective: Tensor
    by_group: Mapping[str, "NoiseEstimate"] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for logs and records; waits for the device."""
        return {
            "value": float(self.value),
            "low": float(self.low),
            "high": float(self.high),
            "grad_sq_norm": float(self.grad_sq_norm),
            "noise_trace": float(self.noise_trace),
            "resolved": bool(self.resolved),
            "measurements": int(self.measurements),
            "effective": float(self.effective),
        }


class History:
    """The newest measurements of every group, in a ring on the model's device.

    Measurements are weighted by ``decay`` to the power of their age. Keeping them, not only their
    averages, is what makes an interval and its autocorrelation possible. Nothing here waits for
    the device: a measurement that is not finite takes its place, and is left out by arithmetic.

    Args:
        groups: Names of the groups.
        decay: Weight ratio of one measurement to the next newer one, in (0, 1].
        capacity: How many measurements are kept. Default: until the weight left out is 0.1 %,
            at most 4,096; that many also for ``decay=1``.
        power: The estimate's value is the ratio of the averages to this power.
        level: Probability with which the interval should cover the truth.
        device: Where the measurements live.
    """

    def __init__(
        self,
        groups: Sequence[str],
        *,
        decay: float,
        capacity: int | None,
        power: int,
        level: float,
        device: torch.device,
    ) -> None:
        check_number("decay", decay, low=0, high=1, low_open=True)
        check_number("level", level, low=0, high=1, low_open=True, high_open=True)
        if capacity is None:
            capacity = 4096 if decay == 1 else min(4096, math.ceil(math.log(1e-3, decay)) + 1)
        self.groups = list(groups)
        self.decay, self.power, self.level = decay, power, level
        self.capacity = check_count("history", capacity, low=3)
        # MPS has no float64.
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        # Of each measurement a row of signals and a row of noises.
        self.ring = torch.zeros(capacity, 2, len(groups), dtype=self.dtype, device=device)
        self.pushed = 0

    def push(self, measured: SignalNoise) -> None:
        """Takes in one measurement of every group, each with shape ``(groups)``."""
        self.ring[self.pushed % self.capacity].copy_(torch.stack(measured))
        self.pushed += 1

    @property
    def skipped(self) -> Tensor:
        """Number of kept measurements that are not finite, with shape ``()``."""
        return min(self.pushed, self.capacity) - self._finite().sum()

    def _finite(self) -> Tensor:
        """Which of the kept measurements are finite, with shape ``(capacity,)``."""
        kept = torch.arange(self.capacity, device=self.ring.device) < self.pushed
        return kept & torch.isfinite(self.ring).flatten(1).all(1)

    def estimate(self) -> NoiseEstimate:
        """The noise scale of the whole, with that of each group."""
        finite = self._finite()
        age = (self.pushed - 1 - torch.arange(self.capacity, device=finite.device)) % self.capacity
        newest_first = age.argsort()
        weights = torch.where(finite, self.decay ** age.to(self.dtype), 0.0)[newest_first]
        # Zero, not NaN, where the weight is zero: their product must vanish.
        ring = torch.where(finite.view(-1, 1, 1), self.ring, 0.0)
        rows = ring[newest_first].permute(1, 2, 0)
        # Signal and noise both add up over groups, so the whole is their sum.
        signal, noise = torch.cat([rows.sum(1, keepdim=True), rows], 1)
        ratio = ratio_of_averages(noise, signal, weights, level=self.level)
        each = [RatioInterval(*row) for row in zip(*ratio, strict=True)]
        groups = [self._row(row, finite) for row in each[1:]]
        return self._row(each[0], finite, dict(zip(self.groups, groups, strict=True)))

    def _row(
        self,
        ratio: RatioInterval,
        finite: Tensor,
        by_group: Mapping[str, NoiseEstimate] | None = None,
    ) -> NoiseEstimate:
        p = self.power
        return NoiseEstimate(
            value=ratio.value**p,
            low=ratio.low**p,
            high=ratio.high**p,
            grad_sq_norm=ratio.denominator**p,
            noise_trace=ratio.numerator**p,
            resolved=ratio.resolved,
            measurements=finite.sum(),
            effective=ratio.effective,
            by_group=by_group or {},
        )

    def reset(self) -> None:
        """Forgets every measurement."""
        self.ring.zero_()
        self.pushed = 0

    def state_dict(self) -> dict[str, Any]:
        """The kept measurements, as tensors and plain values."""
        return {
            "groups": list(self.groups),
            "ring": self.ring.clone(),
            "pushed": self.pushed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts saved measurements back.

        Raises:
            InputError: If they are of other groups or of another capacity.
        """
        missing = {"groups", "ring", "pushed"} - set(state)
        if missing:
            raise InputError(
                f"Expected a state_dict of this estimator. Found none of {sorted(missing)} in it. "
                "Remedy: hand in what `state_dict()` returned."
            )
        found = (list(state["groups"]), tuple(state["ring"].shape))
        expected = (self.groups, tuple(self.ring.shape))
        if found != expected:
            raise InputError(
                f"Expected measurements of groups and shape {expected}. Found {found}. "
                "Remedy: build the estimator with the same model, groups, decay and history."
            )
        self.ring.copy_(state["ring"])
        self.pushed = int(state["pushed"])
