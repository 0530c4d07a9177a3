"""Runs jobs: in this process, or in a worker process that knows only the run's folder.

Only texts cross the border between processes. A worker reads the header from the run's folder and
makes the task and the model itself.
"""

import os
import signal
import threading
import time
from functools import lru_cache
from pathlib import Path
from traceback import format_exc
from typing import Any

import msgspec
import torch

from steadygrad._checks import InputError
from steadygrad.record import Event, dumps, loads, open_file, read_run
from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.deadline import StudyInterrupted, WorkerDeadline
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.files import load_recorded_task
from steadygrad.studies.study import Advance, Job, Study, Workplace, study_of
from steadygrad.studies.trainer import Diverged, Trainer
from steadygrad.tasks import TaskError

__all__ = ["ERRORS", "STOP_FILE", "Worker", "begin_worker", "run_job"]

# The coordinator writes it when its workers have to stop.
STOP_FILE = "stop"
# Errors of a job that keep their class on the way to the coordinator.
ERRORS: dict[str, type[InputError]] = {"diverged": Diverged, "task": TaskError, "input": InputError}


class Worker:
    """Runs the jobs of the run in ``folder``."""

    def __init__(self, study: Study, folder: Path, trainer: Trainer) -> None:
        self.study, self.trainer = study, trainer
        self.checkpoints = Checkpoints(folder, dumps(msgspec.to_builtins(study.header)))
        self._micro_batch_size = trainer.micro_batch_size

    def run(self, job: Job, advance: Advance) -> tuple[Event, list[Event]]:
        """Does one job, with smaller micro-batches where memory runs out.

        Returns:
            The event, and those of earlier trials that had to be repeated for it.
        """
        began, trainer = time.monotonic(), self.trainer
        # An earlier job may have halved the micro-batch for lack of memory; that must not change
        # this job's results.
        trainer.micro_batch_size = self._micro_batch_size

        def attempt() -> tuple[Event, list[Event]]:
            place = Workplace(trainer, self.checkpoints, advance)
            return self.study.run(job, place), place.repeated

        event, repeated = trainer.by_halves(attempt)
        seconds = {"seconds": round(time.monotonic() - began, 3)}
        return msgspec.structs.replace(event, time=event.time | seconds), repeated


def begin_worker(parent: int, devices: Any = None) -> None:
    """Prepares a worker process: it leaves signals to its coordinator, and ends with it.

    Args:
        parent: The coordinator's process number.
        devices: Queue of names of CUDA devices, one for each worker. Default: none.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What a task prints must not mix with the coordinator's output.
    os.dup2(2, 1)
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices.get()

    def watch() -> None:
        # A coordinator that was killed leaves its workers waiting for jobs for ever.
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_lock = threading.Lock()


def run_job(folder: str, text: str) -> str:
    """Does one job in a worker process that shares the run's folder.

    The job is JSON, with the places of the user's ``files``; so is the result, with ``event`` and
    ``repeated`` or with ``error``, ``kind`` and ``traceback``.
    """
    job = loads(text)
    files = dumps(job.pop("files", {}))
    try:
        with _lock:  # a cluster's worker may have several threads, and torch's seed is global
            # A cluster's workers outlive a run, and another one may be in its folder.
            with open_file(Path(folder) / "record.jsonl") as file:
                worker = _worker(folder, file.readline(), files)
            event, repeated = worker.run(job, lambda samples, what: None)
    except StudyInterrupted:
        return dumps({"kind": "interrupted", "error": "stopped"})
    except InputError as error:
        kind = next((k for k, c in ERRORS.items() if type(error) is c), "input")
        return dumps({"kind": kind, "error": str(error), "traceback": format_exc()})
    return dumps({"event": event.as_dict(), "repeated": [e.as_dict() for e in repeated]})


@lru_cache(maxsize=1)
def _worker(folder: str, first_line: bytes, files: str) -> Worker:
    """This process's worker for a run, made once."""
    path = Path(folder)
    header = read_run(path).header
    runtime = header.runtime
    torch.set_num_threads(runtime.threads)
    study = study_of(header)
    study.files = loads(files)
    context = DistributedContext(WorkerDeadline(path / STOP_FILE), device=runtime.device)
    task = load_recorded_task(header, study.files)
    trainer = study.make_trainer(task, header.settings, context, runtime.micro_batch_size)
    trainer.dependent = header.task.dependent
    trainer.second_moment = header.task.beta2 is not None
    return Worker(study, path, trainer)
