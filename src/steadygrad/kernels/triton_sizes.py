"""What ScaledAdam decides between its two passes: sizes, and the factors of the update.

Small work on a few numbers for each tensor, in float64. Without clipping tensors have nothing to do
with each other: one program for one of them. Clipping, in ``triton_clipping``, makes it one program
for a group.
"""

from typing import Any

import triton
import triton.language as tl

from steadygrad.formulas.scaled_adam import CORRECTED_BELOW, LARGEST_SIZE_STEP
from steadygrad.kernels.device_tables import Group, Head, Row
from steadygrad.kernels.triton_parts import (
    ACTIVE,
    FACTORS,
    ROW,
    group_of,
    number,
    partial_sum,
    rate,
)

__all__ = ["get_small", "learn", "learn_each", "unscale_of"]

GRAD_SCALE = tl.constexpr(int(Head.GRAD_SCALE))
STEP, SCALAR = tl.constexpr(int(Row.STEP)), tl.constexpr(int(Row.SCALAR))
NUMEL, DOUBLE = tl.constexpr(int(Row.NUMEL)), tl.constexpr(int(Row.DOUBLE))
RMS, MEAN_SQUARE = tl.constexpr(int(Row.RMS)), tl.constexpr(int(Row.MEAN_SQUARE))
RING = tl.constexpr(int(Row.RING))
LOG_BETA2, EPS = tl.constexpr(int(Group.LOG_BETA2)), tl.constexpr(int(Group.EPS))
SIGN, PERIOD = tl.constexpr(int(Group.SIGN)), tl.constexpr(int(Group.PERIOD))
SCALAR_SCALE, SCALAR_MAX = (
    tl.constexpr(int(Group.SCALAR_SCALE)),
    tl.constexpr(int(Group.SCALAR_MAX)),
)
MIN_RMS, MAX_RMS = tl.constexpr(int(Group.MIN_RMS)), tl.constexpr(int(Group.MAX_RMS))
ORIGINAL = tl.constexpr(int(Group.ORIGINAL))
LARGEST, CORRECTED = tl.constexpr(LARGEST_SIZE_STEP), tl.constexpr(CORRECTED_BELOW)


@triton.jit
def unscale_of(head: tl.tensor, group: tl.tensor) -> Any:
    """Factor on the gradients."""
    address, found = tl.load(head + GRAD_SCALE), number(group + SIGN)
    if address != 0:
        found = found / tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    return found


@triton.jit
def get_small(address: tl.tensor, double: tl.tensor, there: tl.tensor) -> Any:
    """Small states, which are of float32 or float64."""
    narrow = tl.load(address.to(tl.pointer_type(tl.float32)), mask=there & (double == 0), other=0.0)
    wide = tl.load(address.to(tl.pointer_type(tl.float64)), mask=there & (double != 0), other=0.0)
    return tl.where(double != 0, wide, narrow.to(tl.float64))


@triton.jit
def _put(address: tl.tensor, value: tl.tensor, double: tl.tensor, there: tl.tensor) -> None:
    narrow = address.to(tl.pointer_type(tl.float32))
    tl.store(narrow, value.to(tl.float32), mask=there & (double == 0))
    tl.store(address.to(tl.pointer_type(tl.float64)), value, mask=there & (double != 0))


@triton.jit
def _as_kept(x: tl.tensor, double: tl.tensor) -> Any:
    """A number as a state has it."""
    return tl.where(double != 0, x, x.to(tl.float32).to(tl.float64))


@triton.jit
def _ring(
    row: tl.tensor,
    double: tl.tensor,
    sized: tl.tensor,
    place: tl.tensor,
    own: tl.tensor,
    period: tl.tensor,
    width: tl.constexpr,
) -> Any:
    """Enters a size's gradient among the last ones; their sum and mean square."""
    lanes = tl.arange(0, width)
    item = tl.where(double != 0, 8, 4).to(tl.int64)
    at = tl.load(row + RING, mask=sized, other=0)
    spread = at[:, None] + lanes[None, :] * item[:, None]
    known = get_small(spread, double[:, None], sized[:, None] & (lanes[None, :] < period))
    ring = tl.where(lanes[None, :] == place[:, None], own[:, None], known)
    return at + place * item, tl.sum(ring, 1), tl.sum(ring * ring, 1) / period.to(tl.float64)


@triton.jit
def _bounded(
    group: tl.tensor, raw: tl.tensor, rms: tl.tensor, lr: tl.tensor, period: tl.tensor
) -> Any:
    """No smaller where a parameter is too small already, no larger where it is too large."""
    most = number(group + MAX_RMS)
    raw = tl.where(rms < number(group + MIN_RMS), 0.0, raw)
    if tl.load(group + ORIGINAL) != 0:
        raw = tl.where(rms > most, -lr * period.to(tl.float64), raw)
    else:
        raw = tl.minimum(tl.maximum(raw, -LARGEST), LARGEST)
        raw = tl.minimum(raw, (most - rms) / rms)
    return raw


