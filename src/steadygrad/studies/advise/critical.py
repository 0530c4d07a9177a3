r"""From the losses of branches to the critical batch size at one point, with an interval.

The smallest batch is the yardstick: a smooth curve through its losses says after how many samples
:math:`s` it was as low as another branch is after all its :math:`\Delta` samples. The efficiency of
that branch is :math:`s/\Delta`. Its sample overhead is the best efficiency over its own, less one:
a branch that leaves a noisy trajectory gets a one-time drop in loss because it averages out noise,
and this drop must not make still larger batches look free. The critical batch size is the largest
one whose overhead is within the tolerance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadygrad.studies.advise.loss_curve import LossCurve, fit_curves
from steadygrad.studies.advise.schema import Branch
from steadygrad.studies.statistics import (
    Floats,
    Variances,
    quantile,
    redraw,
    residual_variances,
    unimodal,
)

__all__ = ["CAP", "REACH", "ROUNDING", "Critical", "crossing", "find_critical"]

# The curve starts at a quarter of the branch: a loss above it is at least this much overhead.
CAP = 3.0
# How far the curve is trusted beyond the end of its branch.
REACH = 1.5
DRAWS = 800
# Standard errors by which the smallest batch's loss must fall over the branch.
LEAST_FALL = 3.0
# A fall that is no larger a part of the loss is a rounding error.
ROUNDING = 1e-6
# Ratio of the interval's ends above which the critical batch size is not known.
WIDE = 4.0


@dataclass(frozen=True)
class Critical:
    """The critical batch size at one point of training.

    Attributes:
        sizes: Batch sizes tried, ascending.
        overhead: Extra samples of each, as a fraction of what the best needs; 3 stands for more.
        diverged: Smallest batch size that diverged; None if none did. Where the loss is flat, only
            a loss that is not finite counts.
        within: Largest batch size that was trained within the tolerance.
        beyond: Smallest one that was not; infinite if all were.
        value: Largest batch size within the tolerance by interpolation, in samples; NaN when the
            smallest batch's loss did not fall.
        low: Lower end of the 95% interval, at most ``within``.
        high: Upper end, at least ``beyond``.
        fall: Fall of the smallest batch's loss over the branch, in standard errors; 0 where it is
            within rounding of the loss.
        level: Validation loss that a batch size within the tolerance reaches.
        spread: Standard deviation of one branch's loss, its data order included.
    """

    sizes: tuple[int, ...]
    overhead: tuple[float, ...]
    diverged: int | None
    within: int
    beyond: float
    value: float
    low: float
    high: float
    fall: float
    level: float
    spread: float

    @property
    def resolved(self) -> bool:
        """Whether the loss fell enough to distinguish batch sizes."""
        return not math.isnan(self.value)

    @property
    def falls(self) -> bool:
        """Whether the smallest batch's mean loss falls, significantly or not."""
        return not self.fall <= 0

    @property
    def known(self) -> bool:
        """Whether the interval is narrow enough to name a batch size."""
        # Above the largest size tried nothing is known.
        high = self.sizes[-1] if math.isinf(self.beyond) else self.high
        return self.resolved and high <= WIDE * max(1.0, self.low)

    @property
    def safe(self) -> int:
        """Largest batch size tried that is within the tolerance, also at the interval's end."""
        if self.known:
            return self.within
        return max(size for size in self.sizes if size <= max(self.low, self.sizes[0]))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a summary."""
        names = ("within", "beyond", "value", "low", "high", "diverged", "level", "fall")
        fields = {name: getattr(self, name) for name in names}
        overhead = dict(zip(map(str, self.sizes), self.overhead, strict=True))
        return {**fields, "known": self.known, "overhead": overhead}


def find_critical(
    branches: Sequence[Branch], tolerance: float, *, seed: int = 0
) -> Critical | None:
    """Finds the critical batch size and its interval.

    The interval redraws every batch size's mean loss, with the variance that is left after the
    repeats' common effects are taken out, and the losses of the smallest batch's curve. It reaches
    at least from the largest batch size that was trained within the tolerance to the smallest that
    was not.

    Args:
        branches: Branches of one point at the rule's learning rate.
        tolerance: Extra samples that are acceptable, as a fraction.
        seed: Seed of the interval's draws.

    Returns:
        None where fewer than two repeats have two batch sizes.
    """
    table = _Table.of(branches)
    if table is None:
        return None
    generator = np.random.default_rng(seed)
    sizes, means, stable = table.sizes, table.means, table.stable
    variances = residual_variances(table.losses[:stable])
    curve, redrawn, ends = table.curves(variances, generator)
    errors = variances.draw(generator, DRAWS, table.repeats)
    errors[:, 0] = ends
    overhead = table.overheads(curve, means[:stable])
    fall = table.fall(curve, redrawn)
    values = crossing(sizes, table.overheads(redrawn, means[:stable] + errors), tolerance, stable)
    if stable < len(sizes):
        # Where it lies between the last stable size and the one that diverged is not known.
        spread = generator.uniform(sizes[stable - 1], sizes[stable], DRAWS)
        values = np.where(values >= sizes[stable - 1], spread, values)
    count = int((overhead <= tolerance).sum())
    within, beyond = sizes[count - 1], float((*sizes, math.inf)[count])
    value = min(float(crossing(sizes, overhead, tolerance, stable)), sizes[-1])
    resolved = fall >= LEAST_FALL
    return Critical(
        sizes=sizes,
        overhead=tuple(overhead.tolist()),
        diverged=next(iter(sizes[stable if resolved else _leading(np.isfinite(means)) :]), None),
        within=within,
        beyond=beyond,
        value=value if resolved else math.nan,
        low=min(quantile(values, 0.025), within) if resolved else 0.0,
        high=max(quantile(values, 0.975), beyond) if resolved else math.inf,
        fall=fall,
        level=float(means[0] + curve(table.length / (1 + tolerance)) - curve(table.length)),
        spread=math.sqrt(variances.pooled + variances.common),
    )


@dataclass(frozen=True)
class _Table:
    """Losses of whole repeats, by ascending batch sizes."""

    sizes: tuple[int, ...]
    losses: Floats  # shape (K, repeats)
    ends: Floats  # samples that each size's losses stand for, shape (K,)
    places: Floats  # samples of the smallest batch's curve, its end included, shape (M,)
    curve: Floats  # losses there, shape (M, repeats)

    @classmethod
    def of(cls, branches: Sequence[Branch]) -> "_Table | None":
        by_size: dict[int, dict[int, Branch]] = {}
        for branch in branches:
            by_size.setdefault(branch.batch_size, {})[branch.repeat] = branch
        if not by_size:
            return None
        base = by_size[min(by_size)]
        # In a study cut short: the repeats that most sizes have; a size that lacks one is left out.
        ladder = [rows for rows in by_size.values() if len(rows) >= min(2, len(base))]
        repeats = sorted(set.intersection(*map(set, ladder)))
        sizes = sorted(size for size, rows in by_size.items() if set(repeats) <= set(rows))
        if len(repeats) < 2 or len(sizes) < 2:
            return None
        curves = np.array([base[repeat].curve for repeat in repeats], dtype=float)
        return cls(
            tuple(sizes),
            np.array([[by_size[size][repeat].loss for repeat in repeats] for size in sizes]),
            np.array([by_size[size][repeats[0]].samples for size in sizes], dtype=float),
            curves[0, :, 0],
            curves[..., 1].T,
        )

    @property
    def repeats(self) -> int:
        return int(self.losses.shape[1])

    @property
    def length(self) -> float:
        return float(self.ends[0])

    @property
    def means(self) -> Floats:
        with np.errstate(invalid="ignore"):
            means: Floats = self.losses.mean(1)
        return means

    @property
    def stable(self) -> int:
        """Number of sizes, from the smallest on, that did not diverge."""
        # A size that did ends above the smallest batch's loss at a quarter of the branch, by more
        # than the noise of that loss.
        noise = math.sqrt(float(self.curve.var(1, ddof=1).mean()) / self.repeats)
        good = self.means <= self.curve[0].mean() + LEAST_FALL * noise
        return 1 + _leading(good[1:])

    def curves(
        self, variances: Variances, generator: np.random.Generator
    ) -> tuple[LossCurve, LossCurve, Floats]:
        """The smallest batch's curve, that curve redrawn, and the errors of the redrawn ends."""
        means = self.curve.mean(1)
        residuals = self.curve[:-1] - means[:-1, None]
        redrawn = redraw(means, residuals, generator, DRAWS)
        # The last one has a noise of its own: it is an average, and all sizes share its repeats.
        ends = variances.draw(generator, DRAWS, self.repeats)[:, 0]
        common = math.sqrt(variances.common / self.repeats)
        redrawn[:, -1] = means[-1] + ends + generator.normal(size=DRAWS) * common
        return fit_curves(self.places, means), fit_curves(self.places, redrawn), ends

    def overheads(self, curve: LossCurve, means: Floats) -> Floats:
        """Overheads of all sizes from the mean losses of the stable ones, shape ``(*, K)``."""
        stable = means.shape[-1]
        # Only differences to the smallest batch are laid on the curve: the repeats' data orders
        # raise or lower all batch sizes together, of which the smooth curve knows nothing.
        anchor = curve(self.length)[..., None]
        samples = curve.samples_at(means - means[..., :1] + anchor)
        efficiency = np.clip(samples / self.ends[:stable], 1 / (1 + CAP), REACH)
        efficiency[..., 0] = 1.0
        fit = unimodal(np.log(efficiency))
        after = np.arange(stable) > fit.argmax(-1, keepdims=True)
        overhead = np.where(after, np.expm1(fit.max(-1, keepdims=True) - fit), 0.0)
        rest = np.full((*means.shape[:-1], len(self.sizes) - stable), CAP)
        return np.concatenate([overhead, rest], -1)

    def fall(self, curve: LossCurve, redrawn: LossCurve) -> float:
        """Fall of the smallest batch's loss from a quarter of the branch on, in standard errors."""
        first = float(self.places[0])
        fall = float(curve(first) - curve(self.length))
        # Weights that never move have losses without any error, and one may be rounded.
        if abs(fall) <= ROUNDING * abs(float(curve(first))):
            return 0.0
        low, high = np.quantile(redrawn(first) - redrawn(self.length), (0.16, 0.84))
        # Not the standard deviation: a few draws of an unknown variance are very wide.
        own = (self.curve[0] - self.curve[-1]).std(ddof=1) / math.sqrt(self.repeats)
        error = max(float(high - low) / 2, float(own))
        if error > 0:
            return fall / error
        return math.copysign(math.inf, fall) if fall else 0.0


