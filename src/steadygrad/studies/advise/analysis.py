r"""Batch sizes and learning rates as the results show them: pure functions of the results.

A batch size over :math:`N` samples is compared with the smallest one over the complete training of
:math:`N / (1 + t)`. Its overhead is the :math:`t` at which both end with the same loss, found by
interpolation between the lengths at which the smallest batch's loss is known. The interval has all
:math:`t` that the paired test does not reject.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from steadygrad.studies import paired
from steadygrad.studies.advise.plan import FEWEST_STEPS, LENGTHS, lengths_of
from steadygrad.studies.advise.schema import Critical, Plan, Settings
from steadygrad.studies.folder import Results
from steadygrad.studies.paired import FIRST, SEEDS, Evidence, Floats, Ladder, Prior
from steadygrad.studies.schema import Training

# A fall that is no larger a part of the loss is a rounding error.
ROUNDING = 1e-6
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
    """Trainings at one batch size beside the smallest batch's with the same seeds."""

    runs: tuple[Training, ...]  # of the pairs up to the last look, by seed
    losses: Floats  # the smallest batch's, shape `(lengths, pairs)`
    places: Floats  # the samples that they stand for, shape `(lengths,)`
    tolerance: float
    prior: Prior = paired.NOTHING  # variance of the differences at other batch sizes

    @classmethod
    def of(
        cls, trainings: Mapping[int, Training], base: Curves, tolerance: float
    ) -> "Pairs | None":
        """The pairs of trainings and the smallest batch's; None before the first look."""
        seeds = sorted(trainings.keys() & base.keys())
        seeds = seeds[: paired.looked(len(seeds))]
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

    @cached_property
    def overheads(self) -> tuple[float, float, float]:
        """The overhead and its interval; infinite beyond the largest known, and by divergence."""
        if not np.isfinite(self.finals).all():
            return (np.inf,) * 3
        if not np.isfinite(self.losses).all():  # the smallest batch diverged over one length
            return 0.0, 0.0, np.inf
        mean, low, high = paired.interval(self.behind(self.grid), prior=self.prior)
        # The upper end is the first overhead from which on the loss is surely not higher.
        above = np.logical_or.accumulate((high > 0)[::-1])[::-1]
        return self._first(mean <= 0), self._first(low <= 0), self._first(~above)

    def _first(self, reached: "np.ndarray") -> float:
        return float(self.grid[reached.argmax()]) if reached.any() else np.inf

    @property
    def passed(self) -> bool:
        """Whether the overhead is tolerable, and the interval is within the margin."""
        overhead, _, high = self.overheads
        return overhead <= self.tolerance and high <= MARGIN * self.tolerance

    @property
    def failed(self) -> bool:
        """Whether the whole interval is beyond the tolerance."""
        return self.overheads[1] > self.tolerance


def shared_variance(others: Iterable[Pairs]) -> Prior:
    """The median variance of the differences at other batch sizes.

    They share the smallest batch's noise. One that ends far behind has a noise of its own.
    """
    known = [pairs for pairs in others if np.isfinite(pairs.overheads[0])]
    tolerated = [pairs.behind(np.asarray(pairs.tolerance)) for pairs in known]
    tolerated = [each for each in tolerated if np.isfinite(each).all()]
    if not tolerated:
        return paired.NOTHING
    return Prior(float(np.median([each.var(ddof=1) for each in tolerated])), FREEDOM)


