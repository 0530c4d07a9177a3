"""What LANS decides between its passes: some numbers for each tensor, from what these add up.

They are compiled for the reason that :mod:`steadygrad.kernels.numba_sums` gives.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from steadygrad.kernels.numba_parts import SOURCE, add_up, array_at, opened, wide
from steadygrad.kernels.tables import COLUMNS, SMALL_STATES, LansNumber, LansSetting

__all__ = ["lans_begin", "lans_finish", "lans_norms", "lans_ratios"]

INVERSE, FIRST = int(LansNumber.INVERSE), int(LansNumber.FIRST)
SECOND, MOMENTUM = int(LansNumber.SECOND), int(LansNumber.MOMENTUM)
GRADIENT, KEEP = int(LansNumber.GRADIENT), int(LansNumber.KEEP)
SLOPES, WEIGHTS = int(LansNumber.SLOPES), int(LansNumber.WEIGHTS)
BY_MOMENTUM, BY_GRADIENT = int(LansNumber.BY_MOMENTUM), int(LansNumber.BY_GRADIENT)
BETA1, BETA2 = int(LansSetting.BETA1), int(LansSetting.BETA2)
DECAY, SIGN, LR = int(LansSetting.DECAY), int(LansSetting.SIGN), int(LansSetting.LR)
LEAST, GREATEST = int(LansSetting.LEAST), int(LansSetting.GREATEST)


def adds_up(place: int, count: int) -> Callable[..., Callable[[Any], None]]:
    """Makes kernels that add up, over chunks, what a pass has left in its first columns."""

    def make(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
        source, exact = SOURCE, wide(weight)

        def kernel(data: Any) -> None:
            _job, chunks, _table, sums, numbers, _s = opened(data, COLUMNS + 0 * source)
            add_up(chunks, sums, numbers, place, count, exact)

        return kernel

    return make


# Squared norms: of gradients, and of weights and both directions.
lans_norms, lans_ratios = adds_up(SLOPES, 1), adds_up(WEIGHTS, 3)


def lans_begin(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Counts a step, and says what gradients are normalised by and moments corrected."""
    source = SOURCE

    def kernel(data: Any) -> None:
        _job, _chunks, table, _sums, numbers, s = opened(data, COLUMNS + 0 * source)
        for t in range(len(numbers)):
            number, count = numbers[t], array_at(table[t, SMALL_STATES], 1, np.float32)
            count[0] += np.float32(1)
            square, step = number[SLOPES], np.float64(count[0])
            number[INVERSE] = s[SIGN] / math.sqrt(square) if square > 0.0 else 0.0
            number[FIRST] = np.float64(state(1) / state(1 - s[BETA1] ** step))
            number[SECOND] = np.float64(state(1) / state(1 - s[BETA2] ** step))

    return kernel


@njit(inline="always")
def ratio(weight: Any, square: Any) -> Any:
    """Weight norm over the direction's norm, 1 where either is zero."""
    return weight / math.sqrt(square) if weight > 0.0 and square > 0.0 else 1.0


def lans_finish(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Says what the update multiplies moments, gradients and weights by."""
    source = SOURCE

    def kernel(data: Any) -> None:
        _job, _chunks, _table, _sums, numbers, s = opened(data, COLUMNS + 0 * source)
        for t in range(len(numbers)):
            number = numbers[t]
            norm = min(max(math.sqrt(number[WEIGHTS]), s[LEAST]), s[GREATEST])
            by_momentum = s[LR] * s[BETA1] * ratio(norm, number[BY_MOMENTUM])
            by_gradient = s[LR] * (1 - s[BETA1]) * ratio(norm, number[BY_GRADIENT])
            number[MOMENTUM] = by_momentum * number[FIRST]
            number[GRADIENT] = by_gradient
            number[KEEP] = 1 - s[DECAY] * (by_momentum + by_gradient)

    return kernel
