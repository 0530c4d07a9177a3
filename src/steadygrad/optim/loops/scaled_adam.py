"""ScaledAdam as compiled loops: the passes of :mod:`steadygrad.optim.scaled_adam_rule`."""

import math
from typing import Any

from steadygrad.optim.loops.numbers import (
    arrays_at,
    block_of,
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
from steadygrad.optim.scaled_adam_rule import StepScales, UpdateOptions

SOURCE = source_of(StepScales._fields, UpdateOptions._fields)
FACTORS, OPTIONS = len(StepScales._fields), len(UpdateOptions._fields)


@block_of
def sums(args: Any, row: Any, first: Any, size: Any, by: Any, given: Any, types: Any) -> Any:
    """Squared norms of gradients; where asked for, products with weights and their norms too."""
    exact, inverse_scale = types[5], types[4](given[-1])
    g, p, out = arrays_at(args, row, first, size, types)
    part_g, part_pg, part_p = exact(0), exact(0), exact(0)
    # The same loop whether products follow or not: two may add up in two orders, and a step after
    # a resume, which takes products, would be another.
    for i in range(size):
        slope = exact(widen(g[i]) * inverse_scale)
        part_g += slope * slope
    if by[0] != 0.0:
        sync_masters(p, out, size)
        for i in range(size):
            here = exact(widen(p[i]))
            part_pg += exact(unscaled(widen(g[i]), inverse_scale)) * here
            part_p += here * here
    return part_g, part_pg, part_p


@block_of
def update(args: Any, row: Any, first: Any, size: Any, by: Any, given: Any, types: Any) -> Any:
    """Moves ``v``, ``delta`` and weights; products of gradients with the weights as they were."""
    state, exact, inverse_scale = types[2], types[5], types[4](given[-1])
    g, p, out = arrays_at(args, row, first, size, types)
    v, delta = state_at(row, 0, first, size, types), state_at(row, 1, first, size, types)
    beta1, beta2 = state(given[0]), state(given[1])
    rest1, rest2 = state(1 - given[0]), state(1 - given[1])
    eps, before, after = state(given[2]), exact(given[3]), exact(given[4])
    clip, unbias, by_g, by_p = state(by[1]), state(by[2]), state(by[3]), state(by[4])
    part = exact(0)
    sync_masters(p, out, size)
    for i in range(size):
        here = exact(widen(p[i]))
        gradient = unscaled(widen(g[i]), inverse_scale)
        part += exact(gradient) * here
        slope = state(gradient) * clip
        v[i] = beta2 * v[i] + rest2 * (slope * slope)
        move = by_g * slope / (math.sqrt(v[i] * unbias) + eps)
        # A weight that is not finite must not reach `delta` by way of zero.
        move += by_p * (state(here) if by_p != 0.0 else state(0))
        delta[i] = beta1 * delta[i] + rest1 * move
        moved = min(max(here, -before), before) + exact(delta[i])
        p[i] = narrow(min(max(moved, -after), after), p[i])
    round_masters(p, out, size)
    return (part,)


def sums_kernel(*types: Any) -> Any:
    """The loop of the sums."""
    types, source = types_of(*types), SOURCE

    def kernel(data: Any) -> None:
        take_turn(sums, data, 0, (1, 0 * source), types, True)

    return kernel


def update_kernel(*types: Any) -> Any:
    """The loop of the update."""
    types, source = types_of(*types), SOURCE

    def kernel(data: Any) -> None:
        take_turn(update, data, 0, (FACTORS, OPTIONS + 0 * source), types, False)

    return kernel