@triton.jit
def _learn_sizes(
    group: tl.tensor,
    row: tl.tensor,
    sized: tl.tensor,
    step: tl.tensor,
    inner: tl.tensor,
    square: tl.tensor,
    by: tl.tensor,
    width: tl.constexpr,
) -> Any:
    """Learns the sizes of several tensors; their root mean squares and size steps."""
    double = tl.load(row + DOUBLE, mask=sized, other=0)
    period, count = tl.load(group + PERIOD), step.to(tl.int64)
    place = count % period
    own = _as_kept(inner * by, double)
    at_own, total, mean = _ring(row, double, sized, place, own, period, width)
    turn, start = place == period - 1, step == 0
    # With a period of one the first step is one too many: nothing has been averaged yet.
    due = turn & (start == 0) & sized
    log_beta = number(group + LOG_BETA2) * period.to(tl.float64)
    beta = tl.exp(log_beta)
    at_mean = tl.load(row + MEAN_SQUARE, mask=sized, other=0)
    at_rms = tl.load(row + RMS, mask=sized, other=0)
    known = get_small(at_mean, double, sized)
    known = _as_kept(tl.where(due, known * beta + mean * (1 - beta), known), double)
    numel = tl.load(row + NUMEL, mask=sized, other=0).to(tl.float64, bitcast=True)
    found = tl.sqrt(square / tl.where(sized, numel, 1.0))
    rms = _as_kept(tl.where(turn | start, found, get_small(at_rms, double, sized)), double)
    # Threads may hold the same number: all of them must have read it before it changes.
    tl.debug_barrier()
    _put(at_own, own, double, sized)
    _put(at_mean, known, double, sized)
    _put(at_rms, rms, double, sized)
    lr = rate(group) * number(group + SCALAR_SCALE)
    so_far = tl.maximum((count + 1) // period, 1).to(tl.float64)
    root = tl.sqrt(1 - tl.exp(so_far * log_beta))
    raw = -lr * root * total / (tl.sqrt(known) + number(group + EPS))
    return rms, tl.where(due, _bounded(group, raw, rms, lr, period), 0.0)


@triton.jit
def learn(
    head: tl.tensor,
    group: tl.tensor,
    rows: tl.tensor,
    tensors: tl.tensor,
    there: tl.tensor,
    inner: tl.tensor,
    square: tl.tensor,
    clip: tl.tensor,
    factors: tl.tensor,
    width: tl.constexpr,
) -> None:
    """Learns the sizes of several tensors of one group, and leaves the factors of their update."""
    row = rows + tensors * ROW
    there = there & (tl.load(row + ACTIVE, mask=there, other=0) != 0)
    scalar = tl.load(row + SCALAR, mask=there, other=0) != 0
    at_step = tl.load(row + STEP, mask=there, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(at_step, mask=there, other=0.0).to(tl.float64)
    unscale, original = unscale_of(head, group), tl.load(group + ORIGINAL) != 0
    rms, size = _learn_sizes(
        group, row, there & (scalar == 0), step, inner, square, unscale * clip, width
    )
    tl.store(at_step, (step + 1).to(tl.float32), mask=there)
    correction = 1 - tl.exp((step + 1) * number(group + LOG_BETA2))
    corrected = (correction < CORRECTED) | (scalar & original)
    lr, infinite = rate(group), float("inf")
    by_scalar = number(group + SCALAR_SCALE)
    relative = tl.where(scalar, by_scalar, tl.maximum(rms, number(group + MIN_RMS)))
    bound = tl.where(scalar, number(group + SCALAR_MAX), infinite)
    own = factors + tensors * FACTORS
    # In 2022 the clipped gradient reached the sizes only, and scalars were bounded before a step.
    tl.store(own, tl.where(original, unscale, unscale * clip) + 0.0 * step, mask=there)
    tl.store(own + 1, tl.where(corrected, 1 / correction, 1.0), mask=there)
    tl.store(own + 2, -lr * relative, mask=there)
    tl.store(own + 3, size, mask=there)
    tl.store(own + 4, tl.where(original, bound, infinite), mask=there)
    tl.store(own + 5, tl.where(original, infinite, bound), mask=there)


@triton.jit(do_not_specialize=["slots", "tensors"])
def learn_each(
    head: tl.tensor,
    groups: tl.tensor,
    rows: tl.tensor,
    sums: tl.tensor,
    ready: tl.tensor,
    factors: tl.tensor,
    flags: tl.tensor,
    slots: tl.tensor,
    tensors: tl.tensor,
    width: tl.constexpr,
    history: tl.constexpr,
    whole: tl.constexpr,
) -> None:
    """Sizes and factors without clipping: one program for one tensor."""
    tensor, bad = tl.program_id(0).to(tl.int64), tl.load(flags)
    if tensor == 0:
        tl.store(flags + 1, bad)
    row = rows + tensor * ROW
    if (bad == 0) & (tl.load(row + ACTIVE) != 0):
        inner = partial_sum(sums, slots, ready, tensors, tensor, row, 1, whole)
        square = partial_sum(sums, slots, ready, tensors, tensor, row, 2, whole)
        one = tl.arange(0, 1)
        clip = tl.full((), 1.0, tl.float64)
        learn(
            head,
            group_of(groups, row),
            rows,
            tensor + one,
            one == 0,
            inner + tl.zeros((1,), tl.float64),
            square + tl.zeros((1,), tl.float64),
            clip,
            factors,
            width,
        )
