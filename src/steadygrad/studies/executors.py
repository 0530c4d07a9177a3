"""Workers that run trials side by side: any ``concurrent.futures.Executor`` will do.

All workers share the run's folder.
"""

import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from steadygrad._checks import InputError, from_extra, launched
from steadygrad.studies.record import cores
from steadygrad.studies.schema import Runtime
from steadygrad.tasks import guarded
from steadygrad.tasks.load import FOLDERS, load_function

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _shut_down(executor: Executor) -> None:
    executor.shutdown(wait=False, cancel_futures=True)


class Workers:
    """An executor that ``make`` can make again after its workers were lost.

    ``count`` is the number of workers that are there now, for a cluster may grow; ``end`` ends an
    executor, with its workers in mid-trial where it can.
    """

    def __init__(
        self,
        make: Callable[[], Executor],
        count: Callable[[], int],
        *,
        end: Callable[[Any], None] = _shut_down,
    ) -> None:
        self._make, self.count, self._end = make, count, end
        self.executor = make()

    def submit(self, *call: Any) -> "Future[Any]":
        """Hands a function and its arguments to a worker."""
        # A process that is started meanwhile never gets Ctrl-C: it would die of one that comes
        # before it can leave that to the coordinator.
        masks = hasattr(signal, "pthread_sigmask")  # not on Windows
        before = masks and signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        # Nor does it run this one's script again, as spawn would, or take the standard library's
        # modules from the tasks' folders, which are first here.
        main, path = sys.modules["__main__"], sys.path[:]
        sys.modules["__main__"] = ModuleType("__main__")
        sys.path[:] = sorted(path, key=FOLDERS.__contains__)
        try:
            return self.executor.submit(*call)
        # An executor that broke while nothing ran says so here.
        except Exception as error:
            future: Future[Any] = Future()
            future.set_exception(error)
            return future
        finally:
            sys.modules["__main__"], sys.path[:] = main, path
            if before is not False:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def renew(self) -> None:
        """Makes another executor after workers were lost."""
        self.close()
        self.executor = self._make()

    def close(self) -> None:
        """Ends the workers, in mid-trial too; calling it again does nothing."""
        with suppress(Exception):
            self._end(self.executor)


def cluster_workers(settings: Any, processes: int) -> AbstractContextManager[Workers | None]:
    """The workers that ``--dask`` or ``--executor`` names; None where neither is given."""
    dask, executor = settings.dask, settings.executor
    named = [name for name, given in (("--dask", dask), ("--executor", executor)) if given]
    if not named:
        return nullcontext()
    if processes > 1 or len(named) > 1:
        raise InputError(
            f"{' and '.join(named)}: expected one way to run trials, each in one process. Found "
            f"{len(named)}, in {processes} processes. Remedy: one of them, without torchrun."
        )
    return closing(dask_workers(dask) if dask else made_workers(executor, settings.workers))


def local_workers(workers: int, runtime: Runtime) -> Workers | None:
    """Worker processes of this machine, a device each; None where trials run in this process."""
    if not workers:
        # As many as the plan reckons with, where this machine has the cores for them.
        enough = max(1, cores() // runtime.threads)
        workers = min(runtime.workers, enough) if runtime.device == "cpu" else runtime.workers
    if workers < 2 or launched()[1] > 1:
        return None
    devices = cuda_devices() if runtime.device == "cuda" else [None]
    context = multiprocessing.get_context("spawn")

    def make() -> Executor:
        queue = context.SimpleQueue()
        for worker in range(workers):
            queue.put(devices[worker % len(devices)])
        return ProcessPoolExecutor(workers, context, _begin_worker, (os.getpid(), queue))

    def kill(executor: Any) -> None:
        for process in list((getattr(executor, "_processes", None) or {}).values()):
            process.kill()
        _shut_down(executor)

    return Workers(make, lambda: workers, end=kill)


def cuda_devices() -> list[str]:
    """Names of the CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` takes them.

    Someone who shares a machine names some of its devices, by number or by UUID.
    """
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in given.split(",")][:count]


def _begin_worker(parent: int, devices: Any) -> None:
    """Prepares a worker process: it leaves signals to its coordinator, and ends with it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # What a task prints must not mix with the coordinator's output.
    os.dup2(2, 1)
    if (device := devices.get()) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device

    def watch() -> None:
        # A coordinator that was killed leaves its workers waiting for jobs for ever.
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def made_workers(spec: str, workers: int) -> Workers:
    """Workers of an executor of the user's own, such as submitit's or Ray's.

    ``spec`` is ``module:factory`` or ``path/file.py:factory``; 0 ``workers`` are as many as the
    executor says that it has.
    """
    module, _, name = spec.rpartition(":")
    what = f"--executor {spec}"
    with guarded(what):
        in_file = module.endswith(".py")
        factory = load_function(spec) if in_file else getattr(import_module(module), name)

    def make() -> Executor:
        with guarded(what):
            return factory()  # type: ignore[no-any-return]

    found = Workers(make, lambda: workers)
    workers = workers or getattr(found.executor, "_max_workers", 0)
    if not workers:
        found.close()
        raise InputError(f"{what} does not say how many workers it has. Remedy: --workers N.")
    return found


def dask_workers(address: str) -> Workers:
    """The workers of the Dask cluster whose scheduler is at ``address``, as ``host:port``."""
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


def _dask_client(address: str) -> Any:
    Client: Any = from_extra("distributed", "dask").Client
    for name in ("distributed", "distributed.client"):  # tens of lines on a lost scheduler
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        if not re.fullmatch(r"(\w+://)?\S+:\d+", address):
            raise ValueError
        return Client(address, timeout="10s", set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise InputError(
            f"--dask should be the HOST:PORT of a Dask scheduler that answers. Found {address!r} "
            f"({type(error).__name__}). Remedy: the address that `dask scheduler` prints."
        ) from error
