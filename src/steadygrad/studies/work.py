"""Runs the trials of a study: one after another in this process, or side by side in workers."""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, get_args

import msgspec
import torch

from steadygrad._checks import InputError
from steadygrad._studies import module_of
from steadygrad.studies.checkpoint import Checkpoints, State
from steadygrad.studies.deadline import Deadline, StudyInterrupted
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.executors import Workers
from steadygrad.studies.files import load_recorded_task
from steadygrad.studies.folder import (
    Results,
    RunError,
    dumps,
    identity,
    read_header,
    replace_file,
    write_result,
)
from steadygrad.studies.schema import Header, Key, Result
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.trials import Job, Trial, evaluation_cost, tails
from steadygrad.tasks import Task
from steadygrad.tasks.guard import reason

# Written when the workers have to stop.
STOP_FILE = "stop"
# Seconds that running trials get to notice that the study has to stop.
GRACE = 10.0


@dataclass
class Workplace:
    """The surroundings of trials; ``files`` are places of the functions that the settings name.

    A trial is a pure function of the task, the seed and the state at its point of training, so that
    trials can run in any order, in any process, and again after a crash.
    """

    trainer: Trainer
    checkpoints: Checkpoints
    # Told how many samples of work are done, as they are done, and on what.
    advance: Callable[[int, str], None]
    header: Any = None
    files: Mapping[str, str] = field(default_factory=dict)
    run: str = ""  # its identity
    # What a study's trials make once.
    tools: Mapping[str, Any] = field(default_factory=dict)

    def state(self, name: str, samples: int, again: Callable[[], object]) -> State:
        """The state after ``samples``: read, or trained ``again`` by the trial that leaves it."""
        found = self.checkpoints.load(name, samples)
        # On every rank or on none: training again takes all of them.
        if all(self.trainer.context.gather(found is not None)) and found is not None:
            return found
        again()
        return self.trainer.state(samples)

    def evaluate(self) -> float:
        """The validation loss; its cost counts as work that is done."""
        loss = self.trainer.evaluate()
        self.advance(evaluation_cost(len(self.trainer.task.valid)), "")
        return loss


class Monitor(Protocol):
    """Watches a study on rank 0."""

    def begin(self, total: int, done: int) -> None:
        """Told once: the samples of work in all, and those done before."""

    def advance(self, samples: int, what: str) -> None:
        """Called as work is done, with the trials that it was done on."""

    def skip(self, samples: int) -> None:
        """Called where planned work is not needed."""

    def say(self, line: str) -> None:
        """A line for the user, such as a warning."""


def key_of(study: str, job: Job) -> Key:
    """The key of the result that a job gives."""
    kind, union = job["kind"], module_of(study, "schema").RESULTS
    types = {each.__struct_config__.tag: each for each in get_args(union) or (union,)}
    return (kind, *(job[name] for name in types[kind].key_fields))


def trials_of(header: Any, results: Results) -> list[Trial]:
    """The trials of a run that are known; the results may call for more."""
    found: list[Trial] = module_of(header.study, "trials").trials_of(header, results)
    return found


def finished(study: str, trials: Sequence[Trial], results: Results) -> set[Key]:
    """Keys of the trials whose results are there, or that have nothing to do."""
    done: set[Key] = set()
    for trial in trials:
        if done.issuperset(trial.needs):
            job = trial.job(results)
            if job is None or key_of(study, job) in results:
                done.add(trial.key)
    return done


def work_on(job: Job, place: Workplace) -> Result:
    """Does one job, with smaller micro-batches where memory runs out."""
    began, trainer, header = time.monotonic(), place.trainer, place.header
    # An earlier job may have halved them; that must not change this job's results.
    trainer.micro_batch_size = header.runtime.micro_batch_size
    trial = module_of(header.study, "trials").TRIALS[job["kind"]]
    parameters = {name: value for name, value in job.items() if name != "kind"}
    result: Result = trainer.by_halves(lambda: trial(header.plan, place, **parameters))
    seconds = {"seconds": round(time.monotonic() - began, 3)}
    return msgspec.structs.replace(result, time={**seconds, **result.time})


