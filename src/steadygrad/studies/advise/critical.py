r"""From the losses of branches to the critical batch size at one point, with an interval.

The smallest batch is the yardstick: a smooth curve through its losses says after how many samples
:math:`s` it was as low as another branch is after all its :math:`\Delta` samples. The efficiency of
that branch is :math:`s/\Delta`. Its sample overhead is the best efficiency over its own, less one:
a branch that leaves a noisy trajectory gets a one-time drop in loss because it averages out noise,
and this drop must not make still larger batches look free. The critical batch size is the largest
one whose overhead is within the tolerance.

Branches tell what a batch size costs from their point on. They do not add up to a run from the
initial weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadygrad.studies.advise.schema import CAP, Branch, Critical
from steadygrad.studies.statistics import (
    Floats,
    Variances,
    quantile,
    redraw,
    residual_variances,
    unimodal,
)

# How far the curve is trusted beyond the end of its branch.
REACH = 1.5
DRAWS = 800
# Standard errors by which the smallest batch's loss must fall over the branch.
LEAST_FALL = 3.0
# A fall that is no larger a part of the loss is a rounding error.
ROUNDING = 1e-6
# Ratio of the interval's ends above which the critical batch size is not known.
WIDE = 4.0
# Exponents of the curves that are tried.
POWERS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class LossCurve:
    r"""Falling curves :math:`L(s) = a - c\,(1 - (1 + s/s_0)^{-p}) / p`, one for each draw.

    With :math:`p = 0` this is :math:`a - c \ln(1 + s/s_0)`: language modelling. A large ``p`` comes
    near an exponential approach to a floor, a large :math:`s_0` near a straight line.
    """

    start: Floats  # a, shape (*)
    fall: Floats  # c; not positive where the loss did not fall
    scale: Floats  # s_0, in samples
    power: Floats  # p

    def __call__(self, samples: float) -> Floats:
        """The losses after ``samples``."""
        progress = _progress(np.asarray(samples), self.scale, self.power)
        return np.asarray(self.start - self.fall * progress)

    def samples_at(self, losses: Floats) -> Floats:
        """Samples after which each has losses of shape ``(*, K)``; infinite where it never has."""
        fields = (self.start, self.fall, self.scale, self.power)
        start, fall, scale, power = (np.asarray(value)[..., None] for value in fields)
        with np.errstate(all="ignore"):
            progress = (start - losses) / fall
            rest = 1 - power * progress
            bent = scale * (np.maximum(rest, 0.0) ** (-1 / np.where(power > 0, power, 1.0)) - 1)
            found = np.where(power > 0, bent, scale * np.expm1(np.minimum(progress, 700.0)))
        return np.where((fall > 0) & (rest > 0) & ~np.isnan(found), found, np.inf)


def _progress(samples: Floats, scale: Floats, power: Floats) -> Floats:
    logarithm = np.log1p(samples / scale)
    safe = np.where(power > 0, power, 1.0)
    return np.where(power > 0, -np.expm1(-safe * logarithm) / safe, logarithm)


def fit_curves(places: Floats, losses: Floats, emphasis: float = 0.0) -> LossCurve:
    """The curves with the least squared error through losses ``(*, M)`` at the places ``(M,)``.

    Every shape on a grid is a straight line in its own progress. A squared error counts by a power
    of the samples, ``emphasis``: where a curve has none of these shapes, its end fits better.
    """
    weights = places**emphasis / (places**emphasis).sum()
    steps = 2.0 ** (np.arange(-8, 13) / 2)
    scale, power = np.tile(places.max() * steps, len(POWERS)), np.repeat(POWERS, len(steps))
    progress = _progress(places, scale[:, None], power[:, None])
    middle = progress @ weights
    centred = progress - middle[:, None]
    spread = centred**2 @ weights
    mean = losses @ weights
    centred *= weights / np.maximum(spread, 1e-300)[:, None]
    slopes = (losses - mean[..., None]) @ centred.T
    # The best line explains most of the squares.
    best = (slopes**2 * spread).argmax(-1)
    slope = np.take_along_axis(slopes, best[..., None], -1)[..., 0]
    return LossCurve(mean - slope * middle[best], -slope, scale[best], power[best])


def find_critical(
    branches: Sequence[Branch], tolerance: float, *, seed: int = 0
) -> Critical | None:
    """Finds the critical batch size and its interval.

    The interval redraws every batch size's mean loss, with the variance that is left after the
    repeats' common effects are taken out, and the losses of the smallest batch's curve, by draws
    with ``seed``. It reaches at least from the largest batch size that was trained within the
    tolerance, a fraction of extra samples, to the smallest that was not.

    Returns:
        None where fewer than two repeats of the branches have two batch sizes.
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
    value = min(float(crossing(sizes, overhead, tolerance, stable)), float(sizes[-1]))
    resolved = fall >= LEAST_FALL
    low = float(min(quantile(values, 0.025), within)) if resolved else 0.0
    high = max(quantile(values, 0.975), beyond) if resolved else math.inf
    # Above the largest size tried nothing is known.
    most = sizes[-1] if math.isinf(beyond) else high
    known = resolved and most <= WIDE * max(1.0, low)
    return Critical(
        within=within,
        beyond=beyond,
        value=value if resolved else math.nan,
        low=low,
        high=high,
        diverged=next(iter(sizes[stable if resolved else _leading(np.isfinite(means)) :]), None),
        fall=fall,
        known=known,
        safe=within if known else max(size for size in sizes if size <= max(low, sizes[0])),
        spread=math.sqrt(variances.pooled + variances.common),
        overhead=dict(zip(map(str, sizes), overhead.tolist(), strict=True)),
    )


