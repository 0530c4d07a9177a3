"""Tensors cut into chunks, and the job that a compiled loop is handed.

A kernel is a C function of one pointer, to int64 numbers at the places that :class:`Job` says. Any
number of threads may run it on the same job at once: they share out its chunks among themselves.
What a chunk adds up goes to a place of its own, so sums do not depend on who took it.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK",
    "CHUNK",
    "COLUMNS",
    "SMALL_STATES",
    "ChunkTable",
    "Job",
    "LansNumber",
    "LansSetting",
    "Number",
    "Setting",
]

# Elements of a chunk: with fewer the memory's own look-ahead starts anew too often (of 16,384 to
# 1,048,576 all from 65,536 on took the same time, fewer up to 8% more).
CHUNK = 65536
# Elements that are added up in the working type; their sums are added up in float64.
BLOCK = 4096

# Addresses of large tensors come first: gradient, weight, two states, and where a rounded weight
# goes; those of small states follow, the step count's before all.
SMALL_STATES = 5

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
    SLOPES = 3  # squared norm of the gradient
    INNER = 4  # inner product of gradient and weight
    SQUARE = 5  # squared norm of the weight
    ELEMENTS = 6  # over all shards
    EARLY = 7  # not zero where the first pass is to take inner products too
    TERM = 8  # squared norm of the scaled gradient


class LansNumber(IntEnum):
    """Places in a row of float64 that LANS's kernels share, one row for each tensor."""

    INVERSE = 0  # one over the gradient's norm, with its sign
    FIRST = 1  # and over the corrections of both moments
    SECOND = 2
    MOMENTUM = 3  # factors of the update: on the first moment,
    GRADIENT = 4  # on the normalised gradient
    KEEP = 5  # and on the weight
    SLOPES = 6  # squared norm of the gradient
    WEIGHTS = 7  # squared norms of the weight and of both directions
    BY_MOMENTUM = 8
    BY_GRADIENT = 9


# Columns of such rows, for either.
COLUMNS = 10


class LansSetting(IntEnum):
    """Places in the float64 numbers that hold for all tensors of LANS's kernels."""

    BETA1 = 0
    BETA2 = 1
    EPS = 2
    DECAY = 3
    BOUND = 4  # on elements of normalised gradients
    SIGN = 5
    LR = 6
    LEAST = 7  # bounds on the weight's norm
    GREATEST = 8


class Setting(IntEnum):
    """Places in the float64 numbers that hold for all tensors of ScaledAdam's kernels."""

    LR = 0
    BETA1 = 1
    BETA2 = 2
    EPS = 3
    SCALAR_SCALE = 4
    MIN_RMS = 5
    MAX_RMS = 6
    PERIOD = 7
    ORIGINAL = 8  # not zero for the recipe of 2022
    SCALAR = 9  # not zero for tensors of one element
    SHARED = 10  # not zero where sums are to be added up over shards
    BEFORE = 11  # bounds on weights before the step
    AFTER = 12  # and after it
    UNSCALE = 13  # factors on the gradients: what a scaler and `maximize` leave to do,
    SIZE_SCALE = 14  # that with clipping, where sizes learn
    SCALE = 15  # and in the update
    # What kernels have found.
    LATE = 16  # not zero if the first pass should have taken more inner products
    BAD = 17  # not zero if some sum is not finite
    STEP = 18  # steps taken before this one
    SQUARE_NORM = 19  # of all scaled gradients


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
        sums: What the last pass has added up in each chunk, with shape ``(chunks, 3)``.
        firsts: Each tensor's first chunk.
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
        self.sums = np.zeros((len(self.chunks), 3))
        # Arrays that stay where they are: asking numpy for an address takes a microsecond.
        self._job = np.array(
            [
                self._counter.ctypes.data + 64,
                len(self.chunks),
                self.chunks.ctypes.data,
                *self.addresses.shape[:1],
                self.addresses.ctypes.data,
                self.addresses.shape[1],
                self.sums.ctypes.data,
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
