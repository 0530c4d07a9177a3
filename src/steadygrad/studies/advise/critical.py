r"""From the losses of branches to the critical batch size at one point, with an interval.

The smallest batch is the yardstick: a smooth curve through its losses says after how many samples
:math:`s` it was as low as another branch is after all its :math:`\Delta` samples. The efficiency of
that branch is :math:`s/\Delta`. Its sample overhead is the best efficiency over its own, less one:
a branch that leaves a noisy trajectory profits once from less noise in its weights, which is no
reason to call larger batches still free. The critical batch size is the largest one whose overhead
is within the tolerance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steadygrad.record.schema.advise import Branch
from steadygrad.studies.advise.loss_curve import LossCurve, LossCurveFit
from steadygrad.studies.statistics import (
    Floats,
    Variances,
    quantile,
    residual_variances,
    unimodal,
)

__all__ = ["CAP", "REACH", "Critical", "crossing", "find_critical"]

# The curve starts at a quarter of the branch: a loss above it is at least this much overhead.
CAP = 3.0
# How far the curve is trusted beyond the end of its branch.
REACH = 1.5
DRAWS = 800
# The smallest batch must fall by so many standard errors over the branch.
LEAST_FALL = 3.0
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
        fall: Fall of the smallest batch's loss over the branch, in standard errors.
        level: Validation loss that a batch size within the tolerance reaches.
        spread: Standard deviation of one branch's loss, that effect included.
        gain: Samples saved by the best batch size against the smallest, as a fraction.
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
    gain: float

    @property
    def resolved(self) -> bool:
        """Whether the loss fell enough for any batch size to be told from another."""
        return not math.isnan(self.value)

    @property
    def known(self) -> bool:
        """Whether the interval is narrow enough to name a batch size; all within counts, too."""
        return self.resolved and (math.isinf(self.beyond) or self.high <= WIDE * max(1.0, self.low))

    @property
    def safe(self) -> int:
        """Largest batch size tried that is within the tolerance, also at the interval's end."""
        if self.known:
            return self.within
        least = [size for size in self.sizes if size <= max(self.low, self.sizes[0])]
        return least[-1] if self.resolved else self.sizes[0]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a summary."""
        names = [
            "within",
            "beyond",
            "value",
            "low",
            "high",
            "diverged",
            "level",
            "fall",
            "safe",
            "known",
        ]
        pairs = zip(map(str, self.sizes), self.overhead, strict=True)
        fields = {name: getattr(self, name) for name in [*names, "level", "fall"]}
        return fields | {"overhead": dict(pairs)}


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
        seed: Of the interval's draws.

    Returns:
        None where fewer than two repeats have two batch sizes.
    """
    table = _Table.of(branches)
    if table is None:
        return None
    generator = np.random.default_rng(seed)
    sizes, stable = table.sizes, table.stable
    variances = residual_variances(table.losses[:stable])
    curve, drawn = table.curves(variances, generator)
    errors = variances.draw(generator, DRAWS, table.repeats)
    errors[:, 0] = drawn.end
    overhead = np.full(len(sizes), CAP)
    overhead[:stable], gain = _overheads(curve, table.means[None, :stable], table, 0)
    redrawn = np.full((DRAWS, len(sizes)), CAP)
    means = table.means[:stable] + errors
    redrawn[:, :stable], _ = _overheads(drawn.curve, means, table, slice(None))
    fall = _fall(curve, drawn.curve, table)
    within, beyond = _bracket(sizes, overhead, tolerance)
    values = np.array([crossing(sizes, row, tolerance, stable) for row in redrawn])
    values = _undecided(values, table, generator)
    resolved = fall >= LEAST_FALL
    return Critical(
        sizes=sizes,
        overhead=tuple(overhead.tolist()),
        diverged=next(iter(sizes[stable if resolved else table.finite :]), None),
        within=within,
        beyond=beyond,
        value=min(crossing(sizes, overhead, tolerance, stable), sizes[-1])
        if resolved
        else math.nan,
        low=min(quantile(values, 0.025), within) if resolved else 0.0,
        high=max(quantile(values, 0.975), beyond) if resolved else math.inf,
        fall=fall,
        level=float(table.means[0] + curve(table.length / (1 + tolerance)) - curve(table.length)),
        spread=math.sqrt(variances.pooled + variances.common),
        gain=float(gain),
    )


@dataclass(frozen=True)
class _Draws:
    curve: LossCurve
    end: Floats


