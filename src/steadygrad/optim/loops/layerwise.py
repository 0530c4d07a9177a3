"""LANS and LAMB as compiled loops: the passes of :mod:`steadygrad.optim.layerwise_rule`."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from steadygrad.optim.layerwise_rule import Coefficients, Factors, Options
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

SOURCE = source_of(Options._fields, Factors._fields, Coefficients._fields)
FACTORS, COEFFICIENTS, OPTIONS = map(len, (Factors._fields, Coefficients._fields, Options._fields))


def moments_kernel(
    grad: Any, weight: Any, state: Any, param: Any, has_two: bool
) -> Callable[[Any], None]:
    """Moves the moments; squared norms of weights and directions, of which LANS has two."""
    source, types, rounded = SOURCE, (grad, weight, state, param), param is not weight
    number, largest = wide(grad), np.finfo(wide(grad)).max

    def kernel(data: Any) -> None:
        args, table, sums, factors, options = arguments(data, FACTORS, OPTIONS + 0 * source)
        beta1, beta2, rest1, rest2 = options[0], options[1], 1 - options[0], 1 - options[1]
        beta1, beta2, rest1, rest2 = state(beta1), state(beta2), state(rest1), state(rest2)
        eps, decay, bound = state(options[2]), state(options[3]), state(options[4])
        inverse_scale = number(options[-1])
        while True:
            c, tensor, start, stop = chunk_of(args, table, sums, factors, False)
            if c < 0:
                return
            scale = state(factors[1, tensor])
            unbias1, unbias2 = state(factors[2, tensor]), state(factors[3, tensor])
            for first in range(start, stop, BLOCK):
                size = min(BLOCK, stop - first)
                row = table[tensor]
                g, x, p = arrays_at(args, row, first, size, types)
                m = state_at(row, 0, first, size, types)
                v = state_at(row, 1, first, size, types)
                if rounded:
                    sync_masters(x, p, size)
                part_x, part_m, part_g = state(0), state(0), state(0)
                for i in range(size):
                    slope = state(unscaled(widen(g[i]), inverse_scale, largest)) * scale
                    if has_two:
                        slope = min(max(slope, -bound), bound)
                    m[i] = beta1 * m[i] + rest1 * slope
                    v[i] = beta2 * v[i] + rest2 * (slope * slope)
                    here, d = state(widen(x[i])), math.sqrt(v[i] * unbias2) + eps
                    part_x += here * here
                    if has_two:
                        over = state(1) / d
                        u_m = m[i] * unbias1 * over + decay * here
                        u_g = slope * over + decay * here
                        part_g += u_g * u_g
                    else:
                        u_m = m[i] * unbias1 / d + decay * here
                    part_m += u_m * u_m
                sums[c, 0] += np.float64(part_x)
                sums[c, 1] += np.float64(part_m)
                sums[c, 2] += np.float64(part_g)

    return kernel


def weights_kernel(
    grad: Any, weight: Any, state: Any, param: Any, has_two: bool
) -> Callable[[Any], None]:
    """Moves the weights, and the parameters that are their roundings."""
    source, types, rounded = SOURCE, (grad, weight, state, param), param is not weight
    exact = wide(weight)
    number, largest = wide(grad), np.finfo(wide(grad)).max

    def kernel(data: Any) -> None:
        args, table, sums, factors, options = arguments(data, COEFFICIENTS, OPTIONS + 0 * source)
        eps, bound, inverse_scale = state(options[2]), state(options[4]), number(options[-1])
        while True:
            c, tensor, start, stop = chunk_of(args, table, sums, factors, False)
            if c < 0:
                return
            scale, unbias2 = state(factors[1, tensor]), state(factors[2, tensor])
            along_m, along_g = state(factors[3, tensor]), state(factors[4, tensor])
            keep = exact(factors[5, tensor])
            for first in range(start, stop, BLOCK):
                size = min(BLOCK, stop - first)
                row = table[tensor]
                g, x, p = arrays_at(args, row, first, size, types)
                m = state_at(row, 0, first, size, types)
                v = state_at(row, 1, first, size, types)
                for i in range(size):
                    step = along_m * m[i]
                    if has_two:
                        slope = state(unscaled(widen(g[i]), inverse_scale, largest)) * scale
                        slope = min(max(slope, -bound), bound)
                        step = along_g * slope + along_m * m[i]
                    d = math.sqrt(v[i] * unbias2) + eps
                    moved = keep * exact(widen(x[i])) - step / d
                    x[i] = narrow(moved, x[i])
                if rounded:
                    round_masters(x, p, size)

    return kernel
