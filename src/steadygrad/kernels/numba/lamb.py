"""LAMB as compiled loops: the passes of :mod:`steadygrad.formulas.lamb`."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from steadygrad.formulas.lamb import Coefficients, Rule, Scales
from steadygrad.kernels.numba.lans import grad_sq_norms
from steadygrad.kernels.numba.numbers import (
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
from steadygrad.kernels.numba.runtime import Pass
from steadygrad.kernels.table import BLOCK

__all__ = ["PASSES", "apply", "grad_sq_norms", "update_moments"]

SOURCE = source_of(Rule._fields, Scales._fields, Coefficients._fields)
SCALES, COEFFICIENTS, OPTIONS = len(Scales._fields), len(Coefficients._fields), len(Rule._fields)


def moments_kernel(grad: Any, weight: Any, state: Any, param: Any) -> Callable[[Any], None]:
    """Moves the moments; squared norms of weights and directions."""
    source, types, rounded = SOURCE, (grad, weight, state, param), param is not weight
    number, largest = wide(grad), np.finfo(wide(grad)).max

    def kernel(data: Any) -> None:
        args, table, sums, factors, options = arguments(data, SCALES, OPTIONS + 0 * source)
        beta1, beta2 = state(options[0]), state(options[1])
        rest1, rest2 = state(1 - options[0]), state(1 - options[1])
        eps, decay = state(options[2]), state(options[3])
        inverse_scale = number(options[-1])
        while True:
            c, tensor, start, stop = chunk_of(args, table, sums, factors, False)
            if c < 0:
                return
            clip = state(factors[1, tensor])
            unbias1, unbias2 = state(factors[2, tensor]), state(factors[3, tensor])
            for first in range(start, stop, BLOCK):
                size = min(BLOCK, stop - first)
                row = table[tensor]
                g, x, p = arrays_at(args, row, first, size, types)
                m = state_at(row, 0, first, size, types)
                v = state_at(row, 1, first, size, types)
                if rounded:
                    sync_masters(x, p, size)
                part_x, part_u = state(0), state(0)
                for i in range(size):
                    slope = state(unscaled(widen(g[i]), inverse_scale, largest)) * clip
                    m[i] = beta1 * m[i] + rest1 * slope
                    v[i] = beta2 * v[i] + rest2 * (slope * slope)
                    here = state(widen(x[i]))
                    u = m[i] * unbias1 / (math.sqrt(v[i] * unbias2) + eps) + decay * here
                    part_x += here * here
                    part_u += u * u
                sums[c, 0] += np.float64(part_x)
                sums[c, 1] += np.float64(part_u)

    return kernel


def apply_kernel(grad: Any, weight: Any, state: Any, param: Any) -> Callable[[Any], None]:
    """Moves the weights, and the parameters that are their roundings."""
    source, types, rounded = SOURCE, (grad, weight, state, param), param is not weight
    exact = wide(weight)

    def kernel(data: Any) -> None:
        args, table, sums, factors, options = arguments(data, COEFFICIENTS, OPTIONS + 0 * source)
        eps = state(options[2])
        while True:
            c, tensor, start, stop = chunk_of(args, table, sums, factors, False)
            if c < 0:
                return
            unbias2, by_m = state(factors[1, tensor]), state(factors[2, tensor])
            keep = exact(factors[3, tensor])
            for first in range(start, stop, BLOCK):
                size = min(BLOCK, stop - first)
                row = table[tensor]
                _g, x, p = arrays_at(args, row, first, size, types)
                m = state_at(row, 0, first, size, types)
                v = state_at(row, 1, first, size, types)
                for i in range(size):
                    step = by_m * m[i] / (math.sqrt(v[i] * unbias2) + eps)
                    x[i] = narrow(keep * exact(widen(x[i])) - step, x[i])
                if rounded:
                    round_masters(x, p, size)

    return kernel


update_moments, apply = Pass(moments_kernel, rows=2), Pass(apply_kernel)
PASSES = (grad_sq_norms, update_moments, apply)
