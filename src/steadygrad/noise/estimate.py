"""The measurements kept by an estimator, and the estimate made from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError, check_count, check_number
from steadygrad.averages import WideBuffers
from steadygrad.formulas.noise_scale import SignalNoise
from steadygrad.noise.intervals import RatioInterval, present_ratio, ratio_of_averages

__all__ = ["History", "KeptBatches", "NoiseEstimate"]

_NONE = torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True)
class NoiseEstimate:
    r"""A noise scale with its interval. Every number is a tensor with shape ``()``.

    It is the value of the newest ``measurements`` measurements. While no drift is found, these are
    the whole history; where it is, they are the newest part, in which none is found, so that the
    interval is one for the present value.

    Attributes:
        value: Noise scale :math:`\mathrm{tr}(\Sigma)/|G|^2`, in samples. NaN where the averaged
            signal is not positive, the noise is negative, or ``unlike`` is true.
        low: Lower end of the interval, in samples; meaningful even when nothing else is.
        high: Upper end; infinite when the data do not bound the noise scale.
        grad_sq_norm: Averaged signal :math:`|G|^2`; for ``"l1"`` the squared descent.
        noise_trace: Averaged noise :math:`\mathrm{tr}(\Sigma)` of one sample's gradient; for
            ``"l1"`` :math:`\|\sigma\|_1^2`.
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
        altered: Number of steps left out as ``.grad`` was not the parts' sum.
        selected: Share of steps left out for what their gradients were, altered or not finite.
            Nothing is resolved where it can move the averages by their standard errors.
        unlike: Whether the first parts of steps differ systematically from the last ones.
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
    unlike: Tensor = _NONE

    @property
    def reason(self) -> str | None:
        """The reason why nothing is resolved, if more measurements would not help; waits."""
        if self.unlike:
            return (
                "The first backward passes of steps differ systematically from the last ones, as "
                "losses do, or samples in a fixed order. Remedy: source='accumulated' with one "
                "`with noise.microbatch(n)` around all passes of a sample, or shuffling."
            )
        if not _moved(self.selected, self.effective):
            return None
        return (
            f"{float(self.selected):.0%} of the steps were left out for what their gradients were, "
            "altered, dropped or not finite, and the others are no fair sample. Remedy: a smaller "
            "loss scale, and noise.step() before clipping and before a step is dropped."
        )

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


