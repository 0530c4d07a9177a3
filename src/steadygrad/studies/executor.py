"""Workers that run trials side by side, and how long that takes.

The seam to other machines is ``concurrent.futures.Executor``: any executor whose workers share
the run's folder can run trials.
"""

import logging
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from importlib import import_module
from typing import Any

import torch

from steadygrad._checks import InputError
from steadygrad.record import Key
from steadygrad.studies.study import Trial
from steadygrad.studies.worker import begin_worker, run_job
from steadygrad.tasks.guard import reason

__all__ = ["Pool", "WorkersLost", "cuda_devices", "dask_pool", "makespan", "process_pool", "tails"]


class WorkersLost(InputError):
    """Workers died again and again, or cannot be reached."""


class Pool:
    """Worker processes that run jobs.

    Args:
        make: Makes an executor; called again after its workers broke.
        workers: Number of workers that are there now.
        survives: Function of an executor's error: whether a new executor may continue.
        kill: Ends an executor, with its workers in mid-trial.
        leave: Called when no further executor will be made. Default: nothing.
    """

    def __init__(
        self,
        make: Callable[[], Executor],
        workers: Callable[[], int],
        *,
        survives: Callable[[BaseException], bool],
        kill: Callable[[Any], None],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._workers = workers
        self._make, self._survives, self._kill, self._leave = make, survives, kill, leave
        self._executor = make()

    @property
    def workers(self) -> int:
        """Jobs at a time; a cluster may grow."""
        return self._workers()

    def submit(self, folder: str, job: str) -> "Future[str]":
        """Hands a job to a worker; the result is that of ``worker.run_job``."""
        try:
            with _signals_later():
                return self._executor.submit(run_job, folder, job)
        # An executor that broke while nothing ran says so here.
        except Exception as error:
            future: Future[str] = Future()
            future.set_exception(error)
            return future

    def renew(self, error: BaseException) -> None:
        """Makes the pool usable again after a worker died, or raises :class:`WorkersLost`."""
        if not self._survives(error):
            # Dask cancels everything once its scheduler does not answer.
            gone = isinstance(error, CancelledError)
            raise WorkersLost(
                "Expected workers that stay reachable and run without errors. Found "
                f"{'no scheduler any more' if gone else reason(error)}. Remedy: see the traceback "
                "with --debug; if the cluster is gone, start it again and use --resume."
            ) from error
        with suppress(Exception):
            self._kill(self._executor)
        self._executor = self._make()

    def close(self) -> None:
        """Ends the workers, in mid-trial too; calling it again does nothing."""
        with suppress(Exception):
            self._kill(self._executor)
        with suppress(Exception):
            self._leave()


def cuda_devices() -> list[str]:
    """Names of the CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` takes them.

    Someone who shares a machine names some of its devices, by number or by UUID.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in given.split(",")] if given else map(str, range(1024))
    return [name for name, _ in zip(names, range(torch.cuda.device_count()), strict=False)]


@contextmanager
def _signals_later() -> Iterator[None]:
    """Delivers signals only afterwards; a process that is started meanwhile never gets them.

    A worker would otherwise die of Ctrl-C before it can leave that to the coordinator.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def process_pool(workers: int, devices: Sequence[str] = ()) -> Pool:
    """Worker processes on this machine, each on one of ``devices``: names of CUDA devices."""
    context = multiprocessing.get_context("spawn")

    def make() -> Executor:
        queue = context.SimpleQueue() if devices else None
        for worker in range(workers):
            if queue is not None:
                queue.put(devices[worker % len(devices)])
        return ProcessPoolExecutor(workers, context, begin_worker, (os.getpid(), queue))

    def kill(executor: Any) -> None:
        for process in list((getattr(executor, "_processes", None) or {}).values()):
            process.kill()
        executor.shutdown(wait=False, cancel_futures=True)

    return Pool(
        make, lambda: workers, survives=lambda e: isinstance(e, BrokenProcessPool), kill=kill
    )


def _dask_client(address: str) -> Any:
    try:
        # The package's types are not annotated.
        Client: Any = import_module("distributed").Client
    except ModuleNotFoundError as error:
        raise InputError(
            "--dask needs the package distributed. Found none. "
            'Remedy: pip install "steadygrad[dask]".'
        ) from error
    for name in ("distributed", "distributed.client"):  # tens of lines on a lost scheduler
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not re.fullmatch(r"(\w+://)?\S+:\d+", address):
        raise InputError(
            f"--dask should be HOST:PORT. Found {address!r}. "
            "Remedy: the address that `dask scheduler` prints."
        )
    try:
        return Client(address, timeout="10s", set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise InputError(
            f"A Dask scheduler should answer at {address!r}. Found {type(error).__name__}. "
            "Remedy: start one with `dask scheduler`, and workers with `dask worker ADDRESS`."
        ) from error


def dask_pool(address: str) -> Pool:
    """The workers of the Dask cluster whose scheduler is at ``address``, as ``host:port``.

    Raises:
        InputError: If Dask is not installed, nothing answers, or there is no worker.
    """
    client = _dask_client(address)
    # A worker's threads share torch's generator: they take turns.
    workers = len(client.nthreads())
    if not workers:
        client.close()
        raise InputError(
            f"The Dask scheduler at {address!r} should have workers. Found none. "
            "Remedy: `dask worker ADDRESS --nthreads 1` on each machine."
        )

    def present() -> int:
        nonlocal workers
        with suppress(Exception):  # a scheduler that is lost shows in its trials
            # With a limit: a scheduler that was killed may never answer.
            there = client.sync(client.scheduler.ncores, workers=None, callback_timeout=5)
            workers = max(1, len(there))
        return workers

    def survives(error: BaseException) -> bool:
        # A lost scheduler cancels everything; a killed worker ends its own trial only.
        return type(error).__name__ == "KilledWorker" and client.status == "running"

    return Pool(
        lambda: client.get_executor(pure=False),
        present,
        survives=survives,
        kill=lambda executor: executor.shutdown(wait=False),
        leave=lambda: client.close(timeout=5.0),
    )


def tails(trials: Sequence[Trial]) -> dict[Key, int]:
    """Cost of the longest chain that each trial begins, itself included, in samples."""
    costs = {trial.key: trial.cost for trial in trials}
    found = dict(costs)
    for trial in reversed(trials):
        for key in trial.needs:
            found[key] = max(found[key], costs[key] + found[trial.key])
    return found


def makespan(trials: Sequence[Trial], workers: int) -> int:
    """Time until all trials are done with ``workers``, in samples of work.

    A free worker takes the ready trial that begins the longest chain, as the coordinator does.
    """
    chains = tails(trials)
    waiting = sorted(trials, key=lambda trial: -chains[trial.key])
    place = {trial.key: number for number, trial in enumerate(waiting)}
    missing = [len({*trial.needs}) for trial in waiting]
    after: list[list[int]] = [[] for _ in waiting]
    for number, trial in enumerate(waiting):
        for key in {*trial.needs}:
            after[place[key]].append(number)
    ready = [number for number, count in enumerate(missing) if not count]
    ends: list[tuple[int, int]] = []  # of running trials
    now = 0
    while ready or ends:
        while ready and len(ends) < workers:
            number = heappop(ready)
            heappush(ends, (now + waiting[number].cost, number))
        now = ends[0][0]
        while ends and ends[0][0] == now:
            for number in after[heappop(ends)[1]]:
                missing[number] -= 1
                if not missing[number]:
                    heappush(ready, number)
    return now