def _leading(good: NDArray[np.bool_]) -> int:
    """Number of flags that are true before the first that is not."""
    return int(np.append(good, False).argmin())


def crossing(
    sizes: Sequence[float], overhead: Floats, tolerance: float, stable: int | None = None
) -> Floats:
    """Largest size whose overhead is within the tolerance; infinite when all are.

    Between two sizes the overhead is linear in the size, as the trade-off between steps and
    samples is. Up to a size that diverged it is not known, and nothing is interpolated.

    Args:
        sizes: Ascending batch sizes.
        overhead: Not decreasing, and zero for the smallest size, shape ``(*, K)``.
        tolerance: Extra samples that are acceptable.
        stable: How many sizes did not diverge. Default: all.

    Returns:
        Batch sizes, shape ``(*)``.
    """
    places, count = np.asarray(sizes, dtype=float), (overhead <= tolerance).sum(-1)
    last, first = count - 1, np.minimum(count, len(sizes) - 1)
    low, high = (np.take_along_axis(overhead, i[..., None], -1)[..., 0] for i in (last, first))
    with np.errstate(all="ignore"):
        part = np.where(count < (stable or len(sizes)), (tolerance - low) / (high - low), 0.0)
    between = places[last] + (places[first] - places[last]) * part
    return np.where(count < len(sizes), between, math.inf)
