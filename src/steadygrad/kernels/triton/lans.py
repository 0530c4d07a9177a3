"""LANS for accelerators: its first two passes; the last one is in ``triton_lans_apply``.

One program works on one chunk. What a pass needs to know of a whole tensor, its programs add up
from the partial sums of the pass before, each for itself.
"""

from typing import Any

import triton
import triton.language as tl

from steadygrad.kernels.device_tables import Group, Row
from steadygrad.kernels.triton_memory import follow, normalized, read, read_gradient, widened, write
from steadygrad.kernels.triton_parts import (
    ACTIVE,
    FACTORS,
    ROW,
    addresses,
    chunk_at,
    first_chunk,
    group_of,
    is_finite,
    number,
    partial_sum,
)

__all__ = ["lans_directions", "square_sums"]

GRAD, STEP = tl.constexpr(int(Row.GRAD)), tl.constexpr(int(Row.STEP))
BETA1, BETA2 = tl.constexpr(int(Group.BETA1)), tl.constexpr(int(Group.BETA2))
LOG_BETA1, LOG_BETA2 = tl.constexpr(int(Group.LOG_BETA1)), tl.constexpr(int(Group.LOG_BETA2))
EPS, SIGN = tl.constexpr(int(Group.EPS)), tl.constexpr(int(Group.SIGN))
DECAY, CLIP = tl.constexpr(int(Group.DECAY)), tl.constexpr(int(Group.CLIP))


@triton.jit(do_not_specialize=["start", "slots", "tensors"])
def square_sums(
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
    """Squared norms of gradients, into column 0 of sums. Raises a flag where one is not finite."""
    row, active, first, length, slot = first_chunk(head, rows, chunks, flags, start)
    if active != 0:
        at, lanes = tl.load(row + GRAD), tl.arange(0, block)
        total = tl.zeros((block,), state)
        full = length // block * block
        for begin in range(0, full, block):
            g = read_gradient(active, at, first, begin + lanes, length, grad, aligned, False)
            total += g.to(state) * g.to(state)
        if full < length:
            g = read_gradient(active, at, first, full + lanes, length, grad, aligned, True)
            total += g.to(state) * g.to(state)
        found = tl.sum(total)
        tl.store(sums + slot, found.to(tl.float64))
        if is_finite(found) == 0:
            tl.store(flags, 1)


@triton.jit
def _move_moments(
    places: tl.tensor,
    numbers: tl.tensor,
    active: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    length: tl.tensor,
    types: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """Moves a block of the moments; squares of the weight and of both directions."""
    grad: tl.constexpr = types[0]
    weight: tl.constexpr = types[1]
    state: tl.constexpr = types[2]
    param: tl.constexpr = types[3]
    at_g, at_x, at_m, at_v, at_p = places
    inverse, bound, eps, beta1, rest1, unbias1, beta2, rest2, unbias2, decay = numbers
    scaled = normalized(at_g, active, inverse, bound, first, offsets, length, grad, aligned, masked)
    m = read(at_m, first, offsets, length, state, aligned, masked)
    v = read(at_v, first, offsets, length, state, aligned, masked)
    m = beta1 * m + rest1 * scaled
    v = beta2 * v + rest2 * (scaled * scaled)
    write(at_m, first, offsets, length, m, state, aligned, masked)
    write(at_v, first, offsets, length, v, state, aligned, masked)
    x = widened(read(at_x, first, offsets, length, weight, aligned, masked), weight)
    if param != weight:
        x = follow(x, at_x, at_p, first, offsets, length, param, aligned, masked)
    x = x.to(state)
    d = tl.sqrt(v * unbias2) + eps
    u_m = m * unbias1 / d + decay * x
    u_g = scaled / d + decay * x
    return x * x, u_m * u_m, u_g * u_g


@triton.jit
def _normalizers(
    group: tl.tensor,
    row: tl.tensor,
    own: tl.tensor,
    square: tl.tensor,
    first: tl.tensor,
) -> Any:
    """A tensor's inverse norm and one over each correction, which are kept for the next pass."""
    known = square > 0
    inverse = tl.where(known, number(group + SIGN) / tl.sqrt(tl.where(known, square, 1.0)), 0.0)
    step = tl.load(tl.load(row + STEP).to(tl.pointer_type(tl.float32))).to(tl.float64) + 1
    unbias1 = 1 / (1 - tl.exp(step * number(group + LOG_BETA1)))
    unbias2 = 1 / (1 - tl.exp(step * number(group + LOG_BETA2)))
    if first == 0:
        # What every program of the next pass would otherwise work out again.
        tl.store(own, inverse)
        tl.store(own + 1, unbias1)
        tl.store(own + 2, unbias2)
        tl.store(own + 3, step)
    return inverse, unbias1, unbias2


@triton.jit(do_not_specialize=["start", "slots", "tensors"])
def lans_directions(
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
    """Moves the moments; squared norms into columns 1 to 3 of sums. Masters follow."""
    place = start + tl.program_id(0)
    bad = tl.load(flags)
    if place == 0:
        tl.store(flags + 1, bad)
    tensor, first, length, slot = chunk_at(chunks, place)
    row = rows + tensor * ROW
    active = tl.where(bad == 0, tl.load(row + ACTIVE), 0)
    if active != 0:
        group = group_of(groups, row)
        square = partial_sum(sums, slots, ready, tensors, tensor, row, 0, whole)
        own = factors + tensor * FACTORS
        inverse, unbias1, unbias2 = _normalizers(group, row, own, square, first)
        beta1, beta2 = number(group + BETA1), number(group + BETA2)
        types: tl.constexpr = (grad, weight, state, param)
        places = addresses(row)
        numbers = (
            inverse.to(state),
            number(group + CLIP).to(state),
            number(group + EPS).to(state),
            beta1.to(state),
            (1 - beta1).to(state),
            unbias1.to(state),
            beta2.to(state),
            (1 - beta2).to(state),
            unbias2.to(state),
            number(group + DECAY).to(state),
        )
        lanes = tl.arange(0, block)
        total_x = tl.zeros((block,), state)
        total_m = tl.zeros((block,), state)
        total_g = tl.zeros((block,), state)
        full = length // block * block
        for begin in range(0, full, block):
            at = begin + lanes
            x, u_m, u_g = _move_moments(
                places, numbers, active, first, at, length, types, aligned, False
            )
            total_x += x
            total_m += u_m
            total_g += u_g
        if full < length:
            at = full + lanes
            x, u_m, u_g = _move_moments(
                places, numbers, active, first, at, length, types, aligned, True
            )
            total_x += x
            total_m += u_m
            total_g += u_g
        own = sums + slot
        width = slots.to(tl.int64)
        tl.store(own + width, tl.sum(total_x).to(tl.float64))
        tl.store(own + 2 * width, tl.sum(total_m).to(tl.float64))
        tl.store(own + 3 * width, tl.sum(total_g).to(tl.float64))