@dataclass
class Coordinator:
    """Runs the trials of a study: side by side in the workers of ``pool``, or else in ``place``.

    Workers take first what begins the longest chain; without them the order is the plan's, the
    same on every rank.
    """

    results: Results
    folder: Path
    place: Workplace
    pool: Workers | None
    monitor: Monitor

    def __post_init__(self) -> None:
        header, trials = self.place.header, trials_of(self.place.header, self.results)
        costs = {trial.key: trial.cost for trial in trials}
        # Samples of each trial that the monitor knows to be done.
        done = finished(header.study, trials, self.results)
        self.told = Counter({key: costs[key] for key in done})
        self.key_of = partial(key_of, header.study)
        # Results may call for more trials than are known.
        total = max(header.plan.work, sum(costs.values()))
        self.monitor.begin(total, self.told.total())
        self.open: list[Trial] = []
        # Jobs of the trials whose needs are met; None where there is nothing to do.
        self.jobs: dict[Key, Job | None] = {}
        # Trials whose result is there, or that have nothing to do.
        self.done: set[Key] = set()
        self.running: dict[Future[Result], tuple[Trial, Job]] = {}
        self.renewed = False

    def run(self) -> None:
        """Runs all trials whose results are not there, and closes the pool.

        Raises:
            StudyInterrupted: When the study has to stop.
            InputError: If a trial fails, or workers are lost.
        """
        try:
            with suppress(OSError):
                (self.folder / STOP_FILE).unlink()
            while self._find_open():
                self.place.trainer.context.poll()
                self._submit()
                self._collect()
        finally:
            if self.pool:
                self._stop(self.pool)

    def _find_open(self) -> bool:
        """Whether a trial is open; those that have ended meanwhile are none."""
        trials = trials_of(self.place.header, self.results)
        if self.pool and any(trial.needs for trial in trials):
            chains = tails(trials)
            trials = sorted(trials, key=lambda trial: -chains[trial.key])
        for trial in trials:
            if trial.key in self.done or not self.done.issuperset(trial.needs):
                continue
            if trial.key not in self.jobs:
                self.jobs[trial.key] = trial.job(self.results)
            job = self.jobs[trial.key]
            if job is None or self.key_of(job) in self.results:
                self.done.add(trial.key)
                if rest := trial.cost - self.told[trial.key]:
                    self.monitor.skip(rest)
        self.open = [trial for trial in trials if trial.key not in self.done]
        return bool(self.open)

    def _submit(self) -> None:
        # Two trials may ask for the same result.
        busy = {self.key_of(job) for _, job in self.running.values()}
        most = self.pool.count() if self.pool else 1
        for trial in self.open:
            job = self.jobs.get(trial.key)
            if job and len(self.running) < most and self.key_of(job) not in busy:
                busy.add(self.key_of(job))
                self._start(trial, job)

    def _start(self, trial: Trial, job: Job) -> None:
        if self.pool:
            folder, files = str(self.folder.resolve()), dumps(self.place.files)
            future = self.pool.submit(run_job, folder, dict(job), files)
        else:
            future = Future()
            self.place.advance = partial(self._advance, trial)
            with _naming(trial, job):
                future.set_result(work_on(job, self.place))
        self.running[future] = trial, job

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
        if self.renewed or self.pool is None:
            raise InputError(
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

    def _take(self, future: "Future[Result]", result: Result) -> None:
        trial, _ = self.running.pop(future)
        self.results.add(result)
        if self.place.trainer.context.is_main:
            write_result(self.folder, result, self.place.run)
        if self.pool:
            self._advance(trial, trial.cost, trial.what)

    def _advance(self, trial: Trial, samples: int, what: str) -> None:
        self.told[trial.key] += samples
        self.monitor.advance(samples, what)

    def _stop(self, pool: Workers) -> None:
        """Lets running trials notice the end, keeps finished ones, and ends the workers."""
        with suppress(RunError):
            replace_file(self.folder / STOP_FILE, b"")
            ended, late = wait(self.running, GRACE)
            for future in ended:
                with suppress(Exception):
                    self._take(future, future.result())
            # A cluster's worker that has not looked yet outlives the pool.
            if not late:
                (self.folder / STOP_FILE).unlink(missing_ok=True)
        pool.close()


@contextmanager
def _naming(trial: Trial, job: Job) -> Iterator[None]:
    """Says in an error of a trial which one it was."""
    try:
        yield
    except InputError as error:
        error.args = (f"{trial.called(job)}: {error}",)
        raise


_lock = threading.Lock()


def run_job(folder: str, job: Job, files: str) -> Result:
    """Does one job in a worker process; ``files`` are places of the user's functions, as JSON."""
    # A cluster's worker may have several threads, and torch's seed is global. What a task prints
    # must not mix with --json where the workers are threads or inherit standard output.
    with _lock, redirect_stdout(sys.stderr):
        # A cluster's workers outlive a run, and another one may be in its folder.
        return work_on(job, _worker(folder, identity(Path(folder)), files))


@lru_cache(maxsize=1)
def _worker(folder: str, run: str, files: str) -> Workplace:
    """A run in this process, made once."""
    path, found = Path(folder), json.loads(files)
    header, _ = read_header(path)
    deadline, device = Deadline(stop=path / STOP_FILE), header.runtime.device
    trainer = recorded_trainer(header, found, DistributedContext(deadline, device=device))
    return workplace(header, found, path, trainer)


def workplace(
    header: Header, files: Mapping[str, str], folder: Path, trainer: Trainer
) -> Workplace:
    """The workplace of this process for the run in ``folder``."""
    # Other ranks may not see the folder.
    run = trainer.context.gather(identity(folder) if trainer.context.is_main else "")[0]
    return Workplace(trainer, Checkpoints(folder, run), lambda *_: None, header, files, run)


def make_trainer(
    study: str,
    task: Task,
    settings: Any,
    context: DistributedContext,
    micro_batch_size: int | None = None,
) -> Trainer:
    """A trainer of a task, as a study trains it."""
    names = {"seed", "dtype", "keep_half_life"}.intersection(vars(settings))
    options = {name: getattr(settings, name) for name in names}
    options |= getattr(module_of(study, "trials"), "TRAINING", {})
    return Trainer(task, context=context, micro_batch_size=micro_batch_size, **options)


def recorded_trainer(
    header: Any, files: Mapping[str, str], context: DistributedContext, task: Task | None = None
) -> Trainer:
    """The trainer of a recorded run, with the threads that it began with.

    The task is loaded where none is given.
    """
    runtime = header.runtime
    torch.set_num_threads(runtime.threads)
    task = task or context.together(lambda: load_recorded_task(header, files))
    settings, micro = header.settings, runtime.micro_batch_size
    trainer = make_trainer(header.study, task, settings, context, micro)
    trainer.dependent = header.task.dependent
    trainer.second_moment = header.task.beta2 is not None
    return trainer
