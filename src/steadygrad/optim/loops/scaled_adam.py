"""ScaledAdam as compiled loops: the passes of :mod:`steadygrad.optim.scaled_adam_rule`."""

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
from steadygrad.optim.scaled_adam_rule import StepScales, UpdateOptions

SOURCE = source_of(StepScales._fields, UpdateOptions._fields)
FACTORS, OPTIONS = len(StepScales._fields), len(UpdateOptions._fields)


def sums_kernel(grad: Any, weight: Any, state: Any, param: Any) -> Callable[[Any], None]:
    """Squared norms of gradients; where asked for, products with weights and their norms too."""
    source, types, rounded = SOURCE, (grad, weight, state, param), param is not weight
    exact = wide(weight)
    number, largest = wide(grad), np.finfo(wide(grad)).max

    def kernel(data: Any) -> None:
        args, table, totals, needed, options = arguments(data, 1, 0 * source)
        inverse_scale = number(options[-1])
        while True:
            c, tensor, start, stop = chunk_of(args, table, totals, needed, True)
            if c < 0:
                return
            for first in range(start, stop, BLOCK):
                size = min(BLOCK, stop - first)
                g, p, out = arrays_at(args, table[tensor], first, size, types)
                part_g, part_pg, part_p = exact(0), exact(0), exact(0)
                # The same loop whether products follow or not: two may add up in two orders, and a
                # step after a resume, which takes products, would be another.
                for i in range(size):
                    slope = exact(widen(g[i]) * inverse_scale)
                    part_g += slope * slope
                if needed[0, tensor] != 0.0:
                    if rounded:
                        sync_masters(p, out, size)
                    for i in range(size):
                        here = exact(widen(p[i]))
                        part_pg += exact(unscaled(widen(g[i]), inverse_scale, largest)) * here
                        part_p += here * here
                totals[c, 0] += np.float64(part_g)
                totals[c, 1] += np.float64(part_pg)
                totals[c, 2] += np.float64(part_p)

    return kernel


def update_kernel(grad: Any, weight: Any, state: Any, param: Any) -> Callable[[Any], None]:
    """Moves ``v``, ``delta`` and weights; products of gradients with the weights as they were."""
    source, types, rounded = SOURCE, (grad, weight, state, param), param is not weight
    exact = wide(weight)
    number, largest = wide(grad), np.finfo(wide(grad)).max

    def kernel(data: Any) -> None:
        args, table, totals, factors, options = arguments(data, FACTORS, OPTIONS + 0 * source)
        beta1, beta2 = state(options[0]), state(options[1])
        rest1, rest2 = state(1 - options[0]), state(1 - options[1])
        eps, before, after = state(options[2]), exact(options[3]), exact(options[4])
        inverse_scale = number(options[-1])
        while True:
            c, tensor, start, stop = chunk_of(args, table, totals, factors, False)
            if c < 0:
                return
            clip, unbias = state(factors[1, tensor]), state(factors[2, tensor])
            by_g, by_p = state(factors[3, tensor]), state(factors[4, tensor])
            for first in range(start, stop, BLOCK):
                size = min(BLOCK, stop - first)
                row = table[tensor]
                g, p, out = arrays_at(args, row, first, size, types)
                v = state_at(row, 0, first, size, types)
                delta = state_at(row, 1, first, size, types)
                part = exact(0)
                if rounded:
                    sync_masters(p, out, size)
                for i in range(size):
                    here = exact(widen(p[i]))
                    gradient = unscaled(widen(g[i]), inverse_scale, largest)
                    part += exact(gradient) * here
                    slope = state(gradient) * clip
                    v[i] = beta2 * v[i] + rest2 * (slope * slope)
                    move = by_g * slope / (math.sqrt(v[i] * unbias) + eps)
                    # A weight that is not finite must not reach `delta` by way of zero.
                    move += by_p * (state(here) if by_p != 0.0 else state(0))
                    delta[i] = beta1 * delta[i] + rest1 * move
                    moved = min(max(here, -before), before) + exact(delta[i])
                    p[i] = narrow(min(max(moved, -after), after), p[i])
                totals[c, 0] += np.float64(part)
                if rounded:
                    round_masters(p, out, size)

    return kernel
