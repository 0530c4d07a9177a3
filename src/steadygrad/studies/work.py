"""Runs the trials of a study: one after another in this process, or side by side in workers."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from steadygrad._checks import InputError
from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.deadline import Deadline, StudyInterrupted, stop_if
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.executors import Workers
from steadygrad.studies.files import load_recorded_task
from steadygrad.studies.folder import (
    HEADER,
    Results,
    RunError,
    read_file,
    read_header,
    replace_file,
)
from steadygrad.studies.schema import Key, Result
from steadygrad.studies.strict_json import dumps, loads
from steadygrad.studies.study import Advance, Study, Workplace, study_of
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.trials import Job, Trial, tails
from steadygrad.tasks import Task
from steadygrad.tasks.guard import reason

# Written when the workers have to stop.
STOP_FILE = "stop"
# Seconds that running trials get to notice that the study has to stop.
GRACE = 10.0

Keep = Callable[[Result], None]


class WorkersLost(InputError):
    """Workers died twice, or cannot be reached."""


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


class Worker:
    """Runs the jobs of the run in ``folder``."""

    def __init__(self, study: Study, folder: Path, trainer: Trainer) -> None:
        self.study, self.trainer = study, trainer
        self.checkpoints = Checkpoints(folder, dumps(msgspec.to_builtins(study.header)))
        self._micro_batch_size = trainer.micro_batch_size

    def run(self, job: Job, advance: Advance) -> list[Result]:
        """Does one job, with smaller micro-batches where memory runs out.

        Returns:
            Results of earlier trials that had to be repeated for it, then the job's own.
        """
        began = time.monotonic()
        # An earlier job may have halved them; that must not change this job's results.
        self.trainer.micro_batch_size = self._micro_batch_size

        def attempt() -> list[Result]:
            place = Workplace(self.trainer, self.checkpoints, advance)
            result = self.study.run(job, place)
            return [*place.repeated, result]

        *repeated, result = self.trainer.by_halves(attempt)
        seconds = {"seconds": round(time.monotonic() - began, 3)}
        return [*repeated, msgspec.structs.replace(result, time=result.time | seconds)]


def run_serial(
    study: Study, results: Results, keep: Keep, worker: Worker, monitor: Monitor
) -> None:
    """Runs all trials whose results are not there in this process, in the order of the plan."""
    counted = study.finished(results)
    for trial in study.trials():
        job, told = trial.job(results), 0

        def advance(samples: int, what: str) -> None:
            nonlocal told
            told += samples
            monitor.advance(samples, what)

        if job is not None and study.key_of(job) not in results:
            with _naming(trial, job):
                found = worker.run(job, advance)
            for result in found:
                keep(result)
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
class Coordinator:
    """Runs the trials of a study side by side, in workers that share the run's folder."""

    study: Study
    results: Results
    keep: Keep
    pool: Workers
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
        self.counted = self.study.finished(self.results)
        self.running: dict[Future[list[Result]], tuple[Trial, Job]] = {}
        self.renewed = False

    def run(self) -> None:
        """Runs all trials whose results are not there, and closes the pool.

        Raises:
            StudyInterrupted: When the study has to stop.
            InputError: If a trial fails, or workers are lost.
        """
        (self.folder / STOP_FILE).unlink(missing_ok=True)
        try:
            while self._open():
                self._submit()
                self._collect()
                stop_if(self.deadline.flags)
        finally:
            self._stop()

    def _open(self) -> bool:
        """Whether a trial is still open; finds those that are not."""
        for trial in self.trials:
            if trial.key in self.done or not self.done.issuperset(trial.needs):
                continue
            if trial.key not in self.jobs:
                self.jobs[trial.key] = trial.job(self.results)
            job = self.jobs[trial.key]
            if job is None or self.study.key_of(job) in self.results:
                self.done.add(trial.key)
                if trial.key not in self.counted:
                    self.counted.add(trial.key)
                    self.monitor.skip(trial.cost)
        return len(self.done) < len(self.trials)

    def _submit(self) -> None:
        """Gives free workers the ready trials that begin the longest chains."""
        # Two trials may ask for the same result.
        busy = {self.study.key_of(job) for _, job in self.running.values()}
        workers = self.pool.count()
        for trial in self.by_urgency:
            if len(self.running) >= workers:
                return
            job = self.jobs.get(trial.key)
            if (
                trial.key not in self.done
                and job is not None
                and self.study.key_of(job) not in busy
            ):
                busy.add(self.study.key_of(job))
                self._start(trial, job)

    def _start(self, trial: Trial, job: Job) -> None:
        folder, files = str(self.folder.resolve()), dumps(self.study.files)
        self.running[self.pool.submit(run_job, folder, dict(job), files)] = trial, job

    def _collect(self) -> None:
        """Takes the results of trials that have ended."""
        wait(self.running, 0.2, FIRST_COMPLETED)
        lost: Exception | None = None
        for future in [future for future in self.running if future.done()]:
            try:
                with _naming(*self.running[future]):
                    found = future.result()
            except (StudyInterrupted, InputError) as error:
                del self.running[future]
                if isinstance(error, InputError):
                    raise
            except Exception as error:  # a worker died, or cannot be reached
                lost = error
            else:
                self._take(future, found)
        if lost is not None:
            self._again(lost)

    def _again(self, error: Exception) -> None:
        """Starts the trials anew that were lost with their workers, once."""
        if self.renewed:
            raise WorkersLost(
                f"Expected workers that survive their trials. Found {reason(error)}, for the "
                "second time. Remedy: fewer --workers if memory is short; --workers 1 shows an "
                "error of the trial itself."
            ) from error
        self.renewed = True
        self.monitor.say(f"workers were lost ({reason(error)}): their trials are tried once more.")
        self.pool.renew()
        lost, self.running = self.running, {}
        for trial, job in lost.values():
            self._start(trial, job)

    def _take(self, future: "Future[list[Result]]", found: list[Result]) -> None:
        trial, _ = self.running.pop(future)
        for result in found:
            self.keep(result)
        if trial.key not in self.counted:
            self.counted.add(trial.key)
            self.monitor.advance(trial.cost, trial.what)

    def _stop(self) -> None:
        """Lets running trials notice the end, keeps finished ones, and ends the workers."""
        with suppress(RunError):
            replace_file(self.folder / STOP_FILE, b"")
            for future in wait(self.running, GRACE)[0]:
                with suppress(Exception):
                    self._take(future, future.result())
        self.pool.close()
        (self.folder / STOP_FILE).unlink(missing_ok=True)


