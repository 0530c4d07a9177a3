"""Running a compiled loop on several threads: those that torch computes with.

On Linux torch's threads are OpenMP's, and a loop that asks the same library for a team gets the
same threads: none are added that could compete with them, and several Python threads may step at
once, as with torch's own operations. Elsewhere, and in a process that was forked, whose OpenMP
threads are its parent's and not its own, Python threads do it.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steadygrad.kernels import was_forked

__all__ = ["SMALL", "run"]

# Elements below which waking a second thread costs more than it saves.
SMALL = 32768

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Own:
    """Python threads of this process."""

    pool: ThreadPoolExecutor | None = None
    size = 0


def _after_fork() -> None:
    _Own.pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@cache
def _team() -> Any:
    """OpenMP's way to start a team, from the very library that torch uses; None: there is none."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path))
        start, end = library.GOMP_parallel_start, library.GOMP_parallel_end
    except (OSError, AttributeError):
        return None
    start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    start.restype = end.restype = None
    return start, end


def _pool(threads: int) -> ThreadPoolExecutor:
    if _Own.pool is None or _Own.size < threads:
        _Own.pool, _Own.size = ThreadPoolExecutor(threads, "steadygrad"), threads
    return _Own.pool


def run(address: int, args: NDArray[np.int64], elements: int) -> None:
    """Runs a kernel to its end, without the interpreter's lock.

    Args:
        address: Address of the kernel.
        args: Its arguments.
        elements: Elements that it works on.
    """
    threads = min(torch.get_num_threads(), max(1, elements // SMALL))
    kernel, place = _KERNEL(address), args.ctypes.data
    if threads == 1:
        kernel(place)
    elif not was_forked() and (team := _team()) is not None:
        start, end = team
        # A team must come to its end wherever an interrupt may fall.
        try:
            start(address, place, threads)
        finally:
            try:
                kernel(place)
            finally:
                end()
    else:
        others = [_pool(threads).submit(kernel, place) for _ in range(threads - 1)]
        try:
            kernel(place)
        finally:
            for other in others:
                other.result()
