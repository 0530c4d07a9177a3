"""What ScaledAdam's first pass has found, tensor by tensor: is it finite, and how large?

Some numbers for each tensor. They take part in memory that the passes have swept out of the caches:
there a hundred small torch operations cost as much as a tenth of the large ones' time.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from steadygrad.kernels.numba_parts import SOURCE, add_up, array_at, opened, wide
from steadygrad.kernels.numba_sizes import RMS, STEP, UNSURE, due
from steadygrad.kernels.tables import COLUMNS, Number, Setting

__all__ = ["scaled_adam_add", "scaled_adam_judge"]

SLOPES, INNER = int(Number.SLOPES), int(Number.INNER)
SQUARE, ELEMENTS = int(Number.SQUARE), int(Number.ELEMENTS)
EARLY, TERM = int(Number.EARLY), int(Number.TERM)
SCALAR, SCALAR_SCALE = int(Setting.SCALAR), int(Setting.SCALAR_SCALE)
ORIGINAL, UNSCALE = int(Setting.ORIGINAL), int(Setting.UNSCALE)
LATE, BAD, LAST_STEP = int(Setting.LATE), int(Setting.BAD), int(Setting.STEP)
SQUARE_NORM = int(Setting.SQUARE_NORM)

# Squared inner products of gradients and weights that are past float32's range, with a margin: the
# gradients' squared norm, whatever the weights are, and its product with the weights' last known.
LARGE, LARGE_PRODUCT = 1e20, 1e30


@njit(inline="always")
def may_overflow(number: Any, rms: Any) -> Any:
    """Whether an inner product may overflow when it is squared."""
    weights = rms * rms * number[ELEMENTS]
    return number[SLOPES] > LARGE or number[SLOPES] * weights > LARGE_PRODUCT


@njit(inline="always")
def square_size(row: Any, s: Any, exact: Any, state: Any) -> Any:
    """What a tensor's squared gradient is multiplied by in the norm that is clipped."""
    if s[SCALAR] == 0.0:
        rms = exact(array_at(row[RMS], 1, state)[0])
        return rms * rms
    # In 2022 the norm took no account of the smaller learning rate.
    return exact(1.0 if s[ORIGINAL] != 0.0 else s[SCALAR_SCALE] * s[SCALAR_SCALE])


@njit(inline="always")
def judge(addresses: Any, numbers: Any, s: Any, exact: Any, state: Any) -> None:
    """Looks whether sums are finite, also when their squares are taken, and scales them."""
    s[BAD], s[LAST_STEP], total = 0.0, 0.0, 0.0
    for t in range(len(numbers)):
        row, number = addresses[t], numbers[t]
        slopes, inner = exact(number[SLOPES]), exact(number[INNER])
        # The state may have a smaller range than the weights.
        if not (math.isfinite(state(slopes)) and math.isfinite(state(inner * inner))):
            s[BAD] = 1.0
        square = square_size(row, s, exact, state)
        number[TERM] = slopes * exact(s[UNSCALE] * s[UNSCALE]) * square
        total += number[TERM]
        s[LAST_STEP] = max(s[LAST_STEP], np.float64(array_at(row[STEP], 1, np.float32)[0]))
    s[SQUARE_NORM] = np.float64(exact(total))


def scaled_adam_judge(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Looks at sums that have been added up over shards."""
    source, exact = SOURCE, wide(weight)

    def kernel(data: Any) -> None:
        _job, _chunks, addresses, _sums, numbers, s = opened(data, COLUMNS + 0 * source)
        judge(addresses, numbers, s, exact, state)

    return kernel


def scaled_adam_add(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Adds up over chunks, in the weights' type or float32, and looks at the outcome.

    Asks for another first pass where this one should have taken more inner products: those that
    are needed now, and those that must not overflow when they are squared later.
    """
    source, exact = SOURCE, wide(weight)

    def kernel(data: Any) -> None:
        _job, chunks, addresses, sums, numbers, s = opened(data, COLUMNS + 0 * source)
        add_up(chunks, sums, numbers, SLOPES, 3, exact)
        s[LATE] = 0.0
        for t in range(len(numbers)):
            row, number = addresses[t], numbers[t]
            if s[SCALAR] == 0.0:
                rms = np.float64(array_at(row[RMS], 1, state)[0])
                step = array_at(row[STEP], 1, np.float32)[0]
                known = not (due(step, s) or number[EARLY] == UNSURE)
                needed = 0.0 if known and not may_overflow(number, rms) else 1.0
                if needed > number[EARLY]:
                    s[LATE] = 1.0
                elif needed == 0.0:
                    # The update will find them again, with other roundings: what was taken too
                    # early must not tell a step from the same one after a resume.
                    number[INNER] = number[SQUARE] = 0.0
                if number[EARLY] != UNSURE:
                    number[EARLY] = needed
        judge(addresses, numbers, s, exact, state)

    return kernel
