"""Compiled loops for CPUs: how they are made and started. It needs numba, and numpy with it.

They are compiled when first needed, in about a quarter of a second each, and kept on disk: beside
this file, else in the user's cache folder, else not at all. ``NUMBA_CACHE_DIR`` says where instead.

They run on the threads that torch computes with. On Linux these are OpenMP's, and a loop that asks
the same library for a team gets the same threads: none are added that could compete with them, and
several Python threads may step at once, as with torch's own operations. Elsewhere, and in a process
that was forked, whose OpenMP threads are its parent's and not its own, Python threads do it.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadygrad.kernels import BROKEN, KernelError, was_forked
from steadygrad.kernels.numba.numbers import KernelArgs, compiled
from steadygrad.kernels.table import BLOCK, MOST_SUMS, KernelBatch, PointerTable, Types

__all__ = ["Pass", "Table", "prepare"]

# A kernel for some types: a function of one pointer, to the numbers of `KernelArgs`.
Maker = Callable[[Any, Any, Any, Any], Callable[[Any], None]]


class Table(PointerTable):
    """A table of pointers with the arguments of a kernel that stay the same.

    Attributes:
        partial_sums: Sums of the last pass over each chunk, with shape ``(chunks, MOST_SUMS)``.
    """

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.partial_sums = np.zeros((len(self.chunks), MOST_SUMS))
        self.args = KernelArgs(
            counter=0,
            chunks=len(self.chunks),
            chunk_table=self.chunks.ctypes.data,
            tensors=len(self.addresses),
            addresses=self.addresses.ctypes.data,
            fields=self.addresses.shape[1],
            sums=self.partial_sums.ctypes.data,
            factors=0,
            options=0,
            zeros=_ZEROS.ctypes.data,
        )

    def sums(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Sums of the last pass over each tensor, with shape ``(rows, tensors)``."""
        found = np.add.reduceat(self.partial_sums[:, :rows], self.firsts, axis=0)
        return torch.from_numpy(found.T).to(dtype)


class Pass(NamedTuple):
    """A pass over all elements. A tensor takes part if its first factor is not zero.

    Attributes:
        make: Maker of the kernel.
        rows: Number of sums.
    """

    make: Maker
    rows: int = 0

    def __call__(
        self, batch: KernelBatch, by: Sequence[Tensor] = (), options: Sequence[float] = ()
    ) -> Any:
        """Runs it on as many threads as torch uses, as the formulas' function of its name.

        Args:
            batch: The parameters.
            by: Factors of each, each with shape ``(tensors)``.
            options: Numbers that hold for all of them.

        Returns:
            This process's sums, with shape ``(rows, tensors)``; None without rows.
        """
        table: Table = batch.table
        factors = np.array([column.numpy() for column in by], np.float64)
        scale = 1.0 if batch.inverse_scale is None else batch.inverse_scale.numpy()
        numbers = np.array([*options, scale], np.float64)
        # A line of cache to itself: every thread writes to it.
        counter = np.zeros(16, np.int64)
        args = table.args._replace(
            counter=counter.ctypes.data + 64,
            factors=factors.ctypes.data,
            options=numbers.ctypes.data,
        )
        address = _address_of(self.make, table.types)
        _run(address, np.array(args, np.int64), table.elements)
        return table.sums(self.rows, batch.sum_dtype) if self.rows else None


_NUMBERS = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    # The bits of 16-bit types, see `numbers`.
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
}
_ZEROS = np.zeros(BLOCK)
# Numba's compiler is for one thread at a time; so are the entries here.
_LOCK = threading.Lock()


def _after_fork() -> None:
    if _LOCK.locked():
        # The thread that compiled was not forked along, and Numba's own lock stays locked.
        BROKEN["cpu"] = "this process was forked while another thread compiled"
    _Own.pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def prepare(passes: Sequence[Pass], types: Types, states: int, device: torch.device) -> None:
    """Compiles passes for some types, if they are not yet compiled.

    Raises:
        KernelError: If one cannot be compiled.
    """
    for one in passes:
        _address_of(one.make, types)


def _address_of(make: Maker, types: Types) -> int:
    with _LOCK:
        try:
            return int(_kernel_for(make, types).address)
        except MemoryError:
            raise
        except Exception as error:
            # A compiler may raise anything on an unknown machine.
            raise KernelError(" ".join(str(error).split())[:200]) from error


# A kernel's address is valid only while the kernel object lives, so it is kept here.
@cache
def _kernel_for(make: Maker, types: Types) -> Any:
    function = make(*(_NUMBERS[dtype] for dtype in types))
    try:
        return compiled(function, cache=True)
    except Exception:
        # No folder to write to, a full disk, or what was kept there is damaged, which may raise
        # anything: compiled for this process alone. What cannot be compiled raises again.
        return compiled(function, cache=False)


# Elements below which waking a second thread costs more than it saves.
_SMALL = 32768

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Own:
    """Python threads of this process."""

    pool: ThreadPoolExecutor | None = None
    size = 0


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


def _run(address: int, args: NDArray[np.int64], elements: int) -> None:
    """Runs a kernel to its end, without the interpreter's lock.

    Args:
        address: Address of the kernel.
        args: Arguments of the kernel.
        elements: Elements that it works on.
    """
    threads = min(torch.get_num_threads(), max(1, elements // _SMALL))
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
