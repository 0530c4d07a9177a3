"""ScaledAdam's clipping by the median of recent norms; with it all between its two passes.

As :mod:`steadygrad.formulas.clipping` has it; one program works on one group.
"""

from typing import Any

import triton
import triton.language as tl

from steadygrad.formulas.clipping import EARLY
from steadygrad.kernels.device_tables import Group, Row
from steadygrad.kernels.triton_parts import ACTIVE, GROUP_ROW, ROW, number
from steadygrad.kernels.triton_sizes import get_small, learn, unscale_of

__all__ = ["clip_and_learn"]

STEP, SCALAR = tl.constexpr(int(Row.STEP)), tl.constexpr(int(Row.SCALAR))
DOUBLE, RMS = tl.constexpr(int(Row.DOUBLE)), tl.constexpr(int(Row.RMS))
STACK_END, STEPWISE = tl.constexpr(int(Row.STACK_END)), tl.constexpr(int(Group.STEPWISE))
SCALAR_SCALE = tl.constexpr(int(Group.SCALAR_SCALE))
ORIGINAL, CLIPPING = tl.constexpr(int(Group.ORIGINAL)), tl.constexpr(int(Group.CLIPPING))
HISTORY, NORMS = tl.constexpr(int(Group.HISTORY)), tl.constexpr(int(Group.NORMS))
THRESHOLD, CLIPPED = tl.constexpr(int(Group.THRESHOLD)), tl.constexpr(int(Group.CLIPPED))
FIRST, TENSORS = tl.constexpr(int(Group.FIRST)), tl.constexpr(int(Group.TENSORS))
EARLY_1, EARLY_2, EARLY_3 = map(tl.constexpr, EARLY)


@triton.jit
def _term(
    group: tl.tensor, row: tl.tensor, there: tl.tensor, square: tl.tensor, unscale: tl.tensor
) -> Any:
    """Squared norm of each tensor's scaled gradient."""
    by = number(group + SCALAR_SCALE)
    # In 2022 the norm took no account of scalars' smaller learning rate.
    by = tl.where(tl.load(group + ORIGINAL) != 0, 1.0, by)
    scalar = tl.load(row + SCALAR, mask=there, other=0) != 0
    double = tl.load(row + DOUBLE, mask=there, other=0)
    rms = get_small(tl.load(row + RMS, mask=there, other=0), double, there & (scalar == 0))
    size = tl.where(scalar, by, rms) * unscale
    return tl.where(there, square * size * size, 0.0)


@triton.jit
def _norm(
    head: tl.tensor, group: tl.tensor, rows: tl.tensor, ready: tl.tensor, block: tl.constexpr
) -> Any:
    """A group's norm, the step it is at, and how many tensors take part."""
    first, count = tl.load(group + FIRST), tl.load(group + TENSORS).to(tl.int32)
    unscale = unscale_of(head, group)
    total = tl.zeros((block,), tl.float64)
    latest = tl.zeros((block,), tl.float32)
    active = tl.zeros((block,), tl.int32)
    for begin in range(0, count, block):
        own = first + begin + tl.arange(0, block)
        row = rows + own * ROW
        there = begin + tl.arange(0, block) < count
        there = there & (tl.load(row + ACTIVE, mask=there, other=0) != 0)
        square = tl.load(ready + own, mask=there, other=0.0)
        total += _term(group, row, there, square, unscale)
        at = tl.load(row + STEP, mask=there, other=0).to(tl.pointer_type(tl.float32))
        latest = tl.maximum(latest, tl.load(at, mask=there, other=0.0))
        active += there.to(tl.int32)
    found = tl.sqrt(tl.sum(total)).to(tl.float32)
    if tl.load(group + STEPWISE) != 0:
        found = _stepwise(group, rows, ready, unscale)
    return found, tl.max(latest).to(tl.int64), tl.sum(active)


@triton.jit
def _stepwise(group: tl.tensor, rows: tl.tensor, ready: tl.tensor, unscale: tl.tensor) -> Any:
    """The norm as the original rounds it in float64, see `formulas.clipping.total_norm`."""
    first, count = tl.load(group + FIRST), tl.load(group + TENSORS).to(tl.int32)
    one = tl.arange(0, 1)
    stack = tl.zeros((1,), tl.float64)
    total = tl.zeros((1,), tl.float32)
    for i in range(count):
        own = first + i + one
        row = rows + own * ROW
        there = tl.load(row + ACTIVE) != 0
        square = tl.load(ready + own, mask=there, other=0.0)
        stack += _term(group, row, there, square, unscale)
        end = tl.load(row + STACK_END) != 0
        total = tl.where(end, (total.to(tl.float64) + stack).to(tl.float32), total)
        stack = tl.where(end, 0.0, stack)
    return tl.sum(tl.sqrt(total.to(tl.float64)).to(tl.float32))


