"""LANS for accelerators: the last pass, which moves the weights."""

from typing import Any

import triton
import triton.language as tl

from steadygrad.kernels.device_tables import Group, Row
from steadygrad.kernels.triton_memory import normalized, put, read, widened, write
from steadygrad.kernels.triton_parts import (
    FACTORS,
    addresses,
    group_of,
    last_chunk,
    number,
    partial_sum,
    rate,
)

__all__ = ["lans_apply"]

STEP, BETA1 = tl.constexpr(int(Row.STEP)), tl.constexpr(int(Group.BETA1))
EPS, DECAY = tl.constexpr(int(Group.EPS)), tl.constexpr(int(Group.DECAY))
CLIP = tl.constexpr(int(Group.CLIP))
LOW, HIGH = tl.constexpr(int(Group.LOW)), tl.constexpr(int(Group.HIGH))


@triton.jit
def _ratio(x: tl.tensor, u: tl.tensor) -> Any:
    """Weight norm over the direction's norm, 1 where either is zero."""
    known = (x > 0) & (u > 0)
    return tl.where(known, x / tl.where(known, u, 1.0), 1.0)


@triton.jit
def _coefficients(
    group: tl.tensor, square_x: tl.tensor, square_m: tl.tensor, square_g: tl.tensor
) -> Any:
    """Learning rate times trust ratio of both directions."""
    x = tl.minimum(tl.maximum(tl.sqrt(square_x), number(group + LOW)), number(group + HIGH))
    lr, beta1 = rate(group), number(group + BETA1)
    by_m = lr * beta1 * _ratio(x, tl.sqrt(square_m))
    by_g = lr * (1 - beta1) * _ratio(x, tl.sqrt(square_g))
    return by_m, by_g


@triton.jit
def _move_weights(
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
    """Moves a block of the weights, and of the parameters that are their roundings."""
    grad: tl.constexpr = types[0]
    weight: tl.constexpr = types[1]
    state: tl.constexpr = types[2]
    param: tl.constexpr = types[3]
    at_g, at_x, at_m, at_v, at_p = places
    inverse, bound, eps, unbias2, by_m, by_g, keep = numbers
    scaled = normalized(at_g, active, inverse, bound, first, offsets, length, grad, aligned, masked)
    m = read(at_m, first, offsets, length, state, aligned, masked)
    v = read(at_v, first, offsets, length, state, aligned, masked)
    x = widened(read(at_x, first, offsets, length, weight, aligned, masked), weight)
    d = tl.sqrt(v * unbias2) + eps
    moved = keep * x.to(state) - (by_g * scaled + by_m * m) / d
    write(at_x, first, offsets, length, moved, weight, aligned, masked)
    if param != weight:
        write(at_p, first, offsets, length, moved, param, aligned, masked)


@triton.jit(do_not_specialize=["start", "slots", "tensors"])
def lans_apply(
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
    """Moves the weights and the step counts."""
    tensor, row, active, first, length = last_chunk(head, groups, rows, chunks, flags, start)
    if active != 0:
        group = group_of(groups, row)
        by_m, by_g = _coefficients(
            group,
            partial_sum(sums, slots, ready, tensors, tensor, row, 1, whole),
            partial_sum(sums, slots, ready, tensors, tensor, row, 2, whole),
            partial_sum(sums, slots, ready, tensors, tensor, row, 3, whole),
        )
        own = factors + tensor * FACTORS
        inverse, unbias1, unbias2 = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        if first == 0:
            put(tl.load(row + STEP), tl.load(own + 3), tl.float32)
        keep = 1 - number(group + DECAY) * (by_m + by_g)
        types: tl.constexpr = (grad, weight, state, param)
        places = addresses(row)
        numbers = (
            inverse.to(state),
            number(group + CLIP).to(state),
            number(group + EPS).to(state),
            unbias2.to(state),
            (by_m * unbias1).to(state),
            by_g.to(state),
            keep.to(state),
        )
        lanes, full = tl.arange(0, block), length // block * block
        for begin in range(0, full, block):
            at = begin + lanes
            _move_weights(places, numbers, active, first, at, length, types, aligned, False)
        if full < length:
            at = full + lanes
            _move_weights(places, numbers, active, first, at, length, types, aligned, True)