_lock = threading.Lock()


def run_job(folder: str, job: Job, files: str) -> list[Result]:
    """Does one job in a worker process; ``files`` are places of the user's functions, as JSON."""
    with _lock:  # a cluster's worker may have several threads, and torch's seed is global
        # A cluster's workers outlive a run, and another one may be in its folder.
        worker = _worker(folder, read_file(Path(folder) / HEADER), files)
        return worker.run(job, lambda samples, what: None)


@lru_cache(maxsize=1)
def _worker(folder: str, header_text: bytes, files: str) -> Worker:
    """This process's worker for a run, made once."""
    path = Path(folder)
    study = study_of(read_header(path)[0])
    study.files = loads(files)
    deadline, device = Deadline(stop=path / STOP_FILE), study.header.runtime.device
    return Worker(study, path, recorded_trainer(study, DistributedContext(deadline, device=device)))


def recorded_trainer(
    study: Study, context: DistributedContext, task: Task | None = None
) -> Trainer:
    """The trainer of a recorded run, with the threads that it began with.

    The task is loaded where none is given.
    """
    header, runtime = study.header, study.header.runtime
    torch.set_num_threads(runtime.threads)
    task = task or context.together(lambda: load_recorded_task(header, study.files))
    trainer = study.make_trainer(task, header.settings, context, runtime.micro_batch_size)
    trainer.dependent = header.task.dependent
    trainer.second_moment = header.task.beta2 is not None
    return trainer