@triton.jit
def _place_in_order(ordered: tl.tensor, lanes: tl.tensor, place: tl.tensor) -> Any:
    return tl.sum(tl.where(lanes == place, ordered, 0.0)).to(tl.float64)


@triton.jit
def _early(
    found: tl.tensor,
    due: tl.tensor,
    ordered: tl.tensor,
    lanes: tl.tensor,
    group: tl.tensor,
    step: tl.tensor,
    count: tl.constexpr,
) -> Any:
    """A first, doubled threshold, from as many norms as there are."""
    period = tl.load(group + HISTORY)
    fits = (count < period) & (tl.load(group + ORIGINAL) == 0) & (step == count)
    # The places of steps not yet taken hold zeros, and come first.
    median = _place_in_order(ordered, lanes, period - count + count // 4 * 2)
    return tl.where(fits, 2 * number(group + CLIPPING) * median, found), due | fits


@triton.jit
def _clip(group: tl.tensor, norm: tl.tensor, step: tl.tensor, history: tl.constexpr) -> Any:
    """Remembers a norm; what to multiply gradients by, see `formulas.clipping.clip`."""
    period, lanes = tl.load(group + HISTORY), tl.arange(0, history)
    kept = tl.load(group + NORMS).to(tl.pointer_type(tl.float32))
    at_threshold = tl.load(group + THRESHOLD).to(tl.pointer_type(tl.float64))
    at_clipped = tl.load(group + CLIPPED).to(tl.pointer_type(tl.float32))
    threshold, taken = tl.load(at_threshold), step > 0
    norms = tl.load(kept + lanes, mask=lanes < period, other=float("inf"))
    norms = tl.where((lanes == step % period) & taken, norm, norms)
    tl.debug_barrier()
    tl.store(kept + lanes, norms, mask=lanes < period)
    ordered = tl.sort(norms)
    middle = tl.minimum(period - 1, period // 4 * 2)
    found = number(group + CLIPPING) * _place_in_order(ordered, lanes, middle)
    due = step % period == 0
    found, due = _early(found, due, ordered, lanes, group, step, EARLY_1)
    found, due = _early(found, due, ordered, lanes, group, step, EARLY_2)
    found, due = _early(found, due, ordered, lanes, group, step, EARLY_3)
    due = due & taken
    threshold = tl.where(due, found, threshold)
    # A product with the reciprocal, in float32, as the original's quotient is computed.
    factor = tl.minimum((1.0 / (norm + 1e-20)) * threshold.to(tl.float32), 1.0)
    # A norm may overflow where each gradient is finite: without a threshold, infinity over it.
    factor = tl.where(taken & (threshold < float("inf")), factor, 1.0)
    clipped = tl.where(due, 0.0, tl.load(at_clipped)) + tl.where(factor < 1, 1.0, 0.0)
    tl.store(at_threshold, threshold)
    tl.store(at_clipped, clipped)
    return factor.to(tl.float64)


@triton.jit(do_not_specialize=["slots", "tensors"])
def clip_and_learn(
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
    """Clipping, sizes and factors, from sums that are ready: one program for one group."""
    place, bad = tl.program_id(0), tl.load(flags)
    if place == 0:
        tl.store(flags + 1, bad)
    group = groups + place * GROUP_ROW
    block: tl.constexpr = 64
    if bad == 0:
        clip = tl.full((), 1.0, tl.float64)
        norm, step, active = _norm(head, group, rows, ready, block)
        if (active > 0) & (number(group + CLIPPING) > 0):
            clip = _clip(group, norm, step, history)
        first, count = tl.load(group + FIRST), tl.load(group + TENSORS).to(tl.int32)
        lanes = tl.arange(0, block)
        for begin in range(0, count, block):
            own = first + begin + lanes
            there = begin + lanes < count
            inner = tl.load(ready + tensors.to(tl.int64) + own, mask=there, other=0.0)
            square = tl.load(ready + 2 * tensors.to(tl.int64) + own, mask=there, other=0.0)
            learn(head, group, rows, own, there, inner, square, clip, factors, width)
