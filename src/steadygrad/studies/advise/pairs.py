r"""Trainings of one length, paired by seed: what a batch size or a learning rate costs.

A batch size over :math:`N` samples is compared with the smallest one over the complete training of
:math:`N / (1 + t)`. Its overhead is the :math:`t` at which both end with the same loss, found by
interpolation between the lengths at which the smallest batch's loss is known. The interval are all
:math:`t` that the paired test does not reject.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from steadygrad.studies.advise.plan import LENGTHS
from steadygrad.studies.advise.schema import OtherRate
from steadygrad.studies.paired import (
    ALPHA,
    MOST,
    NOTHING,
    Floats,
    Prior,
    interval,
    looked,
    pairs_needed,
)
from steadygrad.studies.schema import Training

# Multiple of the tolerance that the interval of the overhead must not exceed.
MARGIN = 1.25
# Degrees of freedom that the variance at other batch sizes counts for beside a size's own.
FREEDOM = 2.0
# Overheads between none and the largest that is known.
GRID = 121

Curves = Mapping[int, Sequence[tuple[float, float]]]
"""By seed, the smallest batch's losses: pairs of samples and loss, ascending."""


@dataclass(frozen=True)
class Pairs:
    """Trainings at one batch size beside the smallest batch's with the same seeds.

    Attributes:
        runs: Of the pairs up to the last look, by seed.
        losses: The smallest batch's, shape ``(lengths, pairs)``.
        places: The samples that they stand for, shape ``(lengths,)``.
        prior: Variance of the differences at other batch sizes.
    """

    runs: tuple[Training, ...]
    losses: Floats
    places: Floats
    tolerance: float
    prior: Prior = NOTHING

    @classmethod
    def of(
        cls, trainings: Mapping[int, Training], base: Curves, tolerance: float
    ) -> "Pairs | None":
        """The pairs of trainings and the smallest batch's; None before the first look."""
        seeds = sorted(trainings.keys() & base.keys())
        seeds = seeds[: looked(len(seeds))]
        if not seeds:
            return None
        table = np.array([base[seed] for seed in seeds], dtype=float)
        runs = tuple(trainings[seed] for seed in seeds)
        return cls(runs, table[..., 1].T, table[0, :, 0], tolerance)

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def finals(self) -> Floats:
        """Losses of the runs, shape ``(pairs,)``."""
        return np.array([run.loss for run in self.runs])

    @cached_property
    def grid(self) -> Floats:
        """Overheads at which the losses are compared, ascending."""
        # The tolerance itself, and the margin, are among them to the last digit.
        return self.tolerance * np.linspace(0.0, LENGTHS[0], GRID)

    def behind(self, overheads: Floats) -> Floats:
        """Losses less the smallest batch's over the length that is shorter by each overhead.

        Shape ``(*, pairs)``. The smallest batch's are linear in the logarithm of the samples
        between the lengths.
        """
        at = np.log(self.runs[0].curve[-1][0] / (1 + overheads))
        known = np.log(self.places)
        i = np.clip(np.searchsorted(known, at) - 1, 0, len(known) - 2)
        part = ((at - known[i]) / (known[i + 1] - known[i]))[..., None]
        return np.asarray(self.finals - self.losses[i] * (1 - part) - self.losses[i + 1] * part)

    @property
    def lost(self) -> bool:
        """Whether a run diverged."""
        return not np.isfinite(self.finals).all()

    @cached_property
    def overheads(self) -> tuple[float, float, float]:
        """The overhead, and its interval; infinite where it is beyond the largest that is known."""
        if self.lost:
            return (np.inf,) * 3
        mean, low, high = interval(self.behind(self.grid), ALPHA, self.prior)
        return _first(self.grid, mean <= 0), _first(self.grid, low <= 0), self._last(high > 0)

    def _last(self, above: "np.ndarray") -> float:
        """The overhead from which on none is above."""
        if not above.any():
            return 0.0
        last = int(np.flatnonzero(above)[-1])
        return float(self.grid[last + 1]) if last + 1 < GRID else np.inf

    @property
    def passed(self) -> bool:
        """Whether the overhead is tolerable, and the interval is within the margin."""
        overhead, _, high = self.overheads
        return overhead <= self.tolerance and high <= MARGIN * self.tolerance

    @property
    def failed(self) -> bool:
        """Whether the whole interval is beyond the tolerance."""
        return self.overheads[1] > self.tolerance

    @cached_property
    def needed(self) -> int:
        """Pairs with which it should be decided, if means and deviations stay as they are."""
        if self.passed or self.failed:
            return len(self)
        fits = self.overheads[0] <= self.tolerance
        # It passes at the margin, and fails at the tolerance.
        gap = self.behind(np.asarray(self.tolerance * (MARGIN if fits else 1.0)))
        mean, variance = abs(float(gap.mean())), float(gap.var(ddof=1))
        return max(pairs_needed(mean, variance, ALPHA, prior=self.prior) or MOST, len(self) + 1)


def shared_variance(others: Iterable[Pairs]) -> Prior:
    """The median variance of the differences at other batch sizes.

    They share the smallest batch's noise. One that ends far behind has a noise of its own.
    """
    known = [pairs for pairs in others if np.isfinite(pairs.overheads[0])]
    if not known:
        return NOTHING
    tolerated = [pairs.behind(np.asarray(pairs.tolerance)) for pairs in known]
    return Prior(float(np.median([each.var(ddof=1) for each in tolerated])), FREEDOM)


def _first(grid: Floats, reached: "np.ndarray") -> float:
    return float(grid[int(reached.argmax())]) if reached.any() else np.inf


def other_rate(
    tried: Mapping[int, Training], own: Mapping[int, Training], base: Curves
) -> OtherRate | None:
    """Compares trainings at another rate with those at the own one; None before the first look."""
    seeds = sorted(tried.keys() & own.keys() & base.keys())
    seeds = seeds[: looked(len(seeds))]
    if not seeds:
        return None
    apart = np.array([tried[seed].loss - own[seed].loss for seed in seeds])
    mean, low, high, verdict = np.inf, np.inf, np.inf, "not better"
    if np.isfinite(apart).all():
        # The smallest batch's fall over the last of the tolerated samples.
        worth = np.array([base[seed][-2][1] - base[seed][-1][1] for seed in seeds])
        mean, low, high = map(float, interval(apart))
        never = interval(apart + worth)[1] > 0
        verdict = "better" if high < 0 else "not better" if never else ""
    lr = tried[seeds[0]].lr
    return OtherRate(lr=lr, seeds=len(seeds), mean=mean, low=low, high=high, verdict=verdict)