def newest_first(ring: Tensor, pushed: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
    """A ring's rows by age, zeros if not finite; which of them are finite, and which NaN."""
    age = torch.arange(len(ring), device=ring.device)
    rows = ring[(pushed - 1 - age) % len(ring)]
    there = age < pushed
    finite = there & torch.isfinite(rows).flatten(1).all(1)
    lost = there & torch.isnan(rows).flatten(1).any(1)
    # Zero, not NaN, where the weight is zero: their product must vanish.
    return torch.where(finite.view(-1, 1, 1), rows, 0.0), finite, lost


def present_of(
    signal: Tensor, noise: Tensor, finite: Tensor, decay: float, level: float, drift: bool = True
) -> RatioInterval:
    """The ratio of the averages of series that begin with the newest value, shape ``(*, N)``."""
    age = torch.arange(len(finite), device=finite.device)
    weights = torch.where(finite, decay ** age.to(signal.dtype), 0.0)
    ratio = present_ratio if drift else ratio_of_averages
    return ratio(noise, signal, weights, level=level)


def _moved(selected: Tensor, effective: Tensor) -> Tensor:
    """Whether an average moves by its standard error if this share, the largest, is left out.

    That is so for 4 steps of 60, 7 of 200, 23 of 4,096, were the measurements normal.
    """
    z = torch.special.ndtri(selected)
    shift = torch.exp(-z * z / 2) / (2 * math.pi) ** 0.5 / (1 - selected)
    # Not a number where all are left out.
    moved: Tensor = ~(shift * effective.nan_to_num().sqrt() <= 1)
    return moved


def _estimate(
    ratio: RatioInterval,
    facts: Mapping[str, Tensor],
    power: int = 1,
    by_group: Mapping[str, NoiseEstimate] | None = None,
) -> NoiseEstimate:
    facts = {"unlike": ratio.age < 0, **facts}
    unlike = facts["unlike"]
    doubtful = unlike | _moved(facts["selected"], ratio.effective)
    return NoiseEstimate(
        value=torch.where(unlike, torch.nan, ratio.value**power),
        low=torch.where(doubtful, 0.0, ratio.low**power),
        high=torch.where(doubtful, torch.inf, ratio.high**power),
        grad_sq_norm=ratio.denominator**power,
        noise_trace=ratio.numerator**power,
        resolved=ratio.resolved & ~doubtful,
        measurements=ratio.measurements,
        effective=ratio.effective,
        drifting=ratio.drifting,
        age=ratio.age,
        by_group=by_group or {},
        **facts,
    )


class History:
    """The newest measurements of every group, in a ring on the model's device.

    Nothing here waits for the device: a measurement that is not finite takes its place, and is left
    out by arithmetic. It is NaN if left out for what its gradients were, else infinite.

    Args:
        groups: Names of the groups.
        decay: Weight ratio of one measurement to the next newer one, in (0, 1].
        capacity: How many measurements are kept. Default: :func:`default_capacity`, at most 4,096.
        power: The estimate's value is the ratio of the averages to this power.
        level: Probability with which the interval should cover the truth.
        device: Where the measurements live.
        drift: Whether the noise scale may drift from one measurement to the next.
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
        drift: bool = True,
    ) -> None:
        check_number("decay", decay, low=0, high=1, low_open=True)
        check_number("level", level, low=0, high=1, low_open=True, high_open=True)
        if capacity is None:
            capacity = default_capacity(decay, most=4096)
        self.groups = list(groups)
        self.decay, self.power, self.level, self.drift = decay, power, level, drift
        self.capacity = check_count("history", capacity, low=3)
        # MPS has no float64.
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        # Each measurement is a row of signals and a row of noises.
        self.ring = torch.zeros(capacity, 2, len(groups), dtype=self.dtype, device=device)
        self.pushed = 0

    def push(self, measured: SignalNoise) -> None:
        """Takes in one measurement of every group, each with shape ``(groups)``."""
        self.ring[self.pushed % self.capacity].copy_(torch.stack(measured))
        self.pushed += 1

    def drop(self) -> None:
        """Counts a step that was left out because of its gradients."""
        self.ring[self.pushed % self.capacity].fill_(torch.nan)
        self.pushed += 1

    @property
    def skipped(self) -> Tensor:
        """Number of kept measurements that are not finite, with shape ``()``."""
        return min(self.pushed, self.capacity) - newest_first(self.ring, self.pushed)[1].sum()

    def estimate(self, **facts: Tensor) -> NoiseEstimate:
        """The noise scale of the whole, with that of each group; ``facts`` are fields of both."""
        kept, finite, lost = newest_first(self.ring, self.pushed)
        weights = self.decay ** torch.arange(len(kept), dtype=kept.dtype, device=kept.device)
        selected = (
            weights @ lost.to(weights) / (weights @ (finite | lost).to(weights))
        ).nan_to_num()
        facts |= {"skipped": self.skipped, "selected": selected}
        rows = kept.permute(1, 2, 0)
        # Signal and noise both add up over groups, so the whole is their sum.
        signal, noise = torch.cat([rows.sum(1, keepdim=True), rows], 1)
        present = present_of(signal, noise, finite, self.decay, self.level, self.drift)
        each = [RatioInterval(*row) for row in zip(*present, strict=True)]
        groups = [_estimate(row, facts, self.power) for row in each[1:]]
        by_group = dict(zip(self.groups, groups, strict=True))
        return _estimate(each[0], facts, self.power, by_group)

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


class KeptBatches(WideBuffers):
    """The newest measurements of a module, in a ring of buffers that move and are saved with it.

    One that is not finite leaves no gap, unlike in :class:`History`, so that the weights are those
    of a :class:`~steadygrad.averages.MovingAverage`.

    A saved ring of another length is taken over from its newest end. A ``state_dict`` without one
    empties the ring: the interval then knows only of batches from there on.

    Args:
        capacity: How many measurements are kept.
    """

    ring: Tensor
    pushed: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(capacity, 2, 1, dtype=torch.float64))
        self.register_buffer("pushed", torch.zeros((), dtype=torch.int64))
        nn.Module.register_load_state_dict_pre_hook(self, _fit_ring)

    @torch.no_grad()
    def push(self, measured: SignalNoise, where: Tensor) -> None:
        """Takes in one measurement, two tensors with shape ``()``; nothing where it is false."""
        slot = (self.pushed % len(self.ring)).view(1)
        row = torch.stack(measured).to(self.ring).view(1, 2, 1)
        self.ring.index_copy_(0, slot, torch.where(where, row, self.ring.index_select(0, slot)))
        self.pushed += where

    def estimate(self, decay: float, level: float, skipped: Tensor) -> NoiseEstimate:
        """The noise scale from measurements weighted by ``decay`` to the power of their age."""
        rows, finite, _ = newest_first(self.ring, self.pushed)
        signal, noise = rows[..., 0].unbind(1)
        present = present_of(signal, noise, finite, decay, level)
        # A batch too small to be split is left out too, and then all are.
        selected = skipped / (skipped + self.pushed).clamp(min=1) * (self.pushed > 0)
        return _estimate(present, {"skipped": skipped, "selected": selected})


def _fit_ring(module: KeptBatches, state: dict[str, Any], prefix: str, *_: object) -> None:
    name, count = f"{prefix}ring", f"{prefix}pushed"
    empty = torch.zeros_like(module.ring)
    if name not in state or count not in state:
        state[name], state[count] = empty, torch.zeros_like(module.pushed)
    elif len(state[name]) != len(empty):
        newest, finite = newest_first(state[name], state[count])[:2]
        kept = int(finite.sum().clamp(max=len(empty)))
        empty[:kept] = newest[:kept].flip(0).to(empty)
        state[name], state[count] = empty, torch.full_like(state[count], kept)
