"""What kernels for accelerators are made of: what they read in their tables, and sums of chunks."""

from typing import Any

import triton
import triton.language as tl

from steadygrad.kernels.device_tables import Group, Head, Row

__all__ = [
    "accumulated",
    "addresses",
    "chunk_at",
    "first_chunk",
    "group_of",
    "is_finite",
    "last_chunk",
    "number",
    "partial_sum",
    "rate",
    "totals",
]

# Plain numbers, as the compiler takes them for constants.
FOUND_INF, GROUPS = tl.constexpr(int(Head.FOUND_INF)), tl.constexpr(int(Head.GROUPS))
ROW, GROUP_ROW = tl.constexpr(len(Row)), tl.constexpr(len(Group))
ACTIVE, GROUP = tl.constexpr(int(Row.ACTIVE)), tl.constexpr(int(Row.GROUP))
GRAD, WEIGHT = tl.constexpr(int(Row.GRAD)), tl.constexpr(int(Row.WEIGHT))
FIRST, SECOND = tl.constexpr(int(Row.FIRST)), tl.constexpr(int(Row.SECOND))
PARAM = tl.constexpr(int(Row.PARAM))
SLOT, SLOTS = tl.constexpr(int(Row.SLOT)), tl.constexpr(int(Row.SLOTS))
LR, LR_AT = tl.constexpr(int(Group.LR)), tl.constexpr(int(Group.LR_AT))
LR_DOUBLE, SKIPPED = tl.constexpr(int(Group.LR_DOUBLE)), tl.constexpr(int(Group.SKIPPED))
# Numbers that a kernel leaves to a later one for each tensor.
FACTORS = tl.constexpr(8)
# Partial sums that are added up side by side.
WIDTH = tl.constexpr(256)


@triton.jit
def number(place: tl.tensor) -> Any:
    """A float64 of a table."""
    return tl.load(place).to(tl.float64, bitcast=True)


@triton.jit
def is_finite(x: tl.tensor) -> Any:
    """Whether a number is neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def chunk_at(chunks: tl.tensor, place: tl.tensor) -> Any:
    """A chunk's tensor, first element, length and place of partial sums."""
    at = chunks + place.to(tl.int64) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2).to(tl.int32), tl.load(at + 3)


@triton.jit
def addresses(row: tl.tensor) -> Any:
    """Where a tensor's gradient, weight, both large states and 16-bit parameter are."""
    first, second = tl.load(row + FIRST), tl.load(row + SECOND)
    return tl.load(row + GRAD), tl.load(row + WEIGHT), first, second, tl.load(row + PARAM)


@triton.jit
def group_of(groups: tl.tensor, row: tl.tensor) -> Any:
    """The row of a tensor's group."""
    return groups + tl.load(row + GROUP) * GROUP_ROW


@triton.jit
def rate(group: tl.tensor) -> Any:
    """A group's learning rate, from where it is kept."""
    address = tl.load(group + LR_AT)
    found = number(group + LR)
    if address != 0:
        if tl.load(group + LR_DOUBLE) != 0:
            found = tl.load(address.to(tl.pointer_type(tl.float64)))
        else:
            found = tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    return found


@triton.jit
def note_found_inf(head: tl.tensor, flags: tl.tensor) -> None:
    """Raises the flag if a gradient scaler has found a gradient that is not finite."""
    address = tl.load(head + FOUND_INF)
    if address != 0:
        if tl.load(address.to(tl.pointer_type(tl.float32))) != 0:
            tl.store(flags, 1)


@triton.jit
def accumulated(sums: tl.tensor, slots: tl.tensor, row: tl.tensor, column: tl.constexpr) -> Any:
    """What a tensor's chunks add up to: always in the same order."""
    first, count = tl.load(row + SLOT), tl.load(row + SLOTS).to(tl.int32)
    place = sums + column * slots.to(tl.int64) + first
    found = tl.zeros((WIDTH,), tl.float64)
    for start in range(0, count, WIDTH):
        offsets = start + tl.arange(0, WIDTH)
        found += tl.load(place + offsets, mask=offsets < count, other=0.0)
    return tl.sum(found)


@triton.jit
def partial_sum(
    sums: tl.tensor,
    slots: tl.tensor,
    ready: tl.tensor,
    tensors: tl.tensor,
    tensor: tl.tensor,
    row: tl.tensor,
    column: tl.constexpr,
    whole: tl.constexpr,
) -> Any:
    """A tensor's sum: from its chunks, or one that is ready because shards were added up."""
    if whole:
        found = accumulated(sums, slots, row, column)
    else:
        found = tl.load(ready + column * tensors.to(tl.int64) + tensor)
    return found


@triton.jit(do_not_specialize=["slots", "tensors"])
def totals(
    rows: tl.tensor,
    sums: tl.tensor,
    ready: tl.tensor,
    slots: tl.tensor,
    tensors: tl.tensor,
    first: tl.constexpr,
    count: tl.constexpr,
) -> None:
    """Sums of each tensor, one program for one tensor; zeros for those that take no part."""
    tensor = tl.program_id(0).to(tl.int64)
    row = rows + tensor * ROW
    active = tl.load(row + ACTIVE) != 0
    for column in tl.static_range(first, first + count):
        found = accumulated(sums, slots, row, column)
        tl.store(ready + column * tensors.to(tl.int64) + tensor, tl.where(active, found, 0.0))


@triton.jit
def finish(head: tl.tensor, groups: tl.tensor, flags: tl.tensor) -> None:
    """Counts a step that was left out, and makes ready for the next one."""
    if tl.load(flags + 1) != 0:
        for g in range(tl.load(head + GROUPS).to(tl.int32)):
            address = tl.load(groups + g * GROUP_ROW + SKIPPED)
            if address != 0:
                place = address.to(tl.pointer_type(tl.float32))
                tl.store(place, tl.load(place) + 1.0)
    tl.store(flags, 0)


@triton.jit
def first_chunk(
    head: tl.tensor, rows: tl.tensor, chunks: tl.tensor, flags: tl.tensor, start: tl.tensor
) -> Any:
    """This program's chunk in a step's first pass: row, whether active, first, length, slot."""
    place = start + tl.program_id(0)
    if place == 0:
        note_found_inf(head, flags)
    tensor, first, length, slot = chunk_at(chunks, place)
    row = rows + tensor * ROW
    return row, tl.load(row + ACTIVE), first, length, slot


@triton.jit
def last_chunk(
    head: tl.tensor,
    groups: tl.tensor,
    rows: tl.tensor,
    chunks: tl.tensor,
    flags: tl.tensor,
    start: tl.tensor,
) -> Any:
    """This program's chunk in the last pass: tensor, row, whether active, first, length."""
    place = start + tl.program_id(0)
    bad = tl.load(flags + 1)
    if place == 0:
        finish(head, groups, flags)
    tensor, first, length, _slot = chunk_at(chunks, place)
    row = rows + tensor * ROW
    return tensor, row, tl.where(bad == 0, tl.load(row + ACTIVE), 0), first, length
