"""LANS and LAMB as compiled loops: the passes of :mod:`steadygrad.optim.layerwise_rule`."""

import math
from inspect import getsource
from typing import Any

from numba import njit
from numba.extending import register_jitable

from steadygrad.optim.layerwise_rule import Coefficients, Factors, Options, lengths, trust_ratio
from steadygrad.optim.loops.numbers import (
    BARRIER,
    BLOCK,
    TURNS,
    arguments,
    arrays_at,
    block_of,
    call,
    chunk_of,
    narrow,
    round_masters,
    source_of,
    state_at,
    sync_masters,
    take_turn,
    types_of,
    unscaled,
    widen,
)

RULE = getsource(lengths), getsource(trust_ratio)
SOURCE = source_of(Options._fields, Factors._fields, Coefficients._fields, RULE)
FACTORS, COEFFICIENTS, OPTIONS = map(len, (Factors._fields, Coefficients._fields, Options._fields))
# The rule's own function, without leave to round otherwise than it says.
register_jitable(trust_ratio)
lengths_of = njit(error_model="numpy")(lengths)


@block_of
def move_moments(
    args: Any, row: Any, first: Any, size: Any, by: Any, given: Any, types: Any
) -> Any:
    """Moves the moments; squared norms of weights and directions, of which LANS has two."""
    state, inverse_scale, has_two = types[2], types[4](given[-1]), types[6]
    g, x, p = arrays_at(args, row, first, size, types)
    m, v = state_at(row, 0, first, size, types), state_at(row, 1, first, size, types)
    beta1, rest1 = state(given[0]), state(1 - given[0])
    beta2, rest2 = state(given[1]), state(1 - given[1])
    eps, decay, bound = state(given[2]), state(given[3]), state(given[4])
    scale, unbias1, unbias2 = state(by[1]), state(by[2]), state(by[3])
    part_x, part_m, part_g = state(0), state(0), state(0)
    sync_masters(x, p, size)
    for i in range(size):
        slope = state(unscaled(widen(g[i]), inverse_scale)) * scale
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
    return part_x, part_m, part_g


@block_of
def move_weights(
    args: Any, row: Any, first: Any, size: Any, by: Any, given: Any, types: Any
) -> Any:
    """Moves the weights, and the parameters that are their roundings."""
    state, exact, inverse_scale, has_two = types[2], types[5], types[4](given[-1]), types[6]
    g, x, p = arrays_at(args, row, first, size, types)
    m, v = state_at(row, 0, first, size, types), state_at(row, 1, first, size, types)
    eps, bound = state(given[2]), state(given[4])
    scale, unbias2, along_m, along_g = state(by[1]), state(by[2]), state(by[3]), state(by[4])
    keep = exact(by[5])
    for i in range(size):
        step = along_m * m[i]
        if has_two:
            slope = state(unscaled(widen(g[i]), inverse_scale)) * scale
            step = along_g * min(max(slope, -bound), bound) + step
        moved = keep * exact(widen(x[i])) - step / (math.sqrt(v[i] * unbias2) + eps)
        x[i] = narrow(moved, x[i])
    round_masters(x, p, size)
    return (state(0),)


def moments_kernel(grad: Any, weight: Any, state: Any, param: Any, has_two: bool) -> Any:
    """The loop that moves the moments."""
    source, types = SOURCE, (*types_of(grad, weight, state, param), has_two)

    def kernel(data: Any) -> None:
        take_turn(move_moments, data, 0, (FACTORS, OPTIONS + 0 * source), types, False)

    return kernel


def weights_kernel(grad: Any, weight: Any, state: Any, param: Any, has_two: bool) -> Any:
    """The loop that moves the weights."""
    source, types = SOURCE, (*types_of(grad, weight, state, param), has_two)

    def kernel(data: Any) -> None:
        take_turn(move_weights, data, 0, (COEFFICIENTS, OPTIONS + 0 * source), types, False)

    return kernel


def waves_kernel(grad: Any, weight: Any, state: Any, param: Any, has_two: bool) -> Any:
    """Moves the moments and the weights of a few tensors, then of the next.

    What the first pass over a wave has read is still in the caches in the second.
    """
    source, types = SOURCE, (*types_of(grad, weight, state, param), has_two)

    def kernel(data: Any) -> None:
        counts = (FACTORS, OPTIONS + 0 * source)
        args, table, sums, factors, given = arguments(data, counts[0], counts[1])
        exact = types[5]
        for turn in range(0, args[TURNS], 2):
            take_turn(move_moments, data, turn, counts, types, False)
            if args[BARRIER] != 0:
                call(args[BARRIER])
            while True:
                place, chunk = chunk_of(args, turn + 1, table, factors, False)
                if place < 0:
                    break
                x, m, g = 0.0, 0.0, 0.0
                for k in range(chunk[3], chunk[4]):
                    x, m, g = x + sums[k, 0], m + sums[k, 1], g + sums[k, 2]
                by = factors[:, chunk[0]]
                along_m, along_g, keep = lengths_of(
                    exact(x),
                    exact(m),
                    exact(g) if has_two else None,
                    True,
                    exact(given[5]),
                    exact(given[0]),
                    exact(1 - given[0]),
                    exact(given[3]),
                    exact(given[6]),
                    exact(given[7]),
                    given[8] != 0.0,
                )
                found = (1.0, by[1], by[3], along_m * by[2], float(along_g), float(keep))
                row, stop = table[chunk[0]], chunk[1] + chunk[2]
                for first in range(chunk[1], stop, BLOCK):
                    size = min(BLOCK, stop - first)
                    move_weights(args, row, first, size, found, given, types)

    return kernel
