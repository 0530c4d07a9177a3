"""Batch sizes and learning rates as the results show them: pure functions of the results."""

import math
from dataclasses import replace
from functools import cached_property

import numpy as np

from steadygrad.studies.advise.pairs import Curves, Pairs, other_rate, shared_variance
from steadygrad.studies.advise.plan import LEAST, lengths_of
from steadygrad.studies.advise.schema import Header, OtherRate, Plan, Settings
from steadygrad.studies.folder import Results
from steadygrad.studies.ladder import SEEDS, Ladder
from steadygrad.studies.paired import FIRST, Evidence

# Other learning rates at which a batch size is trained: octaves from the rule's.
RATES = (-1.0, 1.0)
# A fall that is no larger a part of the loss is a rounding error.
ROUNDING = 1e-6


class BatchSizes(Evidence):
    """Batch sizes beside the smallest one; a size is an arm."""

    plan: Plan
    settings: Settings

    def __init__(self, header: Header, results: Results) -> None:
        super().__init__(header, results)
        self.tolerance, self.tunes = header.settings.tolerance, header.settings.tune
        self.decays = self.task.lr_decay != "none"

    def size(self, arm: int) -> int:
        """An arm's batch size."""
        return self.plan.arms[arm]

    def tuned(self, arm: int) -> float | None:
        """Octaves of an arm's best rate above the rule's: 0 without a search, None so far."""
        return Ladder(self, arm, self.length).tuned if self.tunes else 0.0

    @cached_property
    def length(self) -> int:
        """Samples of the trainings: the longest by halves at whose end the loss still falls.

        A length that the user gave, or at which rates are tuned, stays unless the loss does not
        move at all. 0: there is none.
        """
        samples, stays = self.plan.samples, bool(self.settings.samples) or self.tunes
        while samples:
            curves = [*self._curves(samples, 0.0).values()]
            ends = [(curve[0][1], curve[-1][1]) for curve in curves[:FIRST]]
            if len(ends) < (len(SEEDS) if self.tunes else FIRST):
                break
            falls = [first - last for first, last in ends]
            fall = math.fsum(map(abs, falls) if stays else falls)
            if not np.isfinite(ends).all():
                break
            if fall > ROUNDING * math.fsum(abs(first) for first, _ in ends):
                break
            steps = samples // 2 // self.size(0)
            samples = 0 if stays or steps < LEAST else steps * self.size(0)
        return samples

    def _curves(self, samples: int, step: float) -> Curves:
        """The smallest batch's losses at the lengths up to ``samples``, by seed."""
        if not self.decays:
            return {seed: run.curve for seed, run in self.trainings(0, samples, step).items()}
        lengths = lengths_of(samples, self.tolerance)
        rows = [self.trainings(0, length, step) for length in lengths]
        seeds = sorted(set.intersection(*map(set, rows)))
        return {seed: tuple(row[seed].curve[-1] for row in rows) for seed in seeds}

    @cached_property
    def own(self) -> Curves:
        """The smallest batch's losses, at its own rate or its best one."""
        step = self.tuned(0)
        found = {} if step is None else self._curves(self.length, step)
        return {seed: curve for seed, curve in found.items() if seed not in SEEDS}

    @cached_property
    def pairs(self) -> dict[int, Pairs]:
        """Pairs with the smallest batch, by arm, ascending."""
        found = {}
        for arm in range(1, len(self.plan.arms)):
            step = self.tuned(arm) if self.trainings(arm, self.length, 0.0) else None
            if step is not None:
                runs = self.trainings(arm, self.length, step)
                found[arm] = Pairs.of(runs, self.own, self.tolerance)
        known = {arm: pairs for arm, pairs in found.items() if pairs is not None}
        return {
            arm: replace(pairs, prior=shared_variance(known[x] for x in known if x != arm))
            for arm, pairs in known.items()
        }

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

    def others(self, arm: int) -> dict[float, OtherRate]:
        """Other learning rates beside the rule's; those without a look are left out."""
        own = self.trainings(arm, self.length)
        rates = ((step, self.trainings(arm, self.length, step)) for step in RATES)
        found = {step: other_rate(runs, own, self.own) for step, runs in rates}
        return {step: one for step, one in found.items() if one is not None}