class _Table:
    """Losses of whole repeats, by ascending batch sizes: all ``sizes`` have the ``repeats``."""

    def __init__(
        self, rows: dict[int, dict[int, Branch]], sizes: list[int], repeats: list[int]
    ) -> None:
        self.sizes, self.repeats = sizes, len(repeats)
        self.losses = np.array([[rows[size][r].loss for r in repeats] for size in sizes])
        with np.errstate(invalid="ignore"):
            self.means = self.losses.mean(1)
        # Samples that each size's losses stand for.
        self.ends = np.array([rows[size][repeats[0]].samples for size in sizes], dtype=float)
        self.length = float(self.ends[0])
        # The smallest batch's curve, its end included: places of shape (M,), losses (M, repeats).
        curves = np.array([rows[sizes[0]][r].curve for r in repeats], dtype=float)
        self.places, self.curve = curves[0, :, 0], curves[..., 1].T
        # Sizes from the smallest on that did not diverge. One that did ends above the smallest
        # batch's loss at a quarter of the branch, by more than the noise of that loss.
        noise = math.sqrt(float(self.curve.var(1, ddof=1).mean()) / self.repeats)
        good = self.means <= self.curve[0].mean() + LEAST_FALL * noise
        self.stable = 1 + _leading(good[1:])

    @classmethod
    def of(cls, branches: Sequence[Branch]) -> "_Table | None":
        rows: dict[int, dict[int, Branch]] = {}  # by batch size and repeat
        for branch in branches:
            rows.setdefault(branch.batch_size, {})[branch.repeat] = branch
        if not rows:
            return None
        # In a study cut short: the repeats that most sizes have; a size that lacks one is left out.
        least = min(2, len(rows[min(rows)]))
        repeats = sorted(
            set.intersection(*(set(row) for row in rows.values() if len(row) >= least))
        )
        sizes = sorted(size for size, row in rows.items() if set(repeats) <= set(row))
        return cls(rows, sizes, repeats) if len(repeats) >= 2 and len(sizes) >= 2 else None

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
        return fall / error if error > 0 else math.copysign(math.inf, fall)


def _leading(good: NDArray[np.bool_]) -> int:
    """Number of flags that are true before the first that is not."""
    return int(np.append(good, False).argmin())


def crossing(
    sizes: Sequence[float], overhead: Floats, tolerance: float, stable: int | None = None
) -> Floats:
    """Largest size whose overhead, of shape ``(*, K)``, is tolerable; infinite when all are.

    The sizes ascend, and the overhead with them, from zero. Between two sizes it is linear in the
    size, as the trade-off between steps and samples is. Beyond the first ``stable`` sizes, all
    unless it is given, one has diverged: up to that one nothing is interpolated.
    """
    places, count = np.asarray(sizes, dtype=float), (overhead <= tolerance).sum(-1)
    last, first = count - 1, np.minimum(count, len(sizes) - 1)
    low, high = (np.take_along_axis(overhead, i[..., None], -1)[..., 0] for i in (last, first))
    with np.errstate(all="ignore"):
        part = np.where(count < (stable or len(sizes)), (tolerance - low) / (high - low), 0.0)
    between = places[last] + (places[first] - places[last]) * part
    return np.where(count < len(sizes), between, math.inf)
