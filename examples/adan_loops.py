"""Adan's pass as a compiled loop for CPUs; it needs numba, and is loaded when a step needs it."""

import math
from typing import Any

from steadygrad.optim.loops.codes import product
from steadygrad.optim.loops.numbers import (
    Kinds,
    arrays_at,
    block_of,
    narrow,
    round_masters,
    state_at,
    sync_masters,
    take_turn,
    widen,
)


@block_of
def move(args: Any, row: Any, first: Any, size: Any, by: Any, given: Any, types: Any) -> Any:
    """Moves all averages and the weights of some elements.

    Args:
        args: The loop's arguments, for ``arrays_at``.
        row: Addresses of the tensor's gradient, weight and states.
        first: The first element.
        size: Number of elements.
        by: The tensor's factors, in their order.
        given: The options, and one over the loss scale as the last.
        types: See ``Kinds``.
    """
    state, exact, inverse_scale = types.state, types.exact, types.number(given[-1])
    g, x, p = arrays_at(args, row, first, size, types)
    m, v = state_at(row, 0, first, size, types), state_at(row, 1, first, size, types)
    n, previous = state_at(row, 2, first, size, types), state_at(row, 3, first, size, types)
    beta1, beta2, beta3 = state(given[0]), state(given[1]), state(given[2])
    rest1, rest2, rest3 = state(1 - given[0]), state(1 - given[1]), state(1 - given[2])
    eps, sign, follows = state(given[3]), state(by[1]), state(by[2])
    along_m, along_n, unbias3, keep = state(by[3]), state(by[4]), state(by[5]), exact(by[6])
    sync_masters(x, p, size)
    for i in range(size):
        slope = state(product(widen(g[i]), inverse_scale)) * sign
        change = (slope - previous[i]) * follows
        previous[i] = slope
        m[i] = beta1 * m[i] + rest1 * slope
        n[i] = beta2 * n[i] + rest2 * change
        ahead = slope + beta2 * change
        v[i] = beta3 * v[i] + rest3 * (ahead * ahead)
        step = along_m * m[i] + along_n * n[i]
        step /= math.sqrt(v[i] * unbias3) + eps
        x[i] = narrow(keep * exact(widen(x[i])) - step, x[i])
    round_masters(x, p, size)
    return (state(0),)


def move_kernel(types: Kinds) -> Any:
    """The loop for some types, which say as well when those functions have changed."""

    def kernel(data: Any) -> None:
        take_turn(move, data, types, False)

    return kernel
