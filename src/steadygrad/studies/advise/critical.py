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

import numpy as np

from steadygrad.studies.advise.schema import Branch, Critical
from steadygrad.studies.statistics import (
    Floats,
    Variances,
    quantile,
    redraw,
    residual_variances,
    unimodal,
)

# Logarithms of the efficiencies at which the curve is known, from a quarter to one and a half. The
# branch's own end is at ``END``.
END = 100
EFFICIENCIES = math.log(4) / END * np.arange(-END, 31)
DRAWS = 800
# Standard errors by which the smallest batch's loss must fall over the branch.
LEAST_FALL = 3.0
# A fall that is no larger a part of the loss is a rounding error.
ROUNDING = 1e-6
# Ratio of the interval's ends above which the critical batch size is not known.
WIDE = 4.0


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
    errors = variances.draw(generator, DRAWS, table.repeats)
    curve, redrawn = table.curves(variances, errors[:, 0], generator)
    overhead = table.overheads(curve, means[:stable])
    fall = table.fall(curve, redrawn)
    values = crossing(sizes, table.overheads(redrawn, means[:stable] + errors), tolerance)
    # Where it lies between the last stable size and one that diverged is not known.
    values = np.where(values < sizes[stable - 1], values, (*sizes, math.inf)[stable])
    count = int((overhead <= tolerance).sum())
    within, beyond = sizes[count - 1], float((*sizes, math.inf)[count])
    value = min(float(crossing(sizes, overhead, tolerance)), float(sizes[-1]))
    resolved = fall >= LEAST_FALL
    good = table.good if resolved else np.isfinite(means)
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
        diverged=next((size for size, ok in zip(sizes, good, strict=True) if not ok), None),
        fall=fall,
        known=known,
        safe=within if known else max(size for size in sizes if size <= max(low, sizes[0])),
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
        # One that diverged ends above the smallest batch's loss at a quarter of the branch, by more
        # than the noise of that loss.
        noise = math.sqrt(float(self.curve.var(1, ddof=1).mean()) / self.repeats)
        self.good = self.means <= self.curve[0].mean() + LEAST_FALL * noise
        self.good[0] = True
        # Sizes from the smallest on that did not.
        self.stable = int(np.append(self.good, False).argmin())

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
        self, variances: Variances, ends: Floats, generator: np.random.Generator
    ) -> tuple[Floats, Floats]:
        """The smallest batch's losses at all efficiencies, and the same redrawn.

        They are a parabola over the logarithm of the samples. ``ends``: errors of the last losses.
        """
        means = self.curve.mean(1)
        residuals = self.curve[:-1] - means[:-1, None]
        redrawn = redraw(means, residuals, generator, DRAWS)
        # The last one has a noise of its own: it is an average, and all sizes share its repeats.
        common = math.sqrt(variances.common / self.repeats)
        redrawn[:, -1] = means[-1] + ends + generator.normal(size=DRAWS) * common
        powers = min(3, len(self.places))
        fit = np.linalg.pinv(np.vander(np.log(self.places / self.length), powers))
        smooth = (np.vander(EFFICIENCIES, powers) @ fit).T
        return means @ smooth, redrawn @ smooth

    def overheads(self, curve: Floats, means: Floats) -> Floats:
        """Overheads of all sizes from the mean losses of the stable ones, shape ``(*, K)``."""
        stable = means.shape[-1]
        # Only differences to the smallest batch are laid on the curve: the repeats' data orders
        # raise or lower all batch sizes together, of which the smooth curve knows nothing.
        losses = means - means[..., :1] + curve[..., END, None]
        i = np.clip((curve[..., None, :] > losses[..., None]).sum(-1), 1, len(EFFICIENCIES) - 1)
        high, low = (np.take_along_axis(curve, at, -1) for at in (i - 1, i))
        part = np.clip((high - losses) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
        efficiency = EFFICIENCIES[i - 1] + part * (EFFICIENCIES[1] - EFFICIENCIES[0])
        efficiency += np.log(self.length / self.ends[:stable])
        efficiency[..., 0] = 0.0
        fit = unimodal(efficiency)
        after = np.arange(stable) > fit.argmax(-1, keepdims=True)
        overhead = np.where(after, np.expm1(fit.max(-1, keepdims=True) - fit), 0.0)
        rest = np.full((*means.shape[:-1], len(self.sizes) - stable), np.inf)
        return np.concatenate([overhead, rest], -1)

    def fall(self, curve: Floats, redrawn: Floats) -> float:
        """Fall of the smallest batch's loss from a quarter of the branch on, in standard errors."""
        first = int(np.searchsorted(EFFICIENCIES, math.log(self.places[0] / self.length)))
        fall = float(curve[first] - curve[END])
        # Weights that never move have losses without any error, and one may be rounded.
        if abs(fall) <= ROUNDING * abs(float(curve[first])):
            return 0.0
        low, high = np.quantile(redrawn[:, first] - redrawn[:, END], (0.16, 0.84))
        # Not the standard deviation: a few draws of an unknown variance are very wide.
        own = (self.curve[0] - self.curve[-1]).std(ddof=1) / math.sqrt(self.repeats)
        error = max(float(high - low) / 2, float(own))
        return fall / error if error > 0 else math.copysign(math.inf, fall)


def crossing(sizes: Sequence[float], overhead: Floats, tolerance: float) -> Floats:
    """Largest size whose overhead, of shape ``(*, K)``, is tolerable; infinite when all are.

    The sizes ascend, and the overhead with them, from zero. Between two sizes it is linear in the
    size, as the trade-off between steps and samples is.
    """
    places, count = np.asarray(sizes, dtype=float), (overhead <= tolerance).sum(-1)
    last, first = count - 1, np.minimum(count, len(sizes) - 1)
    low, high = (np.take_along_axis(overhead, i[..., None], -1)[..., 0] for i in (last, first))
    with np.errstate(all="ignore"):
        between = places[last] + (places[first] - places[last]) * (tolerance - low) / (high - low)
    return np.where(count < len(sizes), between, math.inf)
