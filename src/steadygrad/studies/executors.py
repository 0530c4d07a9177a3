"""Workers that run trials side by side: any ``concurrent.futures.Executor`` will do.

All workers share the run's folder.
"""

import logging
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from steadygrad._checks import InputError
from steadygrad.studies.work import begin_worker
from steadygrad.tasks import guarded
from steadygrad.tasks.registry import load_function

__all__ = ["Workers", "cuda_devices", "dask_workers", "made_workers", "process_workers"]


def _shut_down(executor: Executor) -> None:
    executor.shutdown(wait=False, cancel_futures=True)


class Workers:
    """An executor that can be made again.

    Args:
        make: Makes an executor; called again after its workers were lost.
        count: Number of workers that are there now.
        end: Ends an executor, with its workers in mid-trial where it can.
    """

    def __init__(
        self,
        make: Callable[[], Executor],
        count: Callable[[], int],
        *,
        end: Callable[[Any], None] = _shut_down,
    ) -> None:
        self._make, self._count, self._end = make, count, end
        self._executor = make()

    @property
    def workers(self) -> int:
        """Jobs at a time; a cluster may grow."""
        return self._count()

    def submit(self, *call: Any) -> "Future[Any]":
        """Hands a function and its arguments to a worker."""
        try:
            with _signals_later(), _bare():
                return self._executor.submit(*call)
        # An executor that broke while nothing ran says so here.
        except Exception as error:
            future: Future[Any] = Future()
            future.set_exception(error)
            return future

    def renew(self) -> None:
        """Makes another executor after workers were lost."""
        with suppress(Exception):
            self._end(self._executor)
        self._executor = self._make()

    def close(self) -> None:
        """Ends the workers, in mid-trial too; calling it again does nothing."""
        with suppress(Exception):
            self._end(self._executor)


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


@contextmanager
def _bare() -> Iterator[None]:
    """A process that is started meanwhile does not run this one's script again, as spawn would.

    Nor does it take the standard library's modules from the task's folder, which is first here.
    """
    main, path = sys.modules["__main__"], sys.path[:]
    sys.modules["__main__"], sys.path[:] = ModuleType("__main__"), [*path[1:], *path[:1]]
    try:
        yield
    finally:
        sys.modules["__main__"], sys.path[:] = main, path


def process_workers(workers: int, devices: Sequence[str] = ()) -> Workers:
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
        _shut_down(executor)

    return Workers(make, lambda: workers, end=kill)


def made_workers(spec: str, workers: int) -> Workers:
    """Workers of an executor of the user's own, such as submitit's or Ray's.

    Args:
        spec: Function that makes it: ``module:factory`` or ``path/file.py:factory``.
        workers: Trials at a time; 0: as many as the executor says that it has.

    Raises:
        InputError: If there is no such function, or it makes no executor.
    """
    module, _, name = spec.rpartition(":")
    what = f"--executor {spec}"
    with guarded(what):
        in_file = module.endswith(".py")
        factory = load_function(spec) if in_file else getattr(import_module(module), name)

    def make() -> Executor:
        with guarded(what):
            made: Any = factory()
        if not callable(getattr(made, "submit", None)):
            raise InputError(
                f"{what} should return a concurrent.futures.Executor. Found "
                f"{type(made).__name__}. Remedy: a function that returns one."
            )
        return made  # type: ignore[no-any-return]

    found = Workers(make, lambda: workers)
    workers = workers or getattr(found._executor, "_max_workers", 0)
    if not workers:
        found.close()
        raise InputError(
            f"{what} does not say how many trials it runs at a time. Found --workers 0. "
            "Remedy: --workers N."
        )
    return found


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


def dask_workers(address: str) -> Workers:
    """The workers of the Dask cluster whose scheduler is at ``address``, as ``host:port``.

    Raises:
        InputError: If Dask is not installed, nothing answers, or there is no worker.
    """
    client: Any = None
    workers = 1

    def make() -> Executor:
        nonlocal client
        # Anew: one whose scheduler is lost takes jobs, and never ends them.
        client = _dask_client(address)
        return client.get_executor(pure=False)  # type: ignore[no-any-return]

    def present() -> int:
        nonlocal workers
        with suppress(Exception):  # a scheduler that is lost shows in its trials
            # With a limit: a scheduler that was killed may never answer.
            there = client.sync(client.scheduler.ncores, workers=None, callback_timeout=5)
            workers = max(1, len(there))
        return workers

    def end(executor: Executor) -> None:
        executor.shutdown(wait=False)
        client.close(timeout=5.0)

    found = Workers(make, present, end=end)
    # A worker's threads share torch's generator: they take turns.
    if not client.nthreads():
        found.close()
        raise InputError(
            f"The Dask scheduler at {address!r} should have workers. Found none. "
            "Remedy: `dask worker ADDRESS --nthreads 1` on each machine."
        )
    return found
