"""The contents of an ``advise`` record, gathered for its page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from steadygrad.studies.advise.schema import Branch, Header, Noise, Scratch
from steadygrad.studies.advise.schema import Point as Reached
from steadygrad.studies.folder import Run
from steadygrad.studies.text import percent, plural

__all__ = ["Advice", "Curve", "Point"]

Curve = Sequence[tuple[float, float]]


class Point:
    """One point of training at which the study measured, with its row of the summary or none."""

    def __init__(self, reached: Reached, run: Run, row: Mapping[str, Any]) -> None:
        self.reached, self.samples = reached, reached.samples
        self.branch_samples: int = run.header.plan.branch_samples[reached.point]
        noises = (event for event in run.select(Noise) if event.point == reached.point)
        self.noise = next(noises, None)
        # By batch size, ascending, one for each repeat.
        self.branches: dict[int, list[Branch]] = {}
        own = [branch for branch in run.select(Branch) if branch.point == reached.point]
        for branch in sorted(own, key=lambda branch: (branch.batch_size, branch.repeat)):
            self.branches.setdefault(branch.batch_size, []).append(branch)
        # The summary's critical batch size; empty where it was not measured.
        self.critical: Mapping[str, Any] = row.get("critical") or {}
        # Whether the smallest batch's loss fell enough for it to be known.
        self.resolved = bool(self.critical and row.get("resolved"))
        # The smallest batch size that diverged; infinite if none did.
        found = self.critical["diverged"] if self.resolved else None
        lost = [branch.batch_size for branch in own if math.isinf(branch.loss)]
        self.diverged = min([found or math.inf, *lost])


class Advice:
    """The whole record of an ``advise`` run. What a missing summary would hold is empty."""

    def __init__(self, run: Run) -> None:
        summary, header = run.summary or {}, run.header
        self.header: Header = header
        self.task, self.base = self.header.task, self.header.plan.batch_size
        self.samples = plural(self.task.sample)
        self.tolerance = percent(self.header.settings.tolerance)
        # The summary of an unfinished study is older than the events.
        rows = {row["samples"]: row for row in summary.get("points", ())}
        once = {event.point: event for event in run.select(Reached)}
        reached = sorted(once.values(), key=lambda event: event.point)
        self.points = [Point(event, run, rows.get(event.samples, {})) for event in reached]
        self.scratch = sorted(
            run.select(Scratch), key=lambda r: (r.purpose, r.batch_size, r.rate, r.repeat)
        )
        # How the study ended, or its last attempt did.
        self.status: str = summary.get("status", "")
        self.recommendation: Mapping[str, Any] = summary.get("recommendation") or {}
        self.batch_size: int | None = self.recommendation.get("batch_size")
        # Samples of the runs from scratch; 0 where none is planned yet.
        self.length: int = self.recommendation.get("samples") or 0
        self.schedule: Mapping[str, Any] = summary.get("schedule") or {}
        self.rate: Mapping[str, Any] = summary.get("rate") or {}
        self.checked: Sequence[Mapping[str, Any]] = summary.get("checked", ())

    def runs(self, purpose: str, batch_size: int | None = None) -> list[Scratch]:
        """Runs from scratch at the rule's learning rate, by batch size and seed."""
        kept = (run for run in self.scratch if (run.purpose, run.rate) == (purpose, 1))
        return [run for run in kept if batch_size in (None, run.batch_size)]

    def baseline(self) -> list[Curve]:
        """Curves of the smallest batch from scratch, one for each seed; they share their places.

        Seed 0 is the main trajectory, unless the task's learning rate decays. The other seeds'
        last loss is an average over the end of the run, and so is its here.
        """
        runs = self.runs("constant", self.base)
        curves: list[Curve] = [run.curve for run in runs]
        if not runs or runs[0].repeat == 0:
            return curves
        *ways, end = (place for place, _ in curves[0])
        reached = (point.reached for point in self.points if point.samples <= self.length)
        main: dict[float, float] = {x: y for event in reached for x, y in event.curve}
        last = [y for x, y in main.items() if x > max(ways, default=0)]
        if not last or not set(ways) <= set(main):
            return curves
        return [[*((x, main[x]) for x in ways), (end, sum(last) / len(last))], *curves]

    def steps(self, batch_size: int) -> int | None:
        """Optimizer steps of a run from scratch, as recorded."""
        found = [run.steps for run in self.runs("constant", batch_size)]
        if batch_size == self.base:
            found += [p.reached.steps for p in self.points if p.samples == self.length]
        return found[0] if found else None
