"""Batch sizes and learning rates as the results show them: pure functions of the results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from statistics import fmean

import numpy as np

from steadygrad.noise.schedule import learning_rate
from steadygrad.studies.advise import critical as branches
from steadygrad.studies.advise.pairs import Better, Curves, Pairs, better, shared_variance
from steadygrad.studies.advise.plan import (
    LEAST,
    NEAR,
    Stages,
    course_of,
    lengths_of,
    rungs,
    stretches,
)
from steadygrad.studies.advise.schema import Branch, Critical, Header, Scratch
from steadygrad.studies.folder import Results
from steadygrad.studies.sequential import LOOKS
from steadygrad.studies.trials import seed_for

# Other learning rates at which a batch size is trained, relative to the rule's.
RATES = (0.5, 2.0)
# Most octaves from the rule's learning rate that a search goes.
FARTHEST = 6
# The seeds of that search: no pair has one, so that no choice favours a batch size.
TUNING = range(LOOKS[-1], LOOKS[-1] + LOOKS[0])


class Evidence:
    """Evidence of a study: its header and its results."""

    def __init__(self, header: Header, results: Results) -> None:
        self.header, self.results = header, results
        self.plan, self.task, self.tolerance = header.plan, header.task, header.settings.tolerance
        self.base = course_of(((0, self.plan.batch_size),))
        self._runs: dict[tuple[str, float, int], list[Scratch]] = {}
        for run in results.select(Scratch):
            self._runs.setdefault((run.course, run.rate, run.samples), []).append(run)

    def runs(
        self, course: str, rate: float = 1.0, samples: int = 0, tuning: bool = False
    ) -> Sequence[Scratch]:
        """Trainings by seed, or those of the search for learning rates.

        Default: of the length that the advice is for.
        """
        found = self._runs.get((course, rate, samples or self.length), ())
        return [run for run in found if (run.repeat in TUNING) == tuning]

    def ladder(self, course: str) -> dict[int, float | None]:
        """Mean losses by octave from the rule's learning rate; None: not trained yet.

        Three octaves, and more until the best one has a worse one on either side.
        """
        steps = [*NEAR]
        while True:
            found = {step: self._tried(course, 2.0**step) for step in steps}
            if None in found.values():
                return found
            best = _lowest(found)
            if best == steps[0] > -FARTHEST:
                steps.insert(0, best - 1)
            elif best == steps[-1] < FARTHEST:
                steps.append(best + 1)
            else:
                return found

    def _tried(self, course: str, rate: float) -> float | None:
        losses = [run.loss for run in self.runs(course, rate, tuning=True)]
        return fmean(losses) if len(losses) == len(TUNING) else None

    def tuned(self, course: str) -> float | None:
        """The learning rate over the rule's: 1, or the best; None while that is not known.

        The best is where the parabola through the lowest loss and its neighbours has its minimum,
        to a quarter of an octave, so that no batch size profits from where its ladder begins. It is
        lower where a run diverged.
        """
        if not self.header.settings.tune:
            return 1.0
        found = {step: loss for step, loss in self.ladder(course).items() if loss is not None}
        if len(found) < len(self.ladder(course)):
            return None
        best = _lowest(found)
        below, at, above = (found.get(best + side, math.inf) for side in NEAR)
        bend = below - 2 * at + above if at < math.inf else math.inf
        step = best + (round(2 * (below - above) / bend) / 4 if 0 < bend < math.inf else 0)
        while any(math.isinf(r.loss) for r in self._runs.get((course, 2**step, self.length), ())):
            step -= 0.25
        return 2.0**step

    @cached_property
    def length(self) -> int:
        """Samples of the trainings: the longest by halves at whose end the loss still falls.

        A length that the user gave, or at which rates are tuned, stays unless the loss does not
        move at all. 0: there is none.
        """
        plan, samples, settings = self.plan, self.plan.samples, self.header.settings
        stays = settings.samples or settings.tune
        while samples:
            curves = [*self.curves(samples, 1.0, settings.tune).values()]
            ends = [(curve[0][1], curve[-1][1]) for curve in curves[: LOOKS[0]]]
            if len(ends) < LOOKS[0] or not np.isfinite(ends).all():
                break
            falls = [first - last for first, last in ends]
            fall = math.fsum(map(abs, falls) if stays else falls)
            if fall > branches.ROUNDING * math.fsum(abs(first) for first, _ in ends):
                break
            steps = samples // 2 // plan.batch_size
            samples = 0 if stays or steps < LEAST else steps * plan.batch_size
        return samples

    def curves(self, samples: int, rate: float, tuning: bool = False) -> Curves:
        """The smallest batch's losses at the lengths up to ``samples``, by seed."""
        lengths = lengths_of(samples, self.tolerance)
        if self.task.lr_decay == "none":
            return {r.repeat: r.curve for r in self.runs(self.base, rate, samples, tuning)}
        rows = [{r.repeat: r for r in self.runs(self.base, rate, n)} for n in lengths]
        seeds = sorted(set.intersection(*map(set, rows)))
        return {seed: [(row[seed].place, row[seed].loss) for row in rows] for seed in seeds}

    @cached_property
    def own(self) -> Curves:
        """The smallest batch's losses, at its own rate or its best one."""
        rate = self.tuned(self.base)
        return self.curves(self.length, rate) if rate else {}

    def _pairs(self, course: str) -> Pairs | None:
        rate = self.tuned(course)
        return Pairs.of(self.runs(course, rate), self.own, self.tolerance) if rate else None

    @cached_property
    def sizes(self) -> dict[int, Pairs]:
        """The batch sizes that were compared with the smallest, ascending."""
        courses = {course for course, _, samples in self._runs if samples == self.length}
        single = sorted(int(course) for course in courses - {self.base} if "-" not in course)
        found = {size: pairs for size in single if (pairs := self._pairs(str(size)))}
        return {
            size: replace(pairs, prior=shared_variance(found[x] for x in found if x != size))
            for size, pairs in found.items()
        }

    @cached_property
    def failed(self) -> int | None:
        """The smallest batch size that is certainly beyond the tolerance."""
        return next((size for size, pairs in self.sizes.items() if pairs.failed), None)

    @cached_property
    def passed(self) -> int | None:
        """The largest batch size within the tolerance, below all that are certainly beyond it."""
        most = self.failed or math.inf
        good = (size for size, pairs in self.sizes.items() if pairs.passed and size < most)
        return max(good, default=None)

    @property
    def rungs(self) -> list[int]:
        """Batch sizes that can be tried, from the smallest on."""
        return rungs(self.plan.batch_size, self.plan.largest_batch, self.header.runtime.world_size)

    @cached_property
    def constant(self) -> int | None:
        """The recommended batch size; None where nothing is known."""
        if self.passed is None and self.rungs[1] == self.failed:
            return self.plan.batch_size
        return self.passed

    def rate(self, size: int) -> dict[float, Better]:
        """Other learning rates beside the rule's; those without a look are left out."""
        course = str(size)
        own = self.runs(course)
        found = {rate: better(self.runs(course, rate), own, self.own) for rate in RATES}
        return {rate: b for rate, b in found.items() if b is not None}

    @property
    def warmup_samples(self) -> int:
        """Samples of a warm-up from the task's learning rate to a larger batch's."""
        if self.task.lr_rule == "constant" and not self.header.settings.tune:
            return 0
        return self.length // 16 // self.plan.batch_size * self.plan.batch_size

    @cached_property
    def criticals(self) -> dict[int, Critical]:
        """Critical batch sizes by point, unresolved ones included."""
        found = {}
        for point in range(len(self.plan.points)):
            own = [branch for branch in self.results.select(Branch) if branch.point == point]
            seed = seed_for(self.header.settings.seed, "critical", point)
            if critical := branches.find_critical(own, self.tolerance, seed=seed):
                found[point] = critical
        return found

    @cached_property
    def diverged(self) -> float:
        """Smallest batch size that diverged in a branch or a training; infinite if none did."""
        branched = self.results.select(Branch)
        lost = {branch.batch_size for branch in branched if math.isinf(branch.loss)}
        lost |= {size for size, pairs in self.sizes.items() if pairs.lost}
        lost |= {c.diverged for c in self.criticals.values() if c.diverged}
        return min(lost, default=math.inf)

    def safe(self, critical: Critical) -> int:
        """Largest batch size that is safe at a point, and diverged nowhere in the study."""
        good = (s for s in critical.sizes if s <= critical.safe and s < self.diverged)
        return max(good, default=self.plan.batch_size)

    @cached_property
    def schedule(self) -> Stages:
        """A growing batch; empty where it would not take fewer steps than the constant one.

        No stage is larger than what was trained within the tolerance at its beginning and at all
        later points.
        """
        base, constant = self.plan.batch_size, self.constant
        points = [(self.plan.points[i], c) for i, c in self.criticals.items() if c.resolved]
        if constant is None or not points:
            return ()

        def rounded(size: int) -> int:
            """Down to a power of two times the smallest batch."""
            return base << ((size // base).bit_length() - 1)

        safe = [*accumulate((self.safe(c) for _, c in points[::-1]), min)][::-1]
        stages = [(0, rounded(min(constant, safe[0])))]
        for (samples, _), most in zip(points, safe, strict=True):
            if rounded(most) > stages[-1][1] and samples < self.length:
                stages.append((samples, rounded(most)))
        fewer = self.steps(tuple(stages)) < self.length / constant
        return tuple(stages) if len(stages) > 1 and fewer else ()

    @cached_property
    def schedule_pairs(self) -> Pairs | None:
        """The growing batch beside the smallest; None before the first look."""
        found = self._pairs(course_of(self.schedule)) if self.schedule else None
        return found and replace(found, prior=shared_variance(self.sizes.values()))

    def steps(self, stages: Stages) -> int:
        """Optimizer steps of a schedule over the run."""
        return sum((end - start) // size for start, end, size in stretches(stages, self.length))

    def lr(self, batch_size: int) -> float:
        """Learning rate at a batch size, by the task's rule."""
        return learning_rate(self.task.lr, batch_size, self.task.batch_size, self.task.lr_rule)


def _lowest(losses: Mapping[int, float | None]) -> int:
    """The step of the lowest loss; of equals, the one nearest to the rule's rate."""
    return min(losses, key=lambda step: (losses[step], abs(step), step))
