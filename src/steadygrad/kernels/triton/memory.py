"""Memory at an address, as kernels for accelerators read and write it; 16-bit numbers and masters.

Bfloat16 travels as its bits, in ``int16``: so its rounding is one and the same everywhere, in
Triton's interpreter too. Offsets from a tensor's start are of 64 bits, those in a chunk of 32.
"""

from typing import Any

import triton
import triton.language as tl

__all__ = [
    "follow",
    "memory",
    "normalized",
    "put",
    "read",
    "read_gradient",
    "rounded",
    "widened",
    "write",
]


@triton.jit
def memory(address: tl.tensor, dtype: tl.constexpr) -> Any:
    """What lies at an address, to be loaded from or stored to."""
    if dtype == tl.bfloat16:
        found = address.to(tl.pointer_type(tl.int16))
    else:
        found = address.to(tl.pointer_type(dtype))
    return found


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
def read(
    address: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    length: tl.tensor,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """A block of a chunk, as it is stored; zeros beyond its end."""
    place = memory(address, dtype) + first
    if aligned:
        place = tl.multiple_of(place, 16)
    if masked:
        found = tl.load(place + offsets, mask=offsets < length, other=0)
    else:
        found = tl.load(place + offsets)
    return found


@triton.jit
def read_gradient(
    active: tl.tensor,
    address: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    length: tl.tensor,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """A block of a gradient; zeros for one that is nowhere."""
    place = memory(address, dtype) + first
    if aligned:
        place = tl.multiple_of(place, 16)
    there = offsets < tl.where(active == 1, length, 0) if masked else active == 1
    return widened(tl.load(place + offsets, mask=there, other=0), dtype)


@triton.jit
def normalized(
    at: tl.tensor,
    active: tl.tensor,
    inverse: tl.tensor,
    bound: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    length: tl.tensor,
    grad: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """A block of the normalised gradient, clipped elementwise."""
    g = read_gradient(active, at, first, offsets, length, grad, aligned, masked)
    return tl.minimum(tl.maximum(g.to(inverse.dtype) * inverse, -bound), bound)


@triton.jit
def write(
    address: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    length: tl.tensor,
    value: tl.tensor,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Rounds a block of numbers and stores it."""
    place = memory(address, dtype) + first
    if aligned:
        place = tl.multiple_of(place, 16)
    if masked:
        tl.store(place + offsets, rounded(value, dtype), mask=offsets < length)
    else:
        tl.store(place + offsets, rounded(value, dtype))


@triton.jit
def put(address: tl.tensor, value: tl.tensor, dtype: tl.constexpr) -> None:
    """Stores one number, or one at each of several addresses."""
    tl.store(address.to(tl.pointer_type(dtype)), value.to(dtype))


@triton.jit
def follow(
    master: tl.tensor,
    weight: tl.tensor,
    param: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    length: tl.tensor,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """A block of masters, which take what somebody else has written to their parameters.

    An element that is still its master's rounding tells nothing new; any other is the master now.
    """
    stored = read(param, first, offsets, length, dtype, aligned, masked)
    own = rounded(master, dtype)
    if dtype == tl.float16:
        same = own.to(tl.int16, bitcast=True) == stored.to(tl.int16, bitcast=True)
    else:
        same = own == stored
    found = tl.where(same, master, widened(stored, dtype).to(tl.float32))
    changed = (offsets < length) & (same == 0)
    tl.store(memory(weight, tl.float32) + first + offsets, found, mask=changed)
    return found
