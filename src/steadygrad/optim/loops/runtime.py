"""Compiled loops for CPUs: how they are made and started. It needs numba, and numpy with it.

They are compiled when first needed, in about a quarter of a second each, and kept on disk: beside
this file, else in the user's cache folder, else not at all. ``NUMBA_CACHE_DIR`` says where instead.

They run on the threads that torch computes with. On Linux these are OpenMP's, and a loop that asks
the same library for a team gets the same threads: none are added that could compete with them, and
several Python threads may step at once, as with torch's own operations. Elsewhere, and in a process
that was forked, whose OpenMP threads are its parent's and not its own, a loop has one thread.

A batch's tensors are divided into chunks, which the threads share. What a chunk adds up goes to a
place of its own, so sums do not depend on who worked on it.
"""

import ctypes
import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadygrad.optim import codes
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.loops import ALL, BROKEN, numbers, was_forked
from steadygrad.optim.loops.numbers import GRAD, MOST_SUMS, PARAM, ROW, STATES, WEIGHT
from steadygrad.optim.passes import ARRAYS, Pass, Types, addresses_of, cast, check_memory, named

# Elements of a chunk: with fewer, hardware prefetching restarts too often (of 16,384 to
# 1,048,576 all from 65,536 on took the same time, fewer up to 8% more).
CHUNK = 65536
# Elements of a wave, if it has more than one tensor: what a core's own cache has room for.
WAVE = 2**16
# Waves for each thread, at least, if threads are to take them whole.
SHARE = 8
# Elements below which waking a second thread costs more than it saves.
_SMALL = 32768


