"""From results to the next trial and to the advice: pure functions of the results."""

import math
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from msgspec.structs import replace

from steadygrad.noise.schedule import learning_rate
from steadygrad.studies.advise import critical as branches
from steadygrad.studies.advise.critical import LEAST_FALL, ROUNDING, MeasuredPoint
from steadygrad.studies.advise.plan import Stages, averaged_end, scratch_job, stretches
from steadygrad.studies.advise.runs import (
    Baseline,
    baseline_of,
    checked_runs,
    judge_rate,
    scratch_runs,
)
from steadygrad.studies.advise.schema import (
    Branch,
    Checked,
    Critical,
    Header,
    Point,
    RateVerdict,
    Scratch,
)
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Key
from steadygrad.studies.trials import Job, seed_for

# Factor that allows for rounding errors when batch sizes are compared.
ALMOST = 1 - 1e-9
# The next candidate aims a little below the tolerance, for an overhead that is uncertain.
AIM = 0.9
# Largest ratio of a candidate to the largest batch size that passed.
STRIDE = 4


class Evidence:
    """Evidence of a study: its header and the events of its results."""

    def __init__(self, header: Header, results: Results) -> None:
        self.header, self.results = header, results
        self.plan, self.task, self.tolerance = header.plan, header.task, header.settings.tolerance

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
    def measured(self) -> list[MeasuredPoint]:
        """Points whose critical batch size is resolved."""
        rows = [*zip(self.plan.points, self.plan.branch_samples, strict=True)]
        found = [(*rows[i], c) for i, c in self.criticals.items() if c.resolved]
        return [MeasuredPoint(at, at + length / 2, c) for at, length, c in found]

    @cached_property
    def diverged(self) -> float:
        """Smallest batch size that diverged in a branch or a run; infinite if none did."""
        runs = sum(scratch_runs(self.results, "constant").values(), self.results.select(Branch))
        lost = {run.batch_size for run in runs if math.isinf(run.loss)}
        lost |= {run.batch_size for run in self.checked if run.diverged}
        lost |= {c.diverged for c in self.criticals.values() if c.diverged}
        return min(lost, default=math.inf)

    @cached_property
    def ceiling(self) -> int:
        """Largest batch size tried below all that diverged, in branches or runs."""
        tried = {run.batch_size for run in self.checked}
        tried.update(*(critical.sizes for critical in self.criticals.values()))
        return max((s for s in tried if s < self.diverged), default=self.plan.batch_size)

    def safe(self, critical: Critical) -> int:
        """Largest batch size that is safe at a point, and diverged nowhere in the study."""
        most = min(critical.safe, self.ceiling)
        return max((s for s in critical.sizes if s <= most), default=self.plan.batch_size)

    @cached_property
    def end(self) -> int | None:
        """Number of the point at which the runs from the initial weights end.

        It is the last one at which the loss still falls; see :func:`_still_falls`.
        """
        known = (point for point in self.results.select(Point) if point.point in self.criticals)
        falling = (p.point for p in known if _still_falls(p, self.criticals[p.point].spread))
        return max(falling, default=None)

    @property
    def length(self) -> int:
        """Samples of the runs from the initial weights; 0 where there is none."""
        return 0 if self.end is None else self.plan.points[self.end]

    @cached_property
    def predicted(self) -> int | None:
        """Batch size that the branches suggest for a whole run; None if none is resolved."""
        if self.end is None or not self.measured:
            return None
        most = min(branches.predict(self.measured, self.length, self.tolerance), self.ceiling)
        return self.rungs(most)[-1]

    def rungs(self, most: float) -> list[int]:
        """1, 1.5, 2, 3, 4, 6, ... times the task's batch size up to ``most``, as they fit."""
        found, base = list[int](), self.plan.batch_size
        size, world = base, self.header.runtime.world_size
        while size * ALMOST <= most:
            found += [size, size + size // 2] if size % 2 == 0 else [size]
            size *= 2
        return [base, *(s for s in found if base < s and s * ALMOST <= most and s % world == 0)]

    @cached_property
    def baseline(self) -> Baseline | None:
        """Runs of the smallest batch from the initial weights."""
        return None if self.end is None else baseline_of(self.plan, self.results, self.end)

    @cached_property
    def checked(self) -> list[Checked]:
        """Other batch sizes that were trained from the initial weights, ascending."""
        return self._checked("constant")

    def _checked(self, purpose: str) -> list[Checked]:
        found = self.results, self.plan, purpose, self.tolerance
        return checked_runs(self.baseline, *found) if self.baseline else []

    @property
    def failed(self) -> Checked | None:
        """The smallest batch size that was trained so and was not within the tolerance."""
        return next((run for run in self.checked if not run.within), None)

    @property
    def passed(self) -> Checked | None:
        """The largest batch size below all failed ones that was trained within the tolerance."""
        most = min(self.failed.batch_size if self.failed else math.inf, self.diverged)
        return next((run for run in reversed(self.checked) if run.batch_size < most), None)

    @property
    def constant(self) -> int | None:
        """The recommended batch size; None where nothing is known."""
        if self.passed is not None:
            return self.passed.batch_size
        if self.failed is not None:
            return self.plan.batch_size
        if self.predicted is None:
            return None
        trained = {size for point in self.measured for size in point.critical.sizes}
        return max(size for size in trained if size <= self.predicted)

    @property
    def known(self) -> bool:
        """Whether the recommended batch size passed, or the next larger one is known to fail."""
        if self.passed is not None or self.failed is None:
            return self.passed is not None
        size = self.failed.batch_size
        return self.failed.low > self.tolerance and self.rungs(size)[1:2] == [size]

    @property
    def warmup_samples(self) -> int:
        """Samples of the warm-up from the task's learning rate: up to the first point.

        Nothing is measured before that point. At most a quarter of the run.
        """
        if self.task.lr_rule == "constant":
            return 0
        size = self.plan.batch_size
        return min(self.plan.points[0], self.length // 4 // size * size)

    @cached_property
    def schedule(self) -> Stages:
        """A growing batch; empty where it would not take fewer steps than the constant one.

        No stage is larger than what was trained within the tolerance at its beginning and at all
        later points.
        """
        base, constant = self.plan.batch_size, self.constant
        if constant is None or not self.measured:
            return ()

        def rounded(size: int) -> int:
            """Down to a power of two times the smallest batch."""
            return base << ((size // base).bit_length() - 1)

        safe = [*accumulate((self.safe(p.critical) for p in self.measured[::-1]), min)][::-1]
        stages = [(0, rounded(min(constant, safe[0])))]
        for point, most in zip(self.measured, safe, strict=True):
            if rounded(most) > stages[-1][1] and point.samples < self.length:
                stages.append((point.samples, rounded(most)))
        fewer = self.steps(tuple(stages)) < self.length / constant
        return tuple(stages) if len(stages) > 1 and fewer else ()

    def steps(self, stages: Stages) -> int:
        """Optimizer steps of a schedule over the run."""
        return sum((end - start) // size for start, end, size in stretches(stages, self.length))

    @cached_property
    def schedule_check(self) -> Checked | None:
        """The schedule trained from the initial weights."""
        return next(reversed(self._checked("schedule")), None)

    @cached_property
    def rate(self) -> RateVerdict:
        """Verdict on the task's learning rate.

        It is for a run as long as the main trajectory; if the rate decays, as those of the check.
        """
        plan, decays = self.plan, self.task.lr_decay != "none"
        whole = len(plan.points) - 1 in self.criticals
        samples = self.length if decays else plan.length * whole
        found = judge_rate(plan, self.results, samples, decays=decays) if samples else RateVerdict()
        elsewhere = self.constant is not None and self.length != found.samples > 0
        # The best constant rate falls with the length of the run: it is too low for shorter ones.
        first = found.verdict == "low" or (found.verdict == "high" and not elsewhere)
        return replace(found, elsewhere=elsewhere, first=first)

    def lr(self, batch_size: int) -> float:
        """Learning rate at a batch size."""
        return learning_rate(self.task.lr, batch_size, self.task.batch_size, self.task.lr_rule)

    def next_candidate(self) -> int | None:
        """The batch size to train next; None where nothing is left to learn.

        The overhead grows in proportion to the batch size beyond the smallest one, as the
        trade-off between steps and samples has it.
        """
        if self.end is None:
            return None
        base, tolerance = self.plan.batch_size, self.tolerance
        top = min(self.ceiling, self.task.train_size)
        if not self.checked:
            return max(self.predicted or base, *self.rungs(top)[:2]) if top > base else None
        good, bad = self.passed, self.failed
        low = good.batch_size if good else base
        high = bad.batch_size if bad else int(min(STRIDE * low, top)) + 1
        if good and bad:
            slope = (bad.overhead - good.overhead) / (high - low)
            aim = low + (AIM * tolerance - good.overhead) / max(slope, 1e-9)
        else:
            # What failed may have failed by its interval alone.
            run, least = (bad, tolerance) if bad else (good, tolerance / (2 * STRIDE))
            assert run is not None
            aim = base + (run.batch_size - base) * AIM * tolerance / max(run.overhead, least)
        between = [size for size in self.rungs(high) if low < size < high]
        below = [size for size in between if size <= aim]
        return below[-1] if below else (between[0] if between and bad else None)


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
    least = max(LEAST_FALL * spread, ROUNDING * abs(losses[0]))
    return bool(fall > least and -slope > LEAST_FALL * error)


class Chooser:
    """Makes the jobs that depend on results; all repeats of a trial follow one decision.

    Each decision is made from what the trials that it needs have recorded, whatever else is
    there already: a resumed study decides as before.
    """

    def __init__(self, header: Header) -> None:
        self.header, self.plan = header, header.plan
        self._jobs: dict[Key, Job | None] = {}

    def __call__(self, key: Key, results: Results) -> Job | None:
        """The job of a trial; None where there is nothing to do."""
        if key[0] in ("point", "noise", "branch"):
            return dict(zip(("kind", "point", "repeat", "batch_size"), key, strict=False))
        name, repeat = key[:-1], key[-1]
        if name not in self._jobs:
            decide: Callable[..., Job | None] = self._middle if name[0] == "middle" else self._run
            self._jobs[name] = decide(results, *name)
        found = self._jobs[name]
        return None if found is None else {**found, "repeat": repeat}

    def _middle(self, results: Results, kind: str, point: int) -> Job | None:
        """A branch in the middle between the largest tolerable size and the next one."""
        ladder = {multiple * self.plan.batch_size for multiple in self.plan.multiples[point]}
        kept = [b for b in results.select(Branch) if b.point == point and b.batch_size in ladder]
        found = Evidence(self.header, Results(kept)).criticals.get(point)
        if found is None or not found.resolved or found.beyond != 2 * found.within:
            return None
        size, odd = divmod(3 * found.within, 2)
        if odd or size % self.header.runtime.world_size:
            return None
        return {"kind": "branch", "point": point, "batch_size": size}

    def _run(self, results: Results, kind: str, which: Any = 1) -> Job | None:
        """A run from the initial weights, where there is a length for it."""
        stages: Stages = ((0, self.plan.batch_size),)
        if kind == "rate" and self.header.task.lr_decay == "none":
            return scratch_job(stages, self.plan.length, rate=float(which))
        if kind in ("baseline", "rate"):
            length = Evidence(self.header, results).length
            return scratch_job(stages, length, rate=float(which)) if length else None
        evidence = self._before(results, which if kind == "candidate" else self.plan.candidates)
        if kind == "candidate":
            size = evidence.next_candidate()
            stages = () if size is None else ((0, size),)
        else:
            stages = evidence.schedule if evidence.baseline else ()
        warmup = evidence.warmup_samples
        return scratch_job(stages, evidence.length, warmup_samples=warmup) if stages else None

    def _before(self, results: Results, candidates: int) -> Evidence:
        """The evidence without the runs that later trials have recorded."""
        jobs = (self._jobs.get(("candidate", number)) for number in range(candidates))
        sizes = {self.plan.batch_size, *(int(job["batch_size"]) for job in jobs if job)}
        kept = (
            r
            for r in results
            if not isinstance(r, Scratch) or (r.purpose == "constant" and r.batch_size in sizes)
        )
        return Evidence(self.header, Results(kept))
