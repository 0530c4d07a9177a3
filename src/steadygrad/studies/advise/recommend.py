"""From results to the next trial and to the recommendation: pure functions of the journal."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from steadygrad.formulas.batch_size import learning_rate
from steadygrad.record.schema.advise import Branch, Header, Noise, Point
from steadygrad.studies.advise.check import (
    Baseline,
    Checked,
    averaged_end,
    baseline_of,
    checked_runs,
)
from steadygrad.studies.advise.critical import LEAST_FALL, Critical, find_critical
from steadygrad.studies.advise.overhead import MeasuredPoint, predict
from steadygrad.studies.advise.rates import RateVerdict, judge_rate
from steadygrad.studies.journal import Journal
from steadygrad.studies.order import seed_for

__all__ = ["Evidence", "Stages", "candidates_up_to"]

Stages = tuple[tuple[int, int], ...]
"""Beginnings, in samples seen, and batch sizes."""

# What a rounding error may take from a batch size.
ALMOST = 1 - 1e-9
# The next candidate aims a little below the tolerance, for an overhead that is uncertain.
AIM = 0.9
# A candidate is at most so many times the largest one that passed.
STRIDE = 4


def candidates_up_to(most: float, base: int, world_size: int = 1) -> list[int]:
    """1, 1.5, 2, 3, 4, 6, ... times ``base``, as far as they are whole and at most ``most``.

    At least ``base``. Each is a multiple of ``world_size``.
    """
    found, size = [base], base
    while size * ALMOST <= most:
        found += [size, size + size // 2] if size % 2 == 0 else [size]
        size *= 2
    fits = (s for s in found if s > base and s * ALMOST <= most and s % world_size == 0)
    return [base, *fits]


@dataclass(frozen=True)
class Evidence:
    """What a journal says.

    Attributes:
        header: The record's.
        journal: The events.
    """

    header: Header
    journal: Journal

    @cached_property
    def points(self) -> list[Point]:
        """Points of training that were reached."""
        return sorted(self.journal.select(Point), key=lambda event: event.point)

    @cached_property
    def criticals(self) -> dict[int, Critical]:
        """Critical batch sizes by point, unresolved ones included."""
        found = {}
        for i in range(len(self.header.plan.points)):
            critical = self.critical(i)
            if critical is not None:
                found[i] = critical
        return found

    def critical(self, point: int) -> Critical | None:
        """The critical batch size at one point; None where too few branches are there."""
        settings = self.header.settings
        branches = [b for b in self.journal.select(Branch) if b.point == point]
        branches.sort(key=lambda b: (b.batch_size, b.repeat))
        seed = seed_for(settings.seed, "critical", point)
        return find_critical(branches, settings.tolerance, seed=seed)

    @cached_property
    def measured(self) -> list[MeasuredPoint]:
        """Points whose critical batch size is resolved."""
        plan = self.header.plan
        return [
            MeasuredPoint(plan.points[i], plan.branch_samples[i], critical)
            for i, critical in self.criticals.items()
            if critical.resolved
        ]

    @property
    def last(self) -> int | None:
        """Number of the last resolved point, from which one may go on."""
        resolved = [i for i, critical in self.criticals.items() if critical.resolved]
        return resolved[-1] if resolved else None

    @cached_property
    def end(self) -> int | None:
        """Number of the point at which runs from scratch end.

        It is the last one at which the loss still falls; see :func:`_still_falls`.
        """
        falling = [
            point.point
            for point in self.points
            if point.point in self.criticals
            and _still_falls(point, self.criticals[point.point].spread)
        ]
        return falling[-1] if falling else None

    @property
    def length(self) -> int:
        """Samples of the runs from scratch; 0 where there is none."""
        return 0 if self.end is None else self.header.plan.points[self.end]

    @cached_property
    def predicted(self) -> int | None:
        """Batch size that the branches suggest for a run from scratch; None if none is resolved."""
        if self.end is None or not self.measured:
            return None
        value = predict(self.measured, self.length, self.header.settings.tolerance)
        return self.rungs(value)[-1]

    def rungs(self, most: float) -> list[int]:
        """Candidates up to a batch size."""
        return candidates_up_to(most, self.header.plan.batch_size, self.header.runtime.world_size)

    @cached_property
    def baseline(self) -> Baseline | None:
        """Runs of the smallest batch from scratch."""
        if self.end is None:
            return None
        return baseline_of(self.header.plan, self.journal, self.end)

    @cached_property
    def checked(self) -> list[Checked]:
        """Batch sizes that were trained from scratch, ascending."""
        return self._checked("constant")

    def _checked(self, purpose: str) -> list[Checked]:
        if self.baseline is None:
            return []
        return checked_runs(self.baseline, self.journal, self.header.plan, purpose)

    @property
    def failed(self) -> Checked | None:
        """The smallest batch size that was trained from scratch and was not within tolerance."""
        tolerance = self.header.settings.tolerance
        return next((run for run in self.checked if not run.within(tolerance)), None)

    @property
    def passed(self) -> Checked | None:
        """The largest batch size below all failed ones that was trained within tolerance."""
        good = [
            run
            for run in self.checked
            if self.failed is None or run.batch_size < self.failed.batch_size
        ]
        return good[-1] if good else None

    @property
    def constant(self) -> int | None:
        """The recommended batch size; None where nothing is known."""
        if self.passed is not None:
            return self.passed.batch_size
        if self.failed is not None:
            return self.header.plan.batch_size
        if self.predicted is None:
            return None
        trained = {size for point in self.measured for size in point.critical.sizes}
        return max(size for size in trained if size <= self.predicted)

    @property
    def known(self) -> bool:
        """Whether the recommended batch size passed, or the next larger one surely did not."""
        failed = self.failed
        return self.passed is not None or (
            failed is not None and failed.low > self.header.settings.tolerance
        )

    @property
    def warmup_samples(self) -> int:
        """Samples over which a raised rate is warmed up: until the first point nothing is known."""
        return 0 if self.header.task.lr_rule == "constant" else self.header.plan.points[0]

    @cached_property
    def schedule(self) -> Stages:
        """A growing batch; empty where it would not take fewer steps than the constant one.

        No stage is larger than what was trained within the tolerance at its beginning and at all
        later points.
        """
        base, constant = self.header.plan.batch_size, self.constant
        if constant is None or not self.measured or self.length <= 0:
            return ()
        safe: list[tuple[int, int]] = []
        least = math.inf
        for point in reversed(self.measured):
            least = min(least, point.critical.safe)
            safe.insert(0, (point.samples, _power_of_two(least, base)))
        stages = [(0, min(_power_of_two(constant, base), safe[0][1]))]
        for start, size in safe:
            if size > stages[-1][1] and start < self.length:
                stages.append((start, size))
        fewer = self.steps(tuple(stages)) < self.length / constant
        return tuple(stages) if len(stages) > 1 and fewer else ()

    def steps(self, stages: Stages) -> int:
        """Optimizer steps of a schedule over the run."""
        borders = [*(start for start, _ in stages[1:]), self.length]
        return sum(
            (end - start) // size for (start, size), end in zip(stages, borders, strict=True)
        )

    @cached_property
    def schedule_check(self) -> Checked | None:
        """The schedule trained from scratch."""
        found = self._checked("schedule")
        return found[-1] if found else None

    @cached_property
    def rate(self) -> RateVerdict:
        """Verdict on the task's learning rate."""
        last = len(self.header.plan.points) - 1
        if last not in self.criticals:
            return RateVerdict()
        decays = self.header.task.lr_decay != "none"
        return judge_rate(self.header.plan, self.journal, decays=decays)

    @property
    def noise(self) -> Noise | None:
        """The last noise scale."""
        found = sorted(self.journal.select(Noise), key=lambda event: event.point)
        return found[-1] if found else None

    def lr(self, batch_size: int) -> float:
        """Learning rate at a batch size."""
        task = self.header.task
        return learning_rate(task.lr, batch_size, task.batch_size, task.lr_rule)

    def next_candidate(self) -> int | None:
        """The batch size to train from scratch next; None where nothing is left to learn.

        The overhead grows in proportion to the batch size beyond the smallest one, as the
        trade-off between steps and samples has it.
        """
        base, tolerance = self.header.plan.batch_size, self.header.settings.tolerance
        top = min(self._ceiling, self.header.task.train_size)
        if self.end is None:
            return None
        if not self.checked:
            return max(self.predicted or base, *self.rungs(top)[:2]) if top > base else None
        good, bad = self.passed, self.failed
        if bad is not None and good is not None:
            slope = (bad.overhead - good.overhead) / (bad.batch_size - good.batch_size)
            aim = good.batch_size + (AIM * tolerance - good.overhead) / max(slope, 1e-9)
            low, high = good.batch_size, bad.batch_size
        elif bad is not None:
            # It may have failed by its interval alone.
            overhead = max(bad.overhead, tolerance)
            aim = base + (bad.batch_size - base) * AIM * tolerance / overhead
            low, high = base, bad.batch_size
        else:
            assert good is not None
            overhead = max(good.overhead, tolerance / (2 * STRIDE))
            aim = base + (good.batch_size - base) * AIM * tolerance / overhead
            low, high = good.batch_size, int(min(STRIDE * good.batch_size, top)) + 1
        between = [size for size in self.rungs(high) if low < size < high]
        below = [size for size in between if size <= aim]
        return below[-1] if below else (between[0] if between and bad is not None else None)

    @property
    def _ceiling(self) -> float:
        """Largest batch size tried that diverged at no point."""
        ceilings = [max(c.sizes) for c in self.criticals.values()]
        stable = [
            max(size for size in c.sizes if size < c.diverged)
            for c in self.criticals.values()
            if c.diverged is not None
        ]
        return min([max(ceilings, default=0), *stable])


def _still_falls(point: Point, spread: float) -> bool:
    """Whether the validation loss still falls at a point of the main trajectory.

    Over the second half of the run so far it must fall by three standard deviations of a single
    run, and its slope over the logarithm of the samples by three standard errors.
    """
    curve = [(x, y) for x, y in averaged_end(point.curve) if x >= point.samples / 2]
    places, losses = (np.array(column, dtype=float) for column in zip(*curve, strict=True))
    progress = np.log(places) - np.log(places).mean()
    slope = progress @ losses / (progress @ progress)
    residuals = losses - losses.mean() - slope * progress
    error = math.sqrt(residuals @ residuals / (len(curve) - 2) / (progress @ progress))
    fall = losses[0] - losses[-1]
    return bool(fall > LEAST_FALL * spread and -slope > LEAST_FALL * error)


def _power_of_two(size: float, base: int) -> int:
    found = base
    while 2 * found * ALMOST <= size:
        found *= 2
    return found