class Table:
    """Addresses and chunks of a batch's tensors, or of some of them, in the host's memory."""

    def __init__(
        self,
        sizes: Sequence[int],
        types: Types,
        states: int,
        rows: Sequence[int],
        members: Sequence[int],
    ) -> None:
        self.types, self.lengths = types, np.asarray(sizes, np.int64)
        # Places of the tensors in the batch.
        self.members = np.array(members)
        self.elements = int(self.lengths.sum())
        # A tensor without codes is one row.
        lines = np.array(rows or [2**40] * len(sizes), np.int64)
        # Elements worked on at a time: whole blocks of codes, so whole rows if it must be.
        whole_rows = np.maximum(1, numbers.BLOCK // lines) * lines
        pieces = np.where(lines % codes.BLOCK == 0, numbers.BLOCK, whole_rows)
        lengths = np.maximum(1, CHUNK // pieces) * pieces
        counts = np.maximum(1, -(-self.lengths // lengths))
        tensors = np.repeat(np.arange(len(sizes)), counts)
        # Chunks of each tensor.
        lasts = np.cumsum(counts)
        self.firsts = lasts - counts
        starts = (np.arange(len(tensors)) - self.firsts[tensors]) * lengths[tensors]
        parts = np.minimum(lengths[tensors], self.lengths[tensors] - starts)
        columns = [tensors, starts, parts, self.firsts[tensors], lasts[tensors], pieces[tensors]]
        # See `numbers.CHUNK_TABLE`.
        self.chunks = np.ascontiguousarray(np.stack(columns, axis=1))
        self.kernels: dict[Pass, Any] = {}
        self.turns: dict[int, NDArray[np.int64]] = {}
        # Zero for a gradient that is zero.
        self.addresses = np.zeros((len(sizes), STATES + states), np.int64)
        self.addresses[:, ROW] = lines
        self.partial_sums = np.zeros((len(self.chunks), MOST_SUMS))
        self.args = np.zeros(numbers.PLACES, np.int64)
        self.args[numbers.CHUNKS], self.args[numbers.TENSORS] = len(tensors), len(sizes)
        self.args[numbers.FIELDS] = self.addresses.shape[1]
        self.done, self.zeros = np.zeros(len(sizes), np.int64), np.zeros(pieces.max(initial=0))
        # Between lines of the cache that no thread writes to.
        self.counter = np.zeros(24, np.int64)
        held = self.chunks, self.addresses, self.partial_sums, self.done, self.zeros
        own = [numbers.CHUNK_TABLE, numbers.ADDRESSES, numbers.SUMS, numbers.DONE, numbers.ZEROS]
        self.args[own] = [array.ctypes.data for array in held]
        self.args[numbers.COUNTER] = self.counter[8:].ctypes.data

    def fill_states(self, moments: Sequence[Sequence[Tensor]]) -> None:
        """Writes where large states of the batch lie, given as a list for each of them."""
        for place, states in enumerate(moments[: self.addresses.shape[1] - STATES]):
            self.addresses[:, STATES + place] = addresses_of([states[i] for i in self.members])

    def fill(self, addresses: NDArray[np.int64], has_grad: NDArray[np.bool_]) -> None:
        """Writes where all that may have moved lies now.

        Addresses of gradients, zero for None, of parameters and of weights, ``(3, batch)``.
        """
        if len(self.members) < len(has_grad):
            addresses, has_grad = addresses[:, self.members], has_grad[self.members]
        self.addresses[:, GRAD], self.addresses[:, PARAM], self.addresses[:, WEIGHT] = addresses
        check_memory(self.addresses, self.lengths, has_grad)

    def run(
        self, one: Pass, factors: NDArray[np.float64], options: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Runs a pass's loop on as many threads as torch uses, and returns its sums."""
        threads = _threads(self.elements)
        turns = self._turns(threads)
        self.args[[numbers.COUNT, numbers.TURNS]] = len(turns), turns.ctypes.data
        self.counter.fill(0)
        self.partial_sums.fill(0.0)
        self.done.fill(0)
        self.args[numbers.FACTORS] = factors.ctypes.data
        self.args[numbers.OPTIONS] = options.ctypes.data
        self.args[numbers.ROWS], self.args[numbers.NUMBERS] = len(factors), len(options)
        if one not in self.kernels:
            self.kernels[one] = _KERNEL(prepare(one, self.types).address)
        _run(self.kernels[one], self.args, threads)
        if not one.rows:
            return self.partial_sums
        sums: NDArray[np.float64] = np.add.reduceat(self.partial_sums, self.firsts, axis=0)
        return sums

    def _turns(self, threads: int) -> NDArray[np.int64]:
        """Turns of a loop in waves, in the order in which threads take them.

        In a wave a thread takes some tensors for itself, twice: the second time they are in its own
        caches. What another core has read may be further away than the memory. Threads share large
        tensors, each twice, before all waves.
        """
        if threads not in self.turns:
            turns: list[tuple[int, ...]] = []
            waves: list[list[int]] = []
            # No wave is open that a tensor could be put into.
            total, lasts = math.inf, [*self.firsts[1:], len(self.chunks)]
            for size, first, last in zip(self.lengths, self.firsts, lasts, strict=True):
                if threads > 1 and size * SHARE * threads > self.elements:
                    for way in (numbers.LOOK, numbers.MOVE):
                        turns += [(i, i + 1, way, way + 1) for i in range(first, last)]
                    total = math.inf
                elif total + size > WAVE:
                    waves.append([first, last, numbers.LOOK, numbers.MOVE + 1])
                    total = size
                else:
                    waves[-1][1], total = last, total + size
            # The largest first: threads come to their ends together.
            waves.sort(key=lambda wave: self.chunks[wave[0] : wave[1], 2].sum(), reverse=True)
            self.turns[threads] = np.array([*turns, *waves], np.int64)
        return self.turns[threads]


def run(one: Pass, batch: ParamBatch, by: Sequence[Any], options: Sequence[float]) -> Any:
    """Runs a pass's loop over the tables of a batch.

    A tensor takes part if its first factor is not zero; without any, if it has a gradient.

    Returns:
        This process's sums, with shape ``(rows, tensors)``; None without rows.
    """
    factors = np.array(by, np.float64)
    scale = 1.0 if batch.inverse_scale is None else batch.inverse_scale.numpy()
    numbers_of_all = np.array([*options, scale], np.float64)
    if len(batch.tables) == 1:
        sums = batch.tables[0].run(one, factors, numbers_of_all)
    else:
        sums = np.empty((len(batch.params), MOST_SUMS))
        for table in batch.tables:
            own = np.ascontiguousarray(factors[..., table.members]) if len(by) else factors
            found = table.run(one, own, numbers_of_all)
            if one.rows:
                sums[table.members] = found
    return cast(sums.T[: one.rows], batch.sum_dtype) if one.rows else None


# NumPy's types; of those with 16 bits the bits, see `numbers`.
_NUMBERS: dict[torch.dtype, Any] = {torch.bfloat16: np.uint16, torch.float16: np.int16}
_NUMBERS |= {torch.uint8: np.uint8, **ARRAYS}
# Numba's compiler is for one thread at a time; so are the entries here.
_LOCK = threading.Lock()


def _after_fork() -> None:
    if _LOCK.locked():
        # The thread that compiled was not forked along, and Numba's own lock stays locked.
        BROKEN[ALL] = "this process was forked while another thread compiled"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def prepare(one: Pass, types: Types, *_: Any) -> Any:
    """A pass's loop for some types, compiled once; raises whatever the compiler raises."""
    with _LOCK:
        return _kernel_for(named(one.loop), types, one.constants)


# A kernel's address is valid only while the kernel object lives, so it is kept here.
@cache
def _kernel_for(make: Callable[..., Any], types: Types, constants: tuple[Any, ...]) -> Any:
    function = make(numbers.kinds_of(*(_NUMBERS[dtype] for dtype in types), *constants))
    try:
        return numbers.compiled(function, cache=True)
    except Exception:
        # No folder to write to, a full disk, or what was kept there is damaged, which may raise
        # anything: compiled for this process alone. What cannot be compiled raises again.
        return numbers.compiled(function, cache=False)


_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _team() -> Any:
    """OpenMP's way to start a team, from the very library that torch uses; None: there is none."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path))
        start, end = library.GOMP_parallel_start, library.GOMP_parallel_end
        give_way = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
    start.argtypes = [_KERNEL, ctypes.c_void_p, ctypes.c_uint]
    start.restype = end.restype = None
    return start, end, give_way


def _threads(elements: int) -> int:
    """The number of threads that work on some number of elements."""
    if was_forked() or _team() is None:
        return 1
    return min(torch.get_num_threads(), max(1, elements // _SMALL))


def _run(kernel: Any, args: NDArray[np.int64], threads: int) -> None:
    """Runs a kernel to its end, without the interpreter's lock."""
    place = args.ctypes.data
    if threads == 1:
        kernel(place)
        return
    start, end, args[numbers.YIELD] = _team()
    # A team must come to its end wherever an interrupt may fall.
    try:
        start(kernel, place, threads)
    finally:
        try:
            kernel(place)
        finally:
            end()