class BatchSizes(Evidence):
    """Batch sizes beside the smallest one over trainings of one length; a size is an arm.

    Attributes:
        samples: The length at most. Default: the plan's longest.
        near: The size near which a search begins; 0: not known.
        below: Those over the next shorter length.
        skipped: Arms before these: a stand-in's, where the real model is trained.
        weight: Of a sample's cost, beside one of the model that trains the rungs.
    """

    plan: Plan
    settings: Settings

    def __init__(
        self,
        header: Any,
        results: Results,
        samples: int = 0,
        *,
        near: float = 0.0,
        below: "BatchSizes | None" = None,
        skipped: int = 0,
    ) -> None:
        super().__init__(header, results)
        self.samples, self.near = samples or self.plan.samples, near
        self.below, self.skipped = below, skipped
        # Over a shorter length a large batch would take too few steps.
        most = self.samples // FEWEST_STEPS if self.samples < self.plan.samples else math.inf
        self.sizes = tuple(size for size in self.plan.sizes if size <= most)
        self.weight = max(1, round(self.task.parameters / self.plan.stand_in)) if skipped else 1

    def trainings(self, arm: int, samples: int, step: float = 0.0) -> Mapping[int, Training]:
        """Trainings as :class:`Evidence` has them, of the model that is looked at."""
        return super().trainings(self.skipped + arm, samples, step)

    @property
    def spent(self) -> int:
        """Samples of work in whole looks and searches: no order of the trials changes them."""
        pairs = [len(each) for each in self.pairs.values()]
        searched = 0 if self.tuned is None else len(SEEDS) * len(self.ladder.losses)
        reference = max(pairs, default=0) * sum(self.lengths)
        return self.weight * (reference + (sum(pairs) + searched) * self.samples)

    @cached_property
    def ladder(self) -> Ladder:
        """The search for the smallest batch's rate; it begins at that of the shorter rung.

        The rates of the others follow by the task's rule: where each was searched, the errors of
        the searches hid the differences of the sizes.
        """
        return Ladder(self, 0, self.samples, round((self.below and self.below.tuned) or 0.0))

    @property
    def tuned(self) -> float | None:
        """Octaves by which rates are above the task's own; None while they are not known."""
        return self.ladder.tuned

    @property
    def is_flat(self) -> bool:
        """Whether the smallest batch's loss does not move at the end of a training."""
        ends = np.array([(curve[0][1], curve[-1][1]) for curve in self.own.values()])
        if len(ends) < FIRST or not np.isfinite(ends).all():
            return False
        return bool(np.abs(ends[:, 0] - ends[:, 1]).max() <= ROUNDING * np.abs(ends[:, 0]).max())

    @property
    def lengths(self) -> list[int]:
        """Lengths of the smallest batch's trainings: one passes all, unless its rate decays."""
        decays = self.task.lr_decay != "none"
        return lengths_of(self.samples, self.settings.tolerance) if decays else [self.samples]

    @cached_property
    def own(self) -> Curves:
        """The smallest batch's losses at the lengths up to the last, at its best rate, by seed."""
        if (step := self.tuned) is None:
            return {}
        rows = [self.trainings(0, length, step) for length in self.lengths]
        seeds = sorted(set.intersection(*map(set, rows)) - {*SEEDS})
        return {seed: [*chain(*(row[seed].curve for row in rows))] for seed in seeds}

    @cached_property
    def pairs(self) -> dict[int, Pairs]:
        """Pairs with the smallest batch, by arm, ascending; none where its loss does not move."""
        known = dict[int, Pairs]()
        for arm in range(1, 1 if self.is_flat else len(self.sizes)):
            runs = self.trainings(arm, self.samples, self.tuned or 0.0) if self.own else {}
            if pairs := Pairs.of(runs, self.own, self.settings.tolerance):
                known[arm] = pairs
        return {
            arm: replace(pairs, prior=shared_variance(known[x] for x in known if x != arm))
            for arm, pairs in known.items()
        }

    @cached_property
    def overheads(self) -> Floats:
        """Rows: logarithms of sizes, the overheads, and both ends of their intervals."""
        rows = [(0.0, 0.0, 0.0), *(pairs.overheads for pairs in self.pairs.values())]
        sizes = np.log([self.sizes[arm] for arm in (0, *self.pairs)])
        return np.asarray(np.column_stack([sizes, rows]).T)

    @cached_property
    def critical(self) -> Critical | None:
        """The size at which the overhead crosses the tolerance, between two that were compared.

        Its interval is from there to there where the ends of the overhead's cross it, without an
        upper end where no size is surely beyond the tolerance. None where none passed either.
        """
        if self.failed is None:
            passed = float(self.sizes[self.passed or 0])
            known = {"batch_size": passed, "low": passed, "high": math.inf}
            return Critical(samples=self.samples, **known) if self.passed else None
        _, mean, low, high = self.overheads
        # A larger size that few pairs left uncertain hides no border below it.
        until = 2 + [*self.pairs].index(self.failed)
        # The part of the way between two sizes, where the larger one's overhead is infinite.
        rows = (mean, 0.5), (high, 0.0), (low, 1.0)
        size, least, most = (self._crossing(row[:until], part) for row, part in rows)
        ends = {"low": min(least, size), "high": max(most, size)}
        return Critical(samples=self.samples, batch_size=size, **ends)

    def _crossing(self, overheads: Floats, part: float) -> float:
        """The size from which on the overhead is beyond the tolerance."""
        sizes, tolerance = self.overheads[0], self.settings.tolerance
        last = int(np.flatnonzero(overheads <= tolerance)[-1])
        rise = overheads[last + 1] - overheads[last]
        step = (tolerance - overheads[last]) / rise if rise < math.inf else part
        return math.exp(sizes[last] + step * (sizes[last + 1] - sizes[last]))

    @cached_property
    def failed(self) -> int | None:
        """The arm of the smallest batch size that is certainly beyond the tolerance."""
        return next((arm for arm, pairs in self.pairs.items() if pairs.failed), None)

    @cached_property
    def passed(self) -> int | None:
        """The arm of the largest one within the tolerance, below all that are beyond it."""
        most = self.failed or math.inf
        good = (arm for arm, pairs in self.pairs.items() if pairs.passed and arm < most)
        return max(good, default=None)

    @property
    def advised(self) -> int | None:
        """The arm of the recommended batch size; None where nothing is known."""
        return 0 if self.passed is None and self.failed == 1 else self.passed
