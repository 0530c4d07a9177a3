"""Tensors cut into chunks, and the job that a compiled loop is handed.

A kernel is a C function of one pointer, to int64 numbers at the places that :class:`Job` says. Any
number of threads may run it on the same job at once: they share out its chunks among themselves.
What a chunk adds up goes to a place of its own, so sums do not depend on who took it.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "CHUNK", "ChunkTable", "Job", "Learn", "Number"]

# Elements of a chunk: with fewer the memory's own look-ahead starts anew too often (of 16,384 to
# 1,048,576 all from 65,536 on took the same time, fewer up to 8% more).
CHUNK = 65536
# Elements that are added up in the working type; their sums are added up in float64.
BLOCK = 4096

_ZEROS = np.zeros(BLOCK)


class Job(IntEnum):
    """Places in a job.

    Each holds an address, or a number where it says so.
    """

    COUNTER = 0  # of chunks taken
    CHUNKS = 1  # number
    CHUNK_TABLE = 2
    TENSORS = 3  # number
    TENSOR_TABLE = 4  # addresses, a row for each tensor
    FIELDS = 5  # number: length of such a row
    SUMS = 6  # float64, a row for each chunk
    FACTORS = 7  # float64, a row for each tensor
    SETTINGS = 8  # float64
    ZEROS = 9  # gradients of a block, for tensors that have none


class Number(IntEnum):
    """Places in a row of float64 that ScaledAdam's kernels share, one row for each tensor."""

    SECOND_MOMENT = 0  # factors of the update: on the second moment,
    GRADIENT = 1  # on the scaled gradient
    WEIGHT = 2  # and on the weight
    INNER = 3  # inner product of gradient and weight
    SQUARE = 4  # squared norm of the weight
    ELEMENTS = 5  # over all shards


class Learn(IntEnum):
    """Places in the float64 settings by which ScaledAdam learns sizes."""

    LR = 0
    BETA2 = 1
    EPS = 2
    SCALAR_SCALE = 3
    MIN_RMS = 4
    MAX_RMS = 5
    PERIOD = 6
    ORIGINAL = 7  # not zero for the recipe of 2022
    SCALAR = 8  # not zero for tensors of one element
    SCALE = 9  # factor on the gradients


class ChunkTable:
    """Some tensors, cut into chunks.

    Args:
        sizes: Elements of each tensor; an empty one has an empty chunk.
        fields: How many addresses a kernel needs of each: its weight, its gradient and so on.
        chunk: Elements of a chunk.

    Attributes:
        addresses: With shape ``(tensors, fields)``; to be filled in before each launch. Zero in
            the first place: the gradient is zero.
        chunks: Rows of tensor, first element and length, with shape ``(chunks, 3)``.
    """

    def __init__(self, sizes: Sequence[int], fields: int, chunk: int = CHUNK) -> None:
        counts = np.maximum(1, -(-np.asarray(sizes, np.int64) // chunk))
        self.firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        self.addresses = np.zeros((len(sizes), fields), np.int64)
        tensors = np.repeat(np.arange(len(sizes)), counts)
        starts = (np.arange(len(tensors)) - self.firsts[tensors]) * chunk
        lengths = np.minimum(chunk, np.asarray(sizes, np.int64)[tensors] - starts)
        self.chunks = np.ascontiguousarray(np.stack([tensors, starts, lengths], axis=1))
        self.elements = sum(sizes)
        # A line of cache to itself: every thread writes to it.
        self._counter = np.zeros(16, np.int64)
        self._sums = np.zeros((len(self.chunks), 3))
        # Arrays that stay where they are: asking numpy for an address takes a microsecond.
        self._job = np.array(
            [
                self._counter.ctypes.data + 64,
                len(self.chunks),
                self.chunks.ctypes.data,
                *self.addresses.shape[:1],
                self.addresses.ctypes.data,
                self.addresses.shape[1],
                self._sums.ctypes.data,
                0,
                0,
                _ZEROS.ctypes.data,
            ]
        )

    def job(self, factors: int = 0, settings: int = 0) -> NDArray[np.int64]:
        """What to hand to a kernel; good until the next call.

        Args:
            factors: Address of a row of float64 for each tensor.
            settings: Address of float64 numbers that hold for all.
        """
        self._counter[8] = 0
        self._job[Job.FACTORS], self._job[Job.SETTINGS] = factors, settings
        return self._job

    def sums(self, place: int | None = None) -> NDArray[np.float64]:
        """What the last kernel has added up for each tensor.

        Args:
            place: Which of the three sums; None: all.

        Returns:
            An array with shape ``(3, tensors)``, or ``(tensors)``.
        """
        kept = self._sums if place is None else self._sums[:, place]
        found: NDArray[np.float64] = np.add.reduceat(kept, self.firsts, axis=0)
        return np.ascontiguousarray(found.T)
