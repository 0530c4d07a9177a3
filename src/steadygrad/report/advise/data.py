"""What an ``advise`` record holds, gathered for its page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steadygrad.record import Run, TaskInfo, plural
from steadygrad.record.schema import advise as record
from steadygrad.report.numbers import show

__all__ = ["Advice", "Point", "gather", "percent", "percent_interval"]

Curve = Sequence[tuple[float, float]]

# From this overhead on it is only known that it is large.
MOST = 3.0


@dataclass(frozen=True)
class Point:
    """One point of training at which the study measured.

    Attributes:
        reached: The event; its ``samples`` is the place.
        branch_samples: Samples of each branch from here.
        noise: Gradient noise scale, if measured.
        critical: Critical batch size of the summary, if measured.
        resolved: Whether the smallest batch's loss fell enough for it to be known.
        branches: Branches from there.
    """

    reached: record.Point
    branch_samples: int
    noise: record.Noise | None
    critical: Mapping[str, Any] | None
    resolved: bool
    branches: Sequence[record.Branch]

    @property
    def samples(self) -> int:
        """Samples seen until here."""
        return self.reached.samples

    def told(self, name: str) -> Any:
        """A number of the summary's critical batch size; None if there is none."""
        return self.critical[name] if self.critical else None

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of the branches, ascending."""
        return sorted({branch.batch_size for branch in self.branches})

    def of(self, batch_size: int) -> list[record.Branch]:
        """The branches of one batch size."""
        return [branch for branch in self.branches if branch.batch_size == batch_size]

    @property
    def diverged(self) -> float:
        """Smallest batch size that diverged; infinite if none did."""
        lost = [branch.batch_size for branch in self.branches if math.isinf(branch.loss)]
        told = self.told("diverged") if self.resolved else None
        return min([told or math.inf, *lost])


@dataclass(frozen=True)
class Advice:
    """The whole record of an ``advise`` run.

    Attributes:
        header: First line of the record.
        words: The findings in sentences.
        points: In the order of training.
        scratch: Runs from scratch.
        recommendation: Fixed batch size of the summary; empty without one.
        schedule: Growing batch of the summary; empty without one.
        rate: Verdict on the learning rate of the summary; empty without one.
        checked: Batch sizes of the summary that were trained from scratch.
        status: How the study ended, or its last attempt did; empty without a summary.
        truncated: Whether a broken last line was dropped.
    """

    header: record.Header
    words: Sequence[str]
    points: Sequence[Point]
    scratch: Sequence[record.Scratch]
    recommendation: Mapping[str, Any]
    schedule: Mapping[str, Any]
    rate: Mapping[str, Any]
    checked: Sequence[Mapping[str, Any]]
    status: str
    truncated: bool

    @property
    def task(self) -> TaskInfo:
        """What was trained."""
        return self.header.task

    @property
    def base(self) -> int:
        """The smallest batch size, the task's own."""
        return self.header.plan.batch_size

    @property
    def samples(self) -> str:
        """What several samples are called."""
        return plural(self.task.sample)

    @property
    def tolerance(self) -> str:
        """Extra samples that are acceptable."""
        return percent(self.header.settings.tolerance)

    @property
    def batch_size(self) -> int | None:
        """The recommended batch size."""
        size: int | None = self.recommendation.get("batch_size")
        return size

    @property
    def length(self) -> int:
        """Samples of the runs from scratch; 0 where none is planned yet."""
        return self.recommendation.get("samples") or 0

    def runs(self, purpose: str, batch_size: int) -> list[record.Scratch]:
        """Runs from scratch at the rule's learning rate, by seed."""
        found = [
            run
            for run in self.scratch
            if (run.purpose, run.batch_size, run.rate) == (purpose, batch_size, 1)
        ]
        return sorted(found, key=lambda run: run.repeat)

    def baseline(self) -> list[Curve]:
        """Curves of the smallest batch from scratch, one for each seed; they share their places.

        Seed 0 is the main trajectory, unless the task's learning rate decays. The other seeds'
        last loss is an average over the end of the run, and so is its here.
        """
        runs = self.runs("constant", self.base)
        curves: list[Curve] = [run.curve for run in runs]
        if not runs or runs[0].repeat == 0:
            return curves
        ways, end = [place for place, _ in curves[0][:-1]], curves[0][-1][0]
        reached = (point.reached for point in self.points if point.samples <= self.length)
        main: dict[float, float] = {x: y for event in reached for x, y in event.curve}
        last = [y for x, y in main.items() if x > max(ways, default=0)]
        if not last or not set(ways) <= set(main):
            return curves
        return [[*((x, main[x]) for x in ways), (end, sum(last) / len(last))], *curves]

    def steps(self, batch_size: int) -> int | None:
        """Optimizer steps of a run from scratch, as recorded."""
        runs = self.runs("constant", batch_size)
        main = [p.reached.steps for p in self.points if p.samples == self.length]
        found = [run.steps for run in runs] or (main if batch_size == self.base else [])
        return found[0] if found else None


def gather(run: Run) -> Advice:
    """Sorts a record. Without a summary, what it would hold is empty."""
    summary = run.summary or {}
    return Advice(
        header=run.header,
        words=summary.get("words", ()),
        points=_points(run, {row["samples"]: row for row in summary.get("points", ())}),
        scratch=run.select(record.Scratch),
        recommendation=summary.get("recommendation") or {},
        schedule=summary.get("schedule") or {},
        rate=summary.get("rate") or {},
        checked=summary.get("checked", ()),
        status=summary.get("status", ""),
        truncated=run.truncated,
    )


def _points(run: Run, rows: Mapping[int, Mapping[str, Any]]) -> list[Point]:
    reached = sorted(run.select(record.Point), key=lambda event: event.point)
    noises = {event.point: event for event in run.select(record.Noise)}
    branches = sorted(run.select(record.Branch), key=lambda b: (b.batch_size, b.repeat))
    found = []
    for event in reached:
        # Of a study that goes on the summary is older than the events.
        row = rows.get(event.samples, {})
        own = [branch for branch in branches if branch.point == event.point]
        found.append(
            Point(
                event,
                run.header.plan.branch_samples[event.point],
                noises.get(event.point),
                row.get("critical"),
                bool(row.get("resolved")),
                own,
            )
        )
    return found


def percent(fraction: float | None) -> str:
    """Writes a fraction as a percentage, such as a sample overhead."""
    if fraction is None or math.isnan(fraction):
        return "–"
    return "300% or more" if fraction >= MOST else f"{show(round(100 * fraction))}%"


def percent_interval(low: float | None, high: float | None) -> str:
    """Writes an interval of fractions."""
    if low is None or high is None:
        return "–"
    return percent(low) if low >= MOST else f"{percent(low)} to {percent(high)}"
