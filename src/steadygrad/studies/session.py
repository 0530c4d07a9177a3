"""A study from the start of its record to its summary, however it ends."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from steadygrad._checks import InputError
from steadygrad.record import RecordError, Run, RunWriter
from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.engine import Engine
from steadygrad.studies.ledger import Ledger
from steadygrad.studies.ranks import Ranks
from steadygrad.studies.stop import BUDGET, Halt

__all__ = ["Failed", "Monitor", "Outcome", "Session", "create", "finished"]


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
class Session:
    """Everything that a study needs while it runs.

    Attributes:
        folder: The run's folder.
        header: The record's.
        engine: Trains.
        work: Does all that the ledger does not hold yet.
        summarize: Makes the summary of a header, a ledger and a status.
        total: Samples of work in all.
        done: How many of them a ledger holds already.
        points: Work done when each point of training is measured, by the point's name.
        writer: None on the ranks that do not write.
        monitor: Watches.
        events: Those of the run that is resumed.
        times: What the end of the record says of this time.
    """

    folder: Path
    header: Mapping[str, Any]
    engine: Engine
    work: Callable[[Ledger, Checkpoints], None]
    summarize: Callable[[Mapping[str, Any], Ledger, str], dict[str, Any]]
    total: int
    done: Callable[[Ledger], int]
    points: Mapping[str, int]
    writer: RunWriter | None
    monitor: Monitor
    events: list[dict[str, Any]] = field(default_factory=list)
    times: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> Outcome:
        """Does the work, and writes the summary however it ends."""
        ledger = Ledger(self.writer, self.events)
        self.monitor.begin(self.total, self.done(ledger), self.points)
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

    def _work(self, ledger: Ledger) -> tuple[str, int]:
        """Does the work. Returns how that ended, and the signal that ended it or 0."""
        try:
            self.work(ledger, Checkpoints(self.folder))
        except Halt as halt:
            return ("budget" if halt.reason == BUDGET else "interrupted"), halt.reason
        return "complete", 0

    def _write(self, ledger: Ledger, status: str) -> dict[str, Any]:
        summary = self.summarize(self.header, ledger, status)
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


def create(folder: Path, header: Mapping[str, Any]) -> RunWriter:
    """Starts the record of a new run."""
    # Before anything is written: it may have to say that safetensors is missing.
    Checkpoints(folder)
    return RunWriter.create(folder, header)


def finished(recorded: Run, budget_seconds: float | None, monitor: Monitor) -> Outcome | None:
    """The outcome of a run that is complete already; None for one that can go on.

    Asked before the ranks join: a finished run needs neither its device nor the others.
    """
    if recorded.summary is None or recorded.summary.get("status") != "complete":
        return None
    if Ranks.first():
        Checkpoints(recorded.folder).remove()
        if budget_seconds is not None:
            monitor.say("this run is complete: its plan has nothing left for more time to do.")
    return Outcome(recorded.folder, recorded.summary, is_main=Ranks.first())
