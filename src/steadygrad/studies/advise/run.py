"""The study from its first check to its summary."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from steadygrad._checks import InputError, check_number
from steadygrad.record import RecordError, RunWriter, plural, read_run
from steadygrad.studies.advise.checkpoint import Checkpoints
from steadygrad.studies.advise.engine import Engine
from steadygrad.studies.advise.header import changes, make_header
from steadygrad.studies.advise.ledger import Ledger
from steadygrad.studies.advise.order import main_order
from steadygrad.studies.advise.plan import Plan, make_plan
from steadygrad.studies.advise.ranks import Ranks
from steadygrad.studies.advise.settings import Settings, read_settings
from steadygrad.studies.advise.stop import BUDGET, Halt, Stop
from steadygrad.studies.advise.summary import summarize
from steadygrad.studies.advise.units import Units
from steadygrad.tasks import load_task

__all__ = ["Failed", "Monitor", "Outcome", "advise", "resume"]

WARM_UP_STEPS = 4
CALIBRATION_SECONDS = 0.5


class Monitor(Protocol):
    """Watches a study on rank 0."""

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Told once, before the work.

        Args:
            total: Samples of work in all.
            done: How many of them an earlier run has done.
            points: Work done when each point of training is measured, by the point's name.
        """

    def advance(self, samples: int, what: str) -> None:
        """Told as work is done, and what it is."""

    def say(self, line: str) -> None:
        """A line for the user, such as a warning."""


@dataclass(frozen=True)
class Outcome:
    """How a study ended.

    Attributes:
        folder: The run's folder.
        summary: The content of ``summary.json``.
        stopped_by: The signal that ended it; 0 otherwise.
        is_main: Whether this process wrote it.
    """

    folder: Path
    summary: dict[str, Any]
    stopped_by: int = 0
    is_main: bool = True


class Failed(InputError):
    """Training failed after the record was begun; what was measured until then is kept.

    Why is the ``__cause__``.

    Attributes:
        folder: The run's folder, with a summary.
        is_main: Whether this process wrote it.
    """

    def __init__(self, message: str, folder: Path, *, is_main: bool) -> None:
        super().__init__(message)
        self.folder, self.is_main = folder, is_main


@dataclass
class _Study:
    """Everything that a study needs while it runs."""

    folder: Path
    header: Mapping[str, Any]
    engine: Engine
    plan: Plan
    writer: RunWriter | None
    monitor: Monitor
    events: list[dict[str, Any]] = field(default_factory=list)
    times: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> Outcome:
        """Does the work, and writes the summary however it ends."""
        ledger = Ledger(self.writer, self.events)
        self.monitor.begin(self.plan.work, _done(ledger, self.plan), self._points())
        try:
            status, reason = self._work(ledger)
            summary = self._write(ledger, status)
        except RecordError:
            raise
        except InputError as error:
            self._write(ledger, "failed")
            is_main = self.engine.ranks.is_main
            raise Failed(str(error), self.folder, is_main=is_main) from error
        finally:
            if self.writer is not None:
                self.writer.close()
        return Outcome(self.folder, summary, reason, self.engine.ranks.is_main)

    def _points(self) -> dict[str, int]:
        """Work done when each point of training is measured."""
        sample = plural(self.header["task"]["sample"])
        names = (f"{point.samples:,} {sample}" for point in self.plan.points)
        return dict(zip(names, self.plan.ends(), strict=True))

    def _work(self, ledger: Ledger) -> tuple[str, int]:
        """Runs the units. Returns how that ended, and the signal that ended it or 0."""
        units = Units(
            self.engine,
            self.plan,
            ledger,
            Checkpoints(self.folder),
            tolerance=self.header["settings"]["tolerance"],
            advance=self.monitor.advance,
        )
        try:
            units.run()
        except Halt as halt:
            return ("budget" if halt.reason == BUDGET else "interrupted"), halt.reason
        return "complete", 0

    def _write(self, ledger: Ledger, status: str) -> dict[str, Any]:
        summary = summarize(self.header, ledger, status)
        if self.writer is None:
            return summary
        if ledger.differing:
            self.monitor.say(
                f"{ledger.differing} numbers differ from those recorded: the machine or its "
                "libraries are not the same."
            )
        # In this order: a summary that says "complete" is the last thing that can be missing.
        ledger.end(status, **self.times)
        self.writer.write_summary(summary)
        if status == "complete":
            Checkpoints(self.folder).remove()
        return summary


