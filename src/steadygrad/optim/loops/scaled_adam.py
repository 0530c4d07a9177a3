"""ScaledAdam as compiled loops: the passes of :mod:`steadygrad.optim.scaled_adam_rule`."""

import math
from typing import Any

import numpy as np

from steadygrad.optim.loops import codes, numbers
from steadygrad.optim.loops.codes import averaged, bits_of, first_number, product, second_number
from steadygrad.optim.loops.numbers import Kinds, block_of, narrow, widen


@block_of
def sums(args: Any, row: Any, first: Any, size: Any, by: Any, given: Any, types: Any) -> Any:
    """Squared norms of gradients; where asked for, products with weights and their norms too."""
    exact, inverse_scale = types.total, types.number(given[-1])
    g, p, out = numbers.arrays_at(args, row, first, size, types)
    part_g, part_pg, part_p = exact(0), exact(0), exact(0)
    # The same loop whether products follow or not: two may add up in two orders, and a step after
    # a resume, which takes products, would be another.
    for i in range(size):
        slope = exact(widen(g[i]) * inverse_scale)
        part_g += slope * slope
    if len(by) > 0 and by[0] != 0.0:
        numbers.sync_masters(p, out, size)
        for i in range(size):
            here = exact(widen(p[i]))
            part_pg += exact(product(product(widen(g[i]), inverse_scale), widen(p[i])))
            part_p += here * here
    return part_g, part_pg, part_p


@block_of
def update(args: Any, row: Any, first: Any, size: Any, by: Any, given: Any, types: Any) -> Any:
    """Moves ``delta``, ``v`` and weights; products of gradients with the weights as they were."""
    state, exact, inverse_scale = types.state, types.exact, types.number(given[-1])
    beta1, beta2, rest2 = state(given[0]), state(given[1]), state(1 - given[1])
    before, after, root, rest1 = exact(given[3]), exact(given[4]), math.sqrt(by[2]), 1 - given[0]
    clip, eps, along_g = state(by[1]), state(given[2] / root), state(by[3] / root * rest1)
    along_p, total = product(state(by[4]), state(rest1)), 0.0
    new, moves = (codes.room(state), codes.room(state)), codes.room(state)
    weights, products = codes.room(exact), codes.room(exact)
    moves[:] = 0
    for start, n, place in codes.blocks_of(row[numbers.ROW], first, size):
        g, p, out = numbers.arrays_at(args, row, start, n, types)
        q, w, (by_m, by_v) = codes.states_at(row, start, n, place, types)
        part, wide, top_m, top_v = exact(0), np.float64(0), np.uint32(0), np.uint32(0)
        numbers.sync_masters(p, out, n)
        if before < math.inf:
            for i in range(n):
                p[i] = narrow(min(max(exact(widen(p[i])), -before), before), p[i])
        # A weight that is not finite must not reach `delta` by way of zero.
        if along_p != 0.0:
            for i in range(n):
                moves[i] = product(state(widen(p[i])), along_p)
        for i in range(n):
            here, gradient = exact(widen(p[i])), product(widen(g[i]), inverse_scale)
            if types.is_exact:
                products[i] = product(exact(gradient), here)
            else:
                part += exact(gradient) * here
            slope = product(state(gradient), clip)
            v = averaged(second_number(by_v, w[i]), product(slope, slope), beta2, rest2)
            old, enough = first_number(by_m, q[i]), codes.used(v, state(0), by_v, q[i])
            delta = moved(old, slope, enough, moves[i], beta1, eps, along_g)
            codes.put(delta, i, new[0], q)
            codes.put(v, i, new[1], w)
            weights[i] = here + exact(delta)
            top_m, top_v = max(top_m, bits_of(abs(delta), q[i])), max(top_v, bits_of(v, q[i]))
        # In a loop of its own: beside float64 the one above would take half as many at once.
        if types.is_exact:
            for i in range(n):
                wide += np.float64(products[i])
        total += wide + np.float64(part)
        for i in range(n):
            p[i] = narrow(min(max(weights[i], -after), after), p[i])
        numbers.round_masters(p, out, n)
        codes.write(row, start, place, by, (top_m, top_v), new, q, w)
    return (total,)


@codes.exactly
def moved(delta: Any, slope: Any, v: Any, size: Any, beta: Any, eps: Any, along_g: Any) -> Any:
    """The new step, rounded after each operation."""
    return delta * beta + (slope / (math.sqrt(v) + eps) * along_g + size)


def sums_kernel(types: Kinds) -> Any:
    """The loop of the sums, of squared norms alone where it is given no factor."""
    return lambda data: numbers.take_turn(sums, data, types, True)


def update_kernel(types: Kinds) -> Any:
    """The loop of the update."""
    return lambda data: numbers.take_turn(update, data, types, False)