@dataclass(frozen=True)
class _Table:
    """Losses of whole repeats.

    Attributes:
        sizes: Batch sizes, ascending.
        losses: Shape ``(K, repeats)``.
        ends: Samples that each size's losses stand for, shape ``(K,)``.
        places: Samples of the smallest batch's curve, its end included, shape ``(M,)``.
        curve: Losses there, shape ``(M, repeats)``.
    """

    sizes: tuple[int, ...]
    losses: Floats
    ends: Floats
    places: Floats
    curve: Floats

    @classmethod
    def of(cls, branches: Sequence[Branch]) -> "_Table | None":
        by_size: dict[int, dict[int, Branch]] = {}
        for branch in branches:
            by_size.setdefault(branch.batch_size, {})[branch.repeat] = branch
        if len(by_size) < 2:
            return None
        base = by_size[min(by_size)]
        # Of a study cut short the repeats that most sizes have; a size that lacks one is left out.
        ladder = [rows for rows in by_size.values() if len(rows) >= min(2, len(base))]
        repeats = sorted(set.intersection(*(set(rows) for rows in ladder)))
        sizes = sorted(size for size, rows in by_size.items() if set(repeats) <= set(rows))
        if len(repeats) < 2 or len(sizes) < 2:
            return None
        rows = [[by_size[size][r] for r in repeats] for size in sizes]
        curves = [base[r].curve for r in repeats]
        return cls(
            tuple(sizes),
            np.array([[branch.loss for branch in row] for row in rows]),
            np.array([row[0].samples for row in rows], dtype=float),
            np.array([place for place, _ in curves[0]], dtype=float),
            np.array([[loss for _, loss in curve] for curve in curves]).T,
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
    def finite(self) -> int:
        """How many sizes, from the smallest on, ended with finite losses."""
        bad = ~np.isfinite(self.means)
        return int(bad.argmax()) if bad.any() else len(self.sizes)

    @property
    def stable(self) -> int:
        """How many sizes, from the smallest on, did not diverge.

        A size diverged if it ends above the smallest batch's loss at a quarter of the branch, by
        more than the noise of that loss.
        """
        noise = math.sqrt(float(self.curve.var(1, ddof=1).mean()) / self.repeats)
        bad = ~(self.means <= self.curve[0].mean() + LEAST_FALL * noise)
        bad[0] = False
        return int(bad.argmax()) if bad.any() else len(self.sizes)

    def curves(
        self, variances: Variances, generator: np.random.Generator
    ) -> tuple[LossCurve, _Draws]:
        """The smallest batch's curve, and curves as other noise would have made them."""
        fit = LossCurveFit(self.places.tolist())
        means = self.curve.mean(1)
        own = ((self.curve[:-1] - means[:-1, None]) ** 2).sum() if len(means) > 1 else 0.0
        freedom = (len(means) - 1) * (self.repeats - 1)
        scale = own / generator.chisquare(max(1, freedom), (DRAWS, 1)) / self.repeats
        drawn = means + generator.normal(size=(DRAWS, len(means))) * np.sqrt(scale)
        # The last one has a noise of its own: it is an average, and all sizes share its repeats.
        end = variances.draw(generator, DRAWS, self.repeats)[:, 0]
        common = math.sqrt(variances.common / self.repeats)
        drawn[:, -1] = means[-1] + end + generator.normal(size=DRAWS) * common
        return fit(means), _Draws(fit(drawn), end)


def _overheads(curve: LossCurve, means: Floats, table: _Table, pick: Any) -> tuple[Floats, Floats]:
    """Overheads of the stable sizes, and the gain of the best against the smallest.

    Only differences to the smallest batch are laid on the curve: the repeats' data orders raise or
    lower all batch sizes together, of which the smooth curve knows nothing.
    """
    anchor = np.atleast_1d(curve(table.length))[:, None]
    samples = curve.samples_at(means - means[:, :1] + anchor)
    ends = table.ends[: means.shape[1]]
    efficiency = np.clip(samples / ends, 1 / (1 + CAP), REACH)
    efficiency[..., 0] = 1.0
    fit = unimodal(np.log(efficiency))
    best = fit.max(-1, keepdims=True)
    after = np.arange(means.shape[1]) > fit.argmax(-1, keepdims=True)
    overhead = np.where(after, np.expm1(best - fit), 0.0)
    return overhead[pick], np.expm1(best[..., 0] - fit[..., 0])[pick]


def _fall(curve: LossCurve, drawn: LossCurve, table: _Table) -> float:
    """Fall of the smallest batch's loss from a quarter of the branch on, in standard errors."""
    first = float(table.places[0])
    fall = float(curve(first) - curve(table.length))
    low, high = np.quantile(drawn(first) - drawn(table.length), (0.16, 0.84))
    # Not the standard deviation: a few draws of an unknown variance are very wide.
    own = (table.curve[0] - table.curve[-1]).std(ddof=1) / math.sqrt(table.repeats)
    error = max(float(high - low) / 2, float(own))
    if error > 0:
        return fall / error
    return math.copysign(math.inf, fall) if fall else 0.0


def _bracket(sizes: Sequence[int], overhead: Floats, tolerance: float) -> tuple[int, float]:
    above = np.flatnonzero(overhead > tolerance)
    if not len(above):
        return sizes[-1], math.inf
    first = int(above[0])
    return sizes[max(0, first - 1)], float(sizes[first])


def crossing(
    sizes: Sequence[float], overhead: Floats, tolerance: float, stable: int | None = None
) -> float:
    """Largest size whose overhead is within the tolerance; infinite when all are.

    Between two sizes the overhead is linear in the size, as the trade-off between steps and
    samples is. Up to a size that diverged it is not known, and nothing is interpolated.

    Args:
        sizes: Ascending batch sizes.
        overhead: Non-decreasing, shape ``(K,)``.
        tolerance: Extra samples that are acceptable.
        stable: How many sizes did not diverge. Default: all.
    """
    above = np.flatnonzero(overhead > tolerance)
    if not len(above):
        return math.inf
    first = int(above[0])
    if first == 0 or (stable is not None and first >= stable):
        return float(sizes[max(0, first - 1)])
    low, high = float(overhead[first - 1]), float(overhead[first])
    part = (tolerance - low) / (high - low)
    return float(sizes[first - 1] + (sizes[first] - sizes[first - 1]) * part)


def _undecided(values: Floats, table: _Table, generator: np.random.Generator) -> Floats:
    """Draws that end at the last stable size lie anywhere up to the one that diverged."""
    if table.stable == len(table.sizes):
        return values
    last, next_ = table.sizes[table.stable - 1], table.sizes[table.stable]
    spread = generator.uniform(last, next_, len(values))
    return np.where(values >= last, spread, values)
