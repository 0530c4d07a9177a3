"""Hands trials to workers and records their results in the order of the trials."""

from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from steadygrad.record import Event, Key, RecordError, convert, dumps, loads, replace_file
from steadygrad.studies.deadline import Deadline, stop_if
from steadygrad.studies.executor import Pool, WorkersLost, tails
from steadygrad.studies.journal import Journal
from steadygrad.studies.study import Job, Study, Trial
from steadygrad.studies.worker import ERRORS, STOP_FILE, Worker

__all__ = ["Monitor", "Pending", "run_parallel", "run_serial"]

# A trial whose worker died is given to another worker so many times.
ATTEMPTS = 3
# Seconds that running trials get to notice that the study has to stop.
GRACE = 10.0


class Monitor(Protocol):
    """Watches a study on rank 0."""

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Told once, before the work.

        Args:
            total: Samples of work in all.
            done: How many of them an earlier attempt has done.
            points: Work done at each milestone, by its name.
        """

    def advance(self, samples: int, what: str) -> None:
        """Told as work is done, and on what."""

    def say(self, line: str) -> None:
        """A line for the user, such as a warning."""


class Pending:
    """Results that cannot be recorded yet because an earlier trial is not done.

    Each is a file, so that an interrupted study loses none of them.

    Args:
        study: The study.
        folder: The run's folder.
    """

    def __init__(self, study: Study, folder: Path) -> None:
        self._folder = folder / "pending"
        self._events: dict[Key, Event] = {}
        for path in sorted(self._folder.glob("*.json")):
            with suppress(ValueError, OSError, RecursionError):
                event = convert(loads(path.read_bytes()), study.schema().events)
                self._events[event.key] = event

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events.values())

    def __contains__(self, key: Key) -> bool:
        return key in self._events

    def and_recorded(self, journal: Journal) -> Journal:
        """All results so far: those recorded, and those that wait."""
        return Journal(events=[*journal.events(), *self])

    def put(self, event: Event, *, durable: bool = True) -> None:
        """Keeps a result."""
        self._events[event.key] = event
        if durable:
            self._folder.mkdir(exist_ok=True)
            replace_file(self._path(event.key), dumps(event.as_dict()).encode())

    def record(self, key: Key, journal: Journal) -> None:
        """Records the result with this key, if it waits, and then deletes its file."""
        if key in self._events:
            journal.add(self._events.pop(key))
            self._path(key).unlink(missing_ok=True)
            with suppress(OSError):
                self._folder.rmdir()

    def _path(self, key: Key) -> Path:
        return self._folder / f"{'-'.join(map(str, key))}.json"


def run_serial(
    study: Study, journal: Journal, worker: Worker, pending: Pending, monitor: Monitor
) -> None:
    """Runs all trials that are not recorded yet in this process, in their order."""
    trials = study.trials()
    counted = {trial.key for trial in trials if trial.key in journal or trial.key in pending}
    for trial in trials:
        job, told = trial.job(journal), 0

        def advance(samples: int, what: str) -> None:
            nonlocal told
            told += samples
            monitor.advance(samples, what)

        if job is not None and (key := study.key_of(job)) not in journal:
            if key not in pending:
                event, repeated = worker.run(job, advance)
                for each in repeated:
                    journal.add(each)
                pending.put(event, durable=False)
            pending.record(key, journal)
        if trial.key not in counted:
            monitor.advance(trial.cost - told, "")


@dataclass
class _Running:
    trial: Trial
    job: Job
    key: Key
    attempts: int = 1


class _Coordinator:
    """State of a study whose trials run side by side; see :func:`run_parallel`."""

    def __init__(
        self,
        study: Study,
        journal: Journal,
        pool: Pool,
        folder: Path,
        pending: Pending,
        monitor: Monitor,
    ) -> None:
        self.study, self.journal, self.pool = study, journal, pool
        self.folder, self.pending, self.monitor = folder, pending, monitor
        self.trials = list(study.trials())
        chains = tails(self.trials)
        self.by_urgency = sorted(self.trials, key=lambda trial: -chains[trial.key])
        self.view = pending.and_recorded(journal)
        # Jobs of the trials whose needs are met; None where there is nothing to do.
        self.jobs: dict[Key, Job | None] = {}
        # Trials whose result is there, or that have nothing to do.
        self.done: set[Key] = set()
        # Trials whose cost the monitor knows to be done.
        self.counted = {trial.key for trial in self.trials if trial.key in self.view}
        self.running: dict[Future[str], _Running] = {}
        self.unrecorded = list(self.trials)

    def settle(self) -> None:
        """Finds the trials that are done, and records those that no earlier one holds up."""
        for trial in self.trials:
            if trial.key in self.done or not self.done.issuperset(trial.needs):
                continue
            if trial.key not in self.jobs:
                self.jobs[trial.key] = trial.job(self.view)
            job = self.jobs[trial.key]
            if job is None or self.study.key_of(job) in self.view:
                self.done.add(trial.key)
                self._count(trial, "")
        while self.unrecorded and self.unrecorded[0].key in self.done:
            job = self.jobs[self.unrecorded.pop(0).key]
            if job is not None:
                self.pending.record(self.study.key_of(job), self.journal)

    def _count(self, trial: Trial, what: str) -> None:
        if trial.key not in self.counted:
            self.counted.add(trial.key)
            self.monitor.advance(trial.cost, what)

    def submit(self) -> None:
        """Gives free workers the ready trials that begin the longest chains."""
        busy = {entry.key for entry in self.running.values()}
        for trial in self.by_urgency:
            if len(self.running) >= self.pool.workers:
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
        future = self.pool.submit(str(self.folder.resolve()), dumps(entry.job))
        self.running[future] = entry

    def collect(self) -> None:
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
            name = " ".join(map(str, entry.key))
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
            raise ERRORS[found["kind"]](found["error"])
        kinds = self.study.schema().events
        before = self.view.differing
        for repeated in found["repeated"]:
            # Into the view: in the record it may not be its turn yet.
            self.view.add(convert(repeated, kinds))
        self.journal.differing += self.view.differing - before
        event = convert(found["event"], kinds)
        self.view.add(event)
        self._count(entry.trial, entry.trial.what)
        # Recorded at once, unless an earlier trial is still running.
        self.pending.put(event, durable=False)
        self.settle()
        if event.key not in self.journal:
            self.pending.put(event)

    def stop(self) -> None:
        """Lets running trials notice the end, keeps what is finished, and ends the workers."""
        with suppress(RecordError):
            replace_file(self.folder / STOP_FILE, b"")
            ended, _ = wait(self.running, GRACE)
            for future in ended:
                with suppress(Exception):
                    self._take(self.running.pop(future), future.result())
        self.pool.close()
        (self.folder / STOP_FILE).unlink(missing_ok=True)


def run_parallel(
    study: Study,
    journal: Journal,
    pool: Pool,
    folder: Path,
    pending: Pending,
    deadline: Deadline,
    monitor: Monitor,
) -> None:
    """Runs all trials that are not recorded yet on workers.

    Args:
        study: The study.
        journal: Takes the results, in the order of the trials.
        pool: The workers; closed at the end.
        folder: The run's folder, which all workers share.
        pending: Results of an earlier attempt that are not recorded yet.
        deadline: Asked five times a second.
        monitor: Watches.

    Raises:
        StudyInterrupted: When the study has to stop.
        InputError: If a trial fails, or workers are lost.
    """
    coordinator = _Coordinator(study, journal, pool, folder, pending, monitor)
    (folder / STOP_FILE).unlink(missing_ok=True)
    try:
        coordinator.settle()
        while len(coordinator.done) < len(coordinator.trials):
            coordinator.submit()
            coordinator.collect()
            stop_if(deadline.flags)
    finally:
        coordinator.stop()
