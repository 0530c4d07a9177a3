"""Runs the trials of a study: one after another in this process, or side by side in workers."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from steadygrad._checks import InputError
from steadygrad._studies import module_of
from steadygrad.studies.course import Order, Rate
from steadygrad.studies.distributed import Deadline, DistributedContext, StudyInterrupted
from steadygrad.studies.executors import Workers
from steadygrad.studies.folder import (
    Results,
    RunError,
    dumps,
    identity,
    read_header,
    replace_file,
    write_result,
)
from steadygrad.studies.record import load_recorded_task
from steadygrad.studies.schema import Result, Trial, evaluation_cost
from steadygrad.studies.trainer import Diverged, Trainer
from steadygrad.tasks import Task
from steadygrad.tasks.check import reason

# Written when the workers have to stop.
STOP_FILE = "stop"
# Seconds that running trials get to notice that the study has to stop.
GRACE = 10.0


@dataclass
class Workplace:
    """The surroundings of trials; ``files`` are places of the functions that the settings name.

    A trial is a pure function of the task and the seed, so that trials can run in any order, in any
    process, and again after a crash.
    """

    trainer: Trainer
    # Told how many samples of work are done, as they are done.
    advance: Callable[[int], None] = lambda samples: None
    header: Any = None
    files: Mapping[str, str] = field(default_factory=dict)
    run: str = ""  # its identity, which rank 0 writes into each result
    # What a study's trials make once.
    tools: dict[Any, Any] = field(default_factory=dict)

    def evaluate(self) -> float:
        """The validation loss; its cost counts as work that is done.

        Where the optimizer has other weights for that, as schedule-free ones have, of those.
        """
        optimizer: Any = self.trainer.optimizer
        getattr(optimizer, "eval", lambda: None)()
        loss = self.trainer.evaluate()
        getattr(optimizer, "train", lambda: None)()
        self.advance(evaluation_cost(len(self.trainer.task.valid)))
        return loss

    def train(
        self,
        batch_size: int,
        samples: int,
        seed: int,
        rate: Rate,
        *,
        marks: Sequence[int] = (),
        must_hold: bool = False,
    ) -> tuple[tuple[int, float], ...]:
        """Trains the task from its initial weights, and evaluates after each mark.

        Arms that are trained with one seed begin with the same weights, and see the same samples
        and random numbers. ``marks`` are numbers of samples. Default: the end alone. Samples seen
        and validation losses are returned; the last loss is infinite where the training diverged,
        which is an error where it ``must_hold``.
        """
        trainer, at, left = self.trainer, 0, sorted({*marks, samples})
        found: list[tuple[int, float]] = []

        def evaluate() -> None:
            loss = self.evaluate()
            if must_hold and not math.isfinite(loss):
                raise Diverged(
                    f"The validation loss should stay finite. Found {loss} after {trainer.steps} "
                    f"steps. Remedy: a lower Task.lr than {trainer.task.lr:g}."
                )
            found.append((at, loss if math.isfinite(loss) else math.inf))

        trainer.restart(seed)
        trainer.seed_everything("run", seed)
        stream = f"main-{seed}" if seed else "main"
        order = Order(len(trainer.task.train), trainer.seed, stream)
        try:
            for seen in trainer.run(order, 0, samples, batch_size, rate=rate):
                self.advance(seen - at)
                at = seen
                if at >= left[0]:
                    evaluate()
                    left = [mark for mark in left if mark > at] or [samples + batch_size]
            if not found or found[-1][0] < at:
                evaluate()
        except Diverged:
            if must_hold:
                raise
            return *found, (samples, math.inf)
        return tuple(found)


class Monitor(Protocol):
    """Watches a study on rank 0."""

    def begin(self, total: int, done: int) -> None:
        """Told once: the samples of work in all, and those done before."""

    def advance(self, samples: int, what: str) -> None:
        """Called as work is done, with the name of its trial."""

    def say(self, line: str) -> None:
        """A line for the user, such as a warning."""


def trials_of(header: Any, results: Results) -> list[Trial]:
    """The trials that a run still needs and that can run now, by its results alone."""
    wanted: list[Trial] = module_of(header.study, "trials").trials_of(header, results)
    found = {trial.key: trial for trial in wanted if trial.key not in results}
    return [*found.values()]


def work_on(trial: Trial, place: Workplace) -> Result:
    """Does one trial, with smaller micro-batches where memory runs out."""
    began, trainer, header = time.monotonic(), place.trainer, place.header
    # An earlier trial may have halved them; that must not change this one's results.
    trainer.micro_batch_size = header.runtime.micro_batch_size
    kind, *values = trial.key
    function = module_of(header.study, "trials").TRIALS[kind]
    result: Result = trainer.by_halves(lambda: function(header.plan, place, *values, **trial.given))
    own = {"cost": trial.cost, "seconds": round(time.monotonic() - began, 3)}
    return msgspec.structs.replace(result, time={**own, **result.time})


@dataclass
class Coordinator:
    """Runs the trials of a study: side by side in the workers of ``pool``, or else in ``place``."""

    results: Results
    folder: Path
    place: Workplace
    pool: Workers | None
    monitor: Monitor

    def __post_init__(self) -> None:
        self.open = trials_of(self.place.header, self.results)
        done = int(sum(result.time.get("cost", 0) for result in self.results))
        # Results may call for more trials than are known.
        missing = sum(trial.cost for trial in self.open)
        self.monitor.begin(max(self.place.header.plan.work, done + missing), done)
        self.running: dict[Future[Result], Trial] = {}
        self.renewed = False

    def run(self) -> None:
        """Runs all trials whose results are not there, and closes the pool."""
        try:
            with suppress(OSError):
                (self.folder / STOP_FILE).unlink()
            while self.open:
                self.place.trainer.context.poll()
                busy = {trial.key for trial in self.running.values()}
                most = self.pool.count() if self.pool else 1
                for trial in self.open:
                    if len(self.running) < most and trial.key not in busy:
                        self._start(trial)
                if self._collect():
                    self.open = trials_of(self.place.header, self.results)
        finally:
            if self.pool:
                self._stop(self.pool)

    def _start(self, trial: Trial) -> None:
        if self.pool:
            folder, files = str(self.folder.resolve()), dumps(self.place.files)
            future = self.pool.submit(run_trial, folder, trial, files)
        else:
            future = Future()
            self.place.advance = partial(self.monitor.advance, what=trial.what)
            try:
                future.set_result(work_on(trial, self.place))
            except InputError as error:
                future.set_exception(error)
        self.running[future] = trial

    def _collect(self) -> bool:
        """Takes the results of trials that have ended; whether there are any."""
        before, lost = len(self.results), None
        wait(self.running, 0.2, FIRST_COMPLETED)
        for future in [future for future in self.running if future.done()]:
            try:
                found = future.result()
            except StudyInterrupted:
                del self.running[future]
            except InputError as error:
                error.args = (f"{self.running.pop(future).what}: {error}",)
                raise
            except Exception as error:  # a worker died, or cannot be reached
                lost = error
            else:
                self._take(future, found)
        if lost is not None:
            self._again(lost)
        return len(self.results) > before

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
        for trial in lost.values():
            self._start(trial)

    def _take(self, future: "Future[Result]", result: Result) -> None:
        trial = self.running.pop(future)
        self.results.add(result)
        if self.place.trainer.context.is_main:
            write_result(self.folder, result, self.place.run)
        if self.pool:
            self.monitor.advance(trial.cost, trial.what)

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


_lock = threading.Lock()


def run_trial(folder: str, trial: Trial, files: str) -> Result:
    """Does one trial in a worker process; ``files``: places of the user's functions, as JSON."""
    # A cluster's worker may have several threads, and torch's seed is global. What a task prints
    # must not mix with --json where the workers are threads or inherit standard output.
    with _lock, redirect_stdout(sys.stderr):
        # A cluster's workers outlive a run, and another one may be in its folder.
        return work_on(trial, _worker(folder, identity(Path(folder)), files))


