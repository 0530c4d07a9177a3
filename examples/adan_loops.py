"""Adan's pass as a compiled loop for CPUs; it needs numba, and is loaded when a step needs it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from steadygrad.optim.loops.numbers import (
    BLOCK,
    arguments,
    arrays_at,
    chunk_of,
    narrow,
    round_masters,
    source_of,
    state_at,
    sync_masters,
    unscaled,
    wide,
    widen,
)

# The loop is compiled anew when those functions have changed.
SOURCE, OPTIONS = source_of(), 4


def move_kernel(
    grad: Any, weight: Any, state: Any, param: Any, count: int
) -> Callable[[Any], None]:
    """Moves all averages and the weights.

    Args:
        grad: Numpy's type of gradients; the bits of 16-bit ones.
        weight: That of weights, or of their masters.
        state: That of the large states.
        param: That of parameters: of ``weight`` unless these are masters.
        count: Number of factors.
    """
    source, types, rounded = SOURCE, (grad, weight, state, param), param is not weight
    exact, number = wide(weight), wide(grad)
    largest = np.finfo(number).max

    def kernel(data: Any) -> None:
        args, table, sums, factors, options = arguments(data, count, OPTIONS + 0 * source)
        beta1, beta2, beta3 = state(options[0]), state(options[1]), state(options[2])
        rest1, rest2, rest3 = 1 - options[0], 1 - options[1], 1 - options[2]
        rest1, rest2, rest3 = state(rest1), state(rest2), state(rest3)
        eps, inverse_scale = state(options[3]), number(options[-1])
        while True:
            c, tensor, start, stop = chunk_of(args, table, sums, factors, False)
            if c < 0:
                return
            sign, follows = state(factors[1, tensor]), state(factors[2, tensor])
            along_m, along_n = state(factors[3, tensor]), state(factors[4, tensor])
            unbias3, keep = state(factors[5, tensor]), exact(factors[6, tensor])
            for first in range(start, stop, BLOCK):
                size = min(BLOCK, stop - first)
                row = table[tensor]
                g, x, p = arrays_at(args, row, first, size, types)
                m = state_at(row, 0, first, size, types)
                v = state_at(row, 1, first, size, types)
                n = state_at(row, 2, first, size, types)
                previous = state_at(row, 3, first, size, types)
                if rounded:
                    sync_masters(x, p, size)
                for i in range(size):
                    slope = state(unscaled(widen(g[i]), inverse_scale, largest)) * sign
                    change = (slope - previous[i]) * follows
                    previous[i] = slope
                    m[i] = beta1 * m[i] + rest1 * slope
                    n[i] = beta2 * n[i] + rest2 * change
                    ahead = slope + beta2 * change
                    v[i] = beta3 * v[i] + rest3 * (ahead * ahead)
                    step = along_m * m[i] + along_n * n[i]
                    step /= math.sqrt(v[i] * unbias3) + eps
                    x[i] = narrow(keep * exact(widen(x[i])) - step, x[i])
                if rounded:
                    round_masters(x, p, size)

    return kernel
