"""Hands trials to workers and records their results in the order of the trials."""

from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from steadygrad._checks import InputError
from steadygrad.record import Key, RecordError, convert, dumps, loads, replace_file
from steadygrad.studies.deadline import Deadline, stop_if
from steadygrad.studies.executor import Pool, WorkersLost, tails
from steadygrad.studies.journal import Journal
from steadygrad.studies.study import Job, Study, Trial
from steadygrad.studies.worker import ERRORS, STOP_FILE, Worker

__all__ = ["Coordinator", "Monitor", "run_serial"]

# Attempts at a trial whose workers die.
ATTEMPTS = 3
# Seconds that running trials get to notice that the study has to stop.
GRACE = 10.0


class Monitor(Protocol):
    """Watches a study on rank 0."""

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Told once: the samples of work in all, those done before, and those at each milestone."""

    def advance(self, samples: int, what: str) -> None:
        """Called as work is done, with the trials that it was done on."""

    def skip(self, samples: int) -> None:
        """Called where planned work is not needed."""

    def say(self, line: str) -> None:
        """A line for the user, such as a warning."""


def run_serial(study: Study, journal: Journal, worker: Worker, monitor: Monitor) -> None:
    """Runs all trials that are not recorded yet in this process, in their order."""
    counted = study.finished(journal)
    for trial in study.trials():
        job, told = trial.job(journal), 0

        def advance(samples: int, what: str) -> None:
            nonlocal told
            told += samples
            monitor.advance(samples, what)

        if job is not None:
            key = study.key_of(job)
            if key not in journal:
                with _naming(trial, job):
                    event, repeated = worker.run(job, advance)
                for each in [*repeated, event]:
                    journal.add(each)
            journal.record(key)
        if trial.key not in counted:
            monitor.skip(trial.cost - told)


@contextmanager
def _naming(trial: Trial, job: Job) -> Iterator[None]:
    """Says in an error of a trial which one it was."""
    try:
        yield
    except InputError as error:
        error.args = (f"{trial.called(job)}: {error}",)
        raise


@dataclass
class _Running:
    trial: Trial
    job: Job
    key: Key
    attempts: int = 1


@dataclass
class Coordinator:
    """Runs the trials of a study side by side.

    Args:
        study: The study.
        journal: Takes the results, in the order of the trials.
        pool: The workers; closed at the end.
        folder: The run's folder, which all workers share.
        deadline: Asked five times a second.
        monitor: Watches.
    """

    study: Study
    journal: Journal
    pool: Pool
    folder: Path
    deadline: Deadline
    monitor: Monitor

    def __post_init__(self) -> None:
        self.trials = list(self.study.trials())
        chains = tails(self.trials)
        self.by_urgency = sorted(self.trials, key=lambda trial: -chains[trial.key])
        # Jobs of the trials whose needs are met; None where there is nothing to do.
        self.jobs: dict[Key, Job | None] = {}
        # Trials whose result is there, or that have nothing to do.
        self.done: set[Key] = set()
        # Trials whose cost the monitor knows to be done.
        self.counted = self.study.finished(self.journal)
        self.running: dict[Future[str], _Running] = {}
        self.unrecorded = list(self.trials)

    def run(self) -> None:
        """Runs all trials that are not recorded yet.

        Raises:
            StudyInterrupted: When the study has to stop.
            InputError: If a trial fails, or workers are lost.
        """
        (self.folder / STOP_FILE).unlink(missing_ok=True)
        try:
            self._settle()
            while len(self.done) < len(self.trials):
                self._submit()
                self._collect()
                stop_if(self.deadline.flags)
        finally:
            self._stop()

    def _settle(self) -> None:
        """Finds finished trials, and records each once all earlier ones are recorded."""
        for trial in self.trials:
            if trial.key in self.done or not self.done.issuperset(trial.needs):
                continue
            if trial.key not in self.jobs:
                self.jobs[trial.key] = trial.job(self.journal)
            job = self.jobs[trial.key]
            if job is None or self.study.key_of(job) in self.journal:
                self.done.add(trial.key)
                if trial.key not in self.counted:
                    self.counted.add(trial.key)
                    self.monitor.skip(trial.cost)
        while self.unrecorded and self.unrecorded[0].key in self.done:
            job = self.jobs[self.unrecorded.pop(0).key]
            if job is not None:
                self.journal.record(self.study.key_of(job))

    def _submit(self) -> None:
        """Gives free workers the ready trials that begin the longest chains."""
        busy, workers = {entry.key for entry in self.running.values()}, self.pool.workers
        for trial in self.by_urgency:
            if len(self.running) >= workers:
                return
            if trial.key in self.done or not self.done.issuperset(trial.needs):
                continue
            job = self.jobs[trial.key]
            assert job is not None
            # Two trials may ask for the same event.
            key = self.study.key_of(job)
            if key not in busy:
                busy.add(key)
                self._start(_Running(trial, job, key))

    def _start(self, entry: _Running) -> None:
        future = self.pool.submit(
            str(self.folder.resolve()), dumps({**entry.job, "files": self.study.files})
        )
        self.running[future] = entry

    def _collect(self) -> None:
        """Takes the results of trials that have ended."""
        wait(self.running, 0.2, FIRST_COMPLETED)
        broken: BaseException | None = None
        for future in [future for future in self.running if future.done()]:
            error = CancelledError() if future.cancelled() else future.exception()
            if error is None:
                self._take(self.running.pop(future), future.result())
            else:
                broken = error
        if broken is not None:
            self._again(broken)

    def _again(self, error: BaseException) -> None:
        """Starts all trials anew that a dead worker has taken down."""
        self.pool.renew(error)
        entries = list(self.running.values())
        self.running.clear()
        for entry in entries:
            name = entry.trial.called(entry.job)
            if entry.attempts == ATTEMPTS:
                raise WorkersLost(
                    f"A worker should survive each trial. Found {ATTEMPTS} that died in {name}. "
                    "Remedy: fewer --workers if memory is short, or --workers 1 to see the error."
                ) from error
            self.monitor.say(f"a worker died: {name} is tried again.")
            entry.attempts += 1
            self._start(entry)

    def _take(self, entry: _Running, text: str) -> None:
        found = loads(text)
        if "error" in found:
            if found["kind"] == "interrupted":
                return
            with _naming(entry.trial, entry.job):
                remote = RuntimeError(f"in a worker process\n{found['traceback']}")
                raise ERRORS[found["kind"]](found["error"]) from remote
        kinds = self.study.schema().events
        event = convert(found["event"], kinds)
        for result in [*(convert(repeated, kinds) for repeated in found["repeated"]), event]:
            self.journal.keep(result)
        if entry.trial.key not in self.counted:
            self.counted.add(entry.trial.key)
            self.monitor.advance(entry.trial.cost, entry.trial.what)
        # Recorded at once, unless an earlier trial is still running.
        self._settle()
        self.journal.save(event.key)

    def _stop(self) -> None:
        """Lets running trials notice the end, keeps finished ones, and ends the workers."""
        with suppress(RecordError):
            replace_file(self.folder / STOP_FILE, b"")
            ended, _ = wait(self.running, GRACE)
            for future in ended:
                with suppress(Exception):
                    self._take(self.running.pop(future), future.result())
        self.pool.close()
        (self.folder / STOP_FILE).unlink(missing_ok=True)