def advise(
    settings: Settings, folder: Path, *, stop: Stop | None = None, monitor: Monitor
) -> Outcome:
    """Runs the study in a new folder.

    Args:
        settings: What to do.
        folder: Absent or empty.
        stop: Ends the study early. Default: only when the budget, from now on, is over.
        monitor: Watches.

    Raises:
        InputError: For anything that cannot be used; the record is not begun.
        Failed: If training diverges, or the task's code raises, later on.
    """
    stop = stop or Stop()
    ranks = Ranks.join(stop, settings.resolved_device)
    try:
        engine = _engine(settings, ranks)
        task = engine.task
        plan = make_plan(
            settings.budget_seconds,
            _speed(engine),
            batch_size=task.batch_size,
            train_size=len(task.train),
            valid_size=len(task.valid),
        )
        header = make_header(settings, engine, plan)
        writer = ranks.on_main(lambda: _create(folder, header))
        stop.limit(settings.budget_seconds)
        return _Study(folder, header, engine, plan, writer, monitor).run()
    finally:
        ranks.leave()


def resume(
    folder: Path,
    *,
    budget_seconds: float | None = None,
    stop: Stop | None = None,
    monitor: Monitor,
) -> Outcome:
    """Goes on with a run that was killed or stopped, to the numbers it would have had.

    The settings and the plan are those of the record; the budget's clock starts again.

    Args:
        folder: The run's folder.
        budget_seconds: Time from now on. It changes when the study is cut short, not what it
            does. Default: that of the record.
        stop: As for :func:`advise`.
        monitor: Watches.

    Raises:
        InputError: If the record cannot be read, is of another study, or the task's data or the
            number of processes have changed.
        Failed: If training diverges, or the task's code raises, later on.
    """
    recorded = read_run(folder)
    settings, plan = read_settings(recorded), Plan.from_dict(recorded.header["plan"])
    budget = settings.budget_seconds if budget_seconds is None else budget_seconds
    check_number("budget_seconds", budget, low=0, low_open=True)
    if recorded.summary is not None and recorded.summary.get("status") == "complete":
        # Before the ranks join: a finished run needs neither its device nor the others.
        if Ranks.first():
            Checkpoints(folder).remove()
            if budget_seconds is not None:
                monitor.say("this run is complete: its plan has nothing left for more time to do.")
        return Outcome(folder, recorded.summary, is_main=Ranks.first())
    stop = stop or Stop()
    ranks = Ranks.join(stop, settings.resolved_device)
    try:
        engine = _engine(settings, ranks)
        for warning in changes(recorded.header, engine):
            monitor.say(warning)
        # Read on every rank before one of them writes.
        ranks.gather(None)
        writer = ranks.on_main(lambda: RunWriter.resume(folder))
        stop.limit(budget)
        # Under "time": a run that had more of it is the same run.
        times = {} if budget == settings.budget_seconds else {"time": {"budget_seconds": budget}}
        events = recorded.events
        study = _Study(folder, recorded.header, engine, plan, writer, monitor, events, times)
        return study.run()
    finally:
        ranks.leave()


def _create(folder: Path, header: Mapping[str, Any]) -> RunWriter:
    # Before anything is written: it may have to say that safetensors is missing.
    Checkpoints(folder)
    return RunWriter.create(folder, header)


def _engine(settings: Settings, ranks: Ranks) -> Engine:
    task = ranks.together(lambda: load_task(settings.task))
    engine = Engine(task, seed=settings.seed, dtype=settings.dtype, ranks=ranks)
    engine.try_once()
    return engine


def _speed(engine: Engine) -> float:
    """Samples a second: the task's own figure on CPU, else measured and rounded down."""
    task, ranks = engine.task, engine.ranks
    if task.samples_per_second is not None and ranks.device.type == "cpu":
        return task.samples_per_second
    order = main_order(len(task.train), engine.seed)
    steps = engine.run(order, 0, 1 << 40, task.batch_size)
    for _ in range(WARM_UP_STEPS):
        next(steps)
    began, seen = time.monotonic(), 0
    # Every rank takes part until rank 0 has seen enough.
    while ranks.gather(time.monotonic() - began < CALIBRATION_SECONDS)[0]:
        for _ in range(4):
            next(steps)
            seen += task.batch_size
    speed = ranks.gather(seen / (time.monotonic() - began))[0]
    engine.restart()
    # A power of two: a machine a little busier than last time makes the same plan.
    return float(2.0 ** math.floor(math.log2(speed)))


def _done(ledger: Ledger, plan: Plan) -> int:
    """Samples of work that are recorded already."""
    trained = max((event["samples"] for event in ledger.select("point")), default=0)
    events = [*ledger.select("noise"), *ledger.select("branch")]
    return int(min(plan.work, trained + sum(event["samples"] for event in events)))
