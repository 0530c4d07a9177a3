"""Memory as Triton kernels read and write it: chunks, factors, 16-bit numbers and masters.

Bfloat16 travels as its bits, in ``int16``: so its rounding is one and the same everywhere, in
Triton's interpreter too. Offsets from a tensor's start are of 64 bits, those in a chunk of 32.

A block is a tuple of its chunk's first element in the tensor, offsets in the chunk, and the chunk's
length. ``masked`` says that the block may reach beyond the chunk's end, ``aligned`` that all memory
starts at multiples of 16 bytes.
"""

from typing import Any

import triton
import triton.language as tl

from steadygrad.kernels import table

__all__ = [
    "addresses_at",
    "bounded",
    "chunk_at",
    "factor",
    "number",
    "read",
    "read_gradient",
    "sync_masters",
    "widened",
    "write",
]

# Constants, as the compiler wants them.
GRAD, PARAM, WEIGHT = map(tl.constexpr, (table.GRAD, table.PARAM, table.WEIGHT))
STATES = tl.constexpr(table.STATES)


@triton.jit
def chunk_at(chunks: tl.tensor) -> Any:
    """This program's chunk: tensor, first element and length."""
    row = chunks + tl.program_id(0).to(tl.int64) * 3
    return tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int32)


@triton.jit
def addresses_at(addresses: tl.tensor, fields: tl.tensor, tensor: tl.tensor) -> Any:
    """Addresses of a tensor's gradient, weight, two large states and parameter."""
    row = addresses + tensor * fields
    first, second = tl.load(row + STATES), tl.load(row + STATES + 1)
    return tl.load(row + GRAD), tl.load(row + WEIGHT), first, second, tl.load(row + PARAM)


@triton.jit
def factor(factors: tl.tensor, tensors: tl.tensor, tensor: tl.tensor, field: tl.constexpr) -> Any:
    """A tensor's factor of one field."""
    return tl.load(factors + field * tensors.to(tl.int64) + tensor)


@triton.jit
def number(bits: tl.tensor) -> Any:
    """An option: Triton would hand over a plain number in float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def bounded(x: tl.tensor, bound: tl.tensor) -> Any:
    """Numbers within a bound and its negative; a NaN stays one."""
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))


@triton.jit
def widened(x: tl.tensor, dtype: tl.constexpr) -> Any:
    """What has been loaded, as a floating number."""
    if dtype == tl.bfloat16:
        found = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        found = x
    return found


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> Any:
    """What to store of a number: to the nearest, ties to even."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        found = tl.where(x == x, near, 0x7FC0).to(tl.int16)
    else:
        found = x.to(dtype)
    return found


@triton.jit
def _pointer(
    address: tl.tensor, first: tl.tensor, dtype: tl.constexpr, aligned: tl.constexpr
) -> Any:
    """Where a chunk begins in the memory at an address."""
    if dtype == tl.bfloat16:
        place = address.to(tl.pointer_type(tl.int16)) + first
    else:
        place = address.to(tl.pointer_type(dtype)) + first
    if aligned:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def read(
    address: tl.tensor,
    block: tl.tuple,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """A block as it is stored; zeros beyond the chunk's end."""
    first, offsets, length = block
    place = _pointer(address, first, dtype, aligned)
    if masked:
        found = tl.load(place + offsets, mask=offsets < length, other=0)
    else:
        found = tl.load(place + offsets)
    return found


@triton.jit
def read_gradient(
    address: tl.tensor,
    block: tl.tuple,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """A block of a gradient; zeros for one without an address."""
    first, offsets, length = block
    place = _pointer(address, first, dtype, aligned)
    there = offsets < tl.where(address != 0, length, 0) if masked else address != 0
    return widened(tl.load(place + offsets, mask=there, other=0), dtype)


@triton.jit
def write(
    address: tl.tensor,
    block: tl.tuple,
    value: tl.tensor,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Rounds a block of numbers and stores it."""
    first, offsets, length = block
    place = _pointer(address, first, dtype, aligned)
    if masked:
        tl.store(place + offsets, rounded(value, dtype), mask=offsets < length)
    else:
        tl.store(place + offsets, rounded(value, dtype))


@triton.jit
def sync_masters(
    masters: tl.tensor,
    at_master: tl.tensor,
    at_param: tl.tensor,
    block: tl.tuple,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """Copies to masters what somebody else has written to their parameters; the block as it is now.

    An element that is still its master's rounding tells nothing new; any other is the master now.
    """
    first, offsets, length = block
    stored = read(at_param, block, dtype, aligned, masked)
    own = rounded(masters, dtype)
    if dtype == tl.float16:
        same = own.to(tl.int16, bitcast=True) == stored.to(tl.int16, bitcast=True)
    else:
        same = own == stored
    found = tl.where(same, masters, widened(stored, dtype).to(tl.float32))
    place = _pointer(at_master, first, tl.float32, aligned)
    tl.store(place + offsets, found, mask=(offsets < length) & (same == 0))
    return found
