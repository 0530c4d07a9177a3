"""ScaledAdam for accelerators: both large passes of :mod:`steadygrad.formulas.scaled_adam`.

One program works on one chunk. What lies between the passes is in ``triton_sizes``.
"""

from typing import Any

import triton
import triton.language as tl

from steadygrad.kernels.device_tables import Group
from steadygrad.kernels.triton_memory import follow, read, read_gradient, widened, write
from steadygrad.kernels.triton_parts import (
    FACTORS,
    SLOTS,
    addresses,
    first_chunk,
    group_of,
    is_finite,
    last_chunk,
    number,
)

__all__ = ["scaled_adam_sums", "scaled_adam_update"]

BETA1, BETA2 = tl.constexpr(int(Group.BETA1)), tl.constexpr(int(Group.BETA2))
EPS = tl.constexpr(int(Group.EPS))


@triton.jit
def _products(
    places: tl.tensor,
    active: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    length: tl.tensor,
    types: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """A block's squares of gradients, products with weights, and squares of these."""
    grad: tl.constexpr = types[0]
    weight: tl.constexpr = types[1]
    param: tl.constexpr = types[3]
    wide: tl.constexpr = types[4]
    at_g, at_p, _at_v, _at_d, at_out = places
    g = read_gradient(active, at_g, first, offsets, length, grad, aligned, masked).to(wide)
    p = widened(read(at_p, first, offsets, length, weight, aligned, masked), weight)
    if param != weight:
        p = follow(p, at_p, at_out, first, offsets, length, param, aligned, masked)
    p = p.to(wide)
    return g * g, g * p, p * p


@triton.jit(do_not_specialize=["start", "slots", "tensors"])
def scaled_adam_sums(
    head: tl.tensor,
    groups: tl.tensor,
    rows: tl.tensor,
    chunks: tl.tensor,
    sums: tl.tensor,
    ready: tl.tensor,
    factors: tl.tensor,
    flags: tl.tensor,
    start: tl.tensor,
    slots: tl.tensor,
    tensors: tl.tensor,
    grad: tl.constexpr,
    weight: tl.constexpr,
    state: tl.constexpr,
    param: tl.constexpr,
    whole: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    """Squared norms of gradients, inner products with weights, squared norms of weights.

    Into columns 0 to 2 of sums. Raises a flag where a gradient is not finite, or where the square
    of a tensor's inner product may not be.
    """
    row, active, first, length, slot = first_chunk(head, rows, chunks, flags, start)
    if active != 0:
        wide: tl.constexpr = tl.float64 if weight == tl.float64 else tl.float32
        types: tl.constexpr = (grad, weight, state, param, wide)
        places, lanes = addresses(row), tl.arange(0, block)
        total_g = tl.zeros((block,), wide)
        total_pg = tl.zeros((block,), wide)
        total_p = tl.zeros((block,), wide)
        full = length // block * block
        for begin in range(0, full, block):
            at = begin + lanes
            g, pg, p = _products(places, active, first, at, length, types, aligned, False)
            total_g += g
            total_pg += pg
            total_p += p
        if full < length:
            at = full + lanes
            g, pg, p = _products(places, active, first, at, length, types, aligned, True)
            total_g += g
            total_pg += pg
            total_p += p
        found, inner = tl.sum(total_g), tl.sum(total_pg)
        own, width = sums + slot, slots.to(tl.int64)
        tl.store(own, found.to(tl.float64))
        tl.store(own + width, inner.to(tl.float64))
        tl.store(own + 2 * width, tl.sum(total_p).to(tl.float64))
        # No sum of a tensor's chunks is larger than as many times the largest.
        most = inner.to(state) * tl.load(row + SLOTS).to(state)
        if is_finite(found) & is_finite(most * most) == 0:
            tl.store(flags, 1)


@triton.jit
def _move(
    places: tl.tensor,
    numbers: tl.tensor,
    active: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    length: tl.tensor,
    types: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Moves a block of ``v``, ``delta`` and weights, and parameters that are their roundings."""
    grad: tl.constexpr = types[0]
    weight: tl.constexpr = types[1]
    state: tl.constexpr = types[2]
    param: tl.constexpr = types[3]
    wide: tl.constexpr = types[4]
    at_g, at_p, at_v, at_d, at_out = places
    beta1, rest1, beta2, rest2, eps, scale, unbias, by_g, by_p, before, after = numbers
    g = read_gradient(active, at_g, first, offsets, length, grad, aligned, masked)
    slope = g.to(state) * scale
    v = beta2 * read(at_v, first, offsets, length, state, aligned, masked) + rest2 * (slope * slope)
    write(at_v, first, offsets, length, v, state, aligned, masked)
    p = widened(read(at_p, first, offsets, length, weight, aligned, masked), weight).to(wide)
    move = by_g * slope / (tl.sqrt(v * unbias) + eps) + by_p * p.to(state)
    delta = beta1 * read(at_d, first, offsets, length, state, aligned, masked) + rest1 * move
    write(at_d, first, offsets, length, delta, state, aligned, masked)
    moved = tl.minimum(tl.maximum(p, -before), before) + delta.to(wide)
    moved = tl.minimum(tl.maximum(moved, -after), after)
    write(at_p, first, offsets, length, moved, weight, aligned, masked)
    if param != weight:
        write(at_out, first, offsets, length, moved, param, aligned, masked)


@triton.jit(do_not_specialize=["start", "slots", "tensors"])
def scaled_adam_update(
    head: tl.tensor,
    groups: tl.tensor,
    rows: tl.tensor,
    chunks: tl.tensor,
    sums: tl.tensor,
    ready: tl.tensor,
    factors: tl.tensor,
    flags: tl.tensor,
    start: tl.tensor,
    slots: tl.tensor,
    tensors: tl.tensor,
    grad: tl.constexpr,
    weight: tl.constexpr,
    state: tl.constexpr,
    param: tl.constexpr,
    whole: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    """Moves ``v``, ``delta`` and weights, by the factors that ``triton_sizes`` has left."""
    tensor, row, active, first, length = last_chunk(head, groups, rows, chunks, flags, start)
    if active != 0:
        wide: tl.constexpr = tl.float64 if weight == tl.float64 else tl.float32
        types: tl.constexpr = (grad, weight, state, param, wide)
        group, own = group_of(groups, row), factors + tensor * FACTORS
        beta1, beta2 = number(group + BETA1), number(group + BETA2)
        numbers = (
            beta1.to(state),
            (1 - beta1).to(state),
            beta2.to(state),
            (1 - beta2).to(state),
            number(group + EPS).to(state),
            tl.load(own).to(state),
            tl.load(own + 1).to(state),
            tl.load(own + 2).to(state),
            tl.load(own + 3).to(state),
            tl.load(own + 4).to(wide),
            tl.load(own + 5).to(wide),
        )
        places, lanes, full = addresses(row), tl.arange(0, block), length // block * block
        for begin in range(0, full, block):
            at = begin + lanes
            _move(places, numbers, active, first, at, length, types, aligned, False)
        if full < length:
            at = full + lanes
            _move(places, numbers, active, first, at, length, types, aligned, True)
