"""LANS and LAMB as compiled loops: the passes of :mod:`steadygrad.optim.layerwise_rule`."""

import math
from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

from steadygrad.optim.layerwise_rule import lengths, trust_ratio
from steadygrad.optim.loops import codes, numbers
from steadygrad.optim.loops.codes import averaged, bits_of, first_number, product, second_number
from steadygrad.optim.loops.numbers import Kinds, block_of, narrow, widen

# The rule's own function, without leave to round otherwise than it says.
register_jitable(trust_ratio)
lengths_of = njit(error_model="numpy")(lengths)


@block_of
def constants_of(by: Any, given: Any, types: Any) -> Any:
    """Numbers that moments move by, in the type of states: betas, the rest of one, bounds."""
    state = types.state
    betas = state(given[0]), state(1 - given[0]), state(given[1]), state(1 - given[1])
    scales = types.number(given[-1]), state(by[1])
    return *betas, *scales, state(given[4]), state(codes.least_ratio_of(given[0], given[1]))


@block_of
def moved_moments(g: Any, m: Any, v: Any, scales: Any, constants: Any, types: Any) -> Any:
    """An element's scaled gradient, moments with it, and second moment to go by."""
    beta1, rest1, beta2, rest2, inverse_scale, scale, bound, least = constants
    slope = product(types.state(product(widen(g), inverse_scale)), scale)
    if types.has_two:
        slope = min(max(slope, -bound), bound)
    first = averaged(first_number(scales[0], m), slope, beta1, rest1)
    second = averaged(second_number(scales[1], v), product(slope, slope), beta2, rest2)
    return slope, first, second, codes.used(second, first * first * least, scales[1], m)


@block_of
def directions(args: Any, row: Any, first: Any, size: Any, by: Any, given: Any, types: Any) -> Any:
    """Squared norms of weights and of directions, of which LANS has two; nothing moves."""
    state, constants = types.state, constants_of(by, given, types)
    eps, decay, unbias1, unbias2 = state(given[2]), state(given[3]), state(by[2]), state(by[3])
    part_x, part_m, part_g = state(0), state(0), state(0)
    for start, n, place in codes.blocks_of(row[numbers.ROW], first, size):
        g, x, p = numbers.arrays_at(args, row, start, n, types)
        q, w, scales = codes.states_at(row, start, n, place, types)
        numbers.sync_masters(x, p, n)
        for i in range(n):
            slope, m, _, v = moved_moments(g[i], q[i], w[i], scales, constants, types)
            here, over = state(widen(x[i])), state(1) / (math.sqrt(v * unbias2) + eps)
            u_m = m * unbias1 * over + decay * here
            if types.has_two:
                u_g = slope * over + decay * here
                part_g += u_g * u_g
            part_x += here * here
            part_m += u_m * u_m
    return part_x, part_m, part_g


@block_of
def move(args: Any, row: Any, first: Any, size: Any, by: Any, given: Any, types: Any) -> Any:
    """Moves the moments, and by them the weights and the parameters that are their roundings."""
    state, exact, constants = types.state, types.exact, constants_of(by, given, types)
    eps, unbias2, along_m, along_g = state(given[2]), state(by[2]), state(by[3]), state(by[4])
    keep, new, moved = exact(by[5]), (codes.room(state), codes.room(state)), codes.room(exact)
    for start, n, place in codes.blocks_of(row[numbers.ROW], first, size):
        g, x, p = numbers.arrays_at(args, row, start, n, types)
        q, w, scales = codes.states_at(row, start, n, place, types)
        top_m, top_v = np.uint32(0), np.uint32(0)
        for i in range(n):
            slope, m, v, enough = moved_moments(g[i], q[i], w[i], scales, constants, types)
            codes.put(m, i, new[0], q)
            codes.put(v, i, new[1], w)
            top_m, top_v = max(top_m, bits_of(abs(m), q[i])), max(top_v, bits_of(v, q[i]))
            step = along_m * m
            if types.has_two:
                step = along_g * slope + step
            moved[i] = keep * exact(widen(x[i])) - step / (math.sqrt(enough * unbias2) + eps)
        for i in range(n):
            x[i] = narrow(moved[i], x[i])
        numbers.round_masters(x, p, n)
        codes.write(row, start, place, by, (top_m, top_v), new, q, w)
    return (state(0),)


def moments_kernel(types: Kinds) -> Any:
    """The loop that looks where the moments will be."""
    return lambda data: numbers.take_turn(directions, data, types, False)


def weights_kernel(types: Kinds) -> Any:
    """The loop that moves moments and weights."""
    return lambda data: numbers.take_turn(move, data, types, False)


def waves_kernel(types: Kinds) -> Any:
    """Both, over a few tensors and then over the next.

    What the first pass over a wave has read is still in the caches in the second.
    """

    def kernel(data: Any) -> None:
        args, chunks, table, sums, factors, given = numbers.arguments(data)
        turns = numbers.array_at(args[numbers.TURNS], (args[numbers.COUNT], 4), np.int64)
        exact = types.exact
        while True:
            place = numbers.fetch_next(args[numbers.COUNTER])
            if place >= args[numbers.COUNT]:
                return
            start, stop, first, last = turns[place]
            for way in range(first, last):
                for here in range(start, stop):
                    chunk = chunks[here]
                    row, by = table[chunk[0]], factors[:, chunk[0]]
                    if by[0] == 0.0:
                        continue
                    if way == numbers.LOOK:
                        numbers.go_over(directions, args, row, chunk, by, given, types, sums[here])
                        numbers.fetch_next(args[numbers.DONE] + 8 * chunk[0])
                        continue
                    # Other threads may still work on the tensor's last chunks.
                    while numbers.look_at(args[numbers.DONE] + 8 * chunk[0]) < chunk[4] - chunk[3]:
                        numbers.call(args[numbers.YIELD])
                    x, m, g = 0.0, 0.0, 0.0
                    for k in range(chunk[3], chunk[4]):
                        x, m, g = x + sums[k, 0], m + sums[k, 1], g + sums[k, 2]
                    bounds = exact(given[6]), exact(given[7]), given[8] != 0.0
                    constants = exact(given[0]), exact(1 - given[0]), exact(given[3]), *bounds
                    norms = exact(x), exact(m), exact(g) if types.has_two else None
                    along_m, along_g, keep = lengths_of(*norms, True, exact(given[5]), constants)
                    lengths = along_m * by[2], float(along_g), float(keep)
                    found = (1.0, by[1], by[3], *lengths, by[-2], by[-1])
                    numbers.go_over(move, args, row, chunk, found, given, types, sums[here])

    return kernel