@lru_cache(maxsize=1)
def _worker(folder: str, run: str, files: str) -> Workplace:
    """A run in this process, made once."""
    path, found = Path(folder), json.loads(files)
    header = read_header(path)
    deadline, device = Deadline(stop=path / STOP_FILE), header.runtime.device
    trainer = recorded_trainer(header, found, DistributedContext(deadline, device=device))
    return Workplace(trainer, header=header, files=found)


def make_trainer(study: str, task: Task, settings: Any, context: DistributedContext) -> Trainer:
    """A trainer of a task, as a study trains it."""
    names = {"seed", "dtype", "keep_half_life"}.intersection(vars(settings))
    options = {name: getattr(settings, name) for name in names}
    options |= getattr(module_of(study, "trials"), "TRAINING", {})
    return Trainer(task, context=context, **options)


def recorded_trainer(
    header: Any, files: Mapping[str, str], context: DistributedContext, task: Task | None = None
) -> Trainer:
    """The trainer of a recorded run, with the threads that it began with.

    The task is loaded where none is given.
    """
    runtime = header.runtime
    torch.set_num_threads(runtime.threads)
    task = task or context.together(lambda: load_recorded_task(header, files))
    trainer = make_trainer(header.study, task, header.settings, context)
    trainer.micro_batch_size = runtime.micro_batch_size
    trainer.dependent = header.task.dependent
    trainer.second_moment = header.task.beta2 is not None
    return trainer
