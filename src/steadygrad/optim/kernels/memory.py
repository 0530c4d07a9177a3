"""Memory as kernels read and write it: chunks, factors, 16-bit numbers and masters.

Offsets from a tensor's start are of 64 bits, those in a chunk of 32.

A place is a pointer to where a tensor begins. A block, ``here``, is a tuple of its chunk's first
element in the tensor, offsets in the chunk, which of them there are, whether all memory starts at
multiples of 16 bytes, and whether some may not be there; then, for codes, numbers of their blocks
and which there are. Both flags are constants only as long as no name without an annotation is given
to them.
"""

from typing import Any

import triton
import triton.language as tl

# Columns of addresses. A 16-bit parameter with a master is where the weight goes, rounded.
GRAD, PARAM, WEIGHT, STATES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def places_of(row: tl.tensor, fields: tl.constexpr, kinds: tl.tuple) -> Any:
    """Places of a tensor's gradient, weight, large states and parameter, of four types."""
    found = tl.tuple(())
    found += (tl.load(row + GRAD).to(tl.pointer_type(kinds[0])),)
    found += (tl.load(row + WEIGHT).to(tl.pointer_type(kinds[1])),)
    for i in tl.static_range(STATES, fields):
        found += (tl.load(row + i).to(tl.pointer_type(kinds[2])),)
    found += (tl.load(row + PARAM).to(tl.pointer_type(kinds[3])),)
    return found


@triton.jit
def factors_of(row: tl.tensor, tensors: tl.tensor, columns: tl.constexpr) -> Any:
    """A tensor's factors."""
    found = tl.tuple(())
    for i in tl.static_range(columns):
        found += (tl.load(row + i * tensors.to(tl.int64)),)
    return found


@triton.jit
def bounded(x: tl.tensor, bound: tl.tensor) -> Any:
    """Numbers within a bound and its negative; a NaN stays one."""
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))


@triton.jit
def _widened(x: tl.tensor, dtype: tl.constexpr) -> Any:
    """Loaded values as numbers of float32 at least."""
    return x.to(tl.float32) if dtype.primitive_bitwidth == 16 else x


@triton.jit
def _pointers(place: tl.tensor, here: tl.tuple) -> Any:
    """Addresses of the elements of a block."""
    start = place + here[0]
    # What is read under a mask is read one by one.
    if here[3] and not here[4]:
        start = tl.multiple_of(start, 16)
    return start + here[1]


@triton.jit
def load(place: tl.tensor, here: tl.tuple) -> Any:
    """Elements of a block as they are stored; zeros beyond the end of the tensor."""
    at = _pointers(place, here)
    return tl.load(at, mask=here[2], other=0) if here[4] else tl.load(at)


@triton.jit
def read(place: tl.tensor, here: tl.tuple) -> Any:
    """Elements of a block as numbers; zeros beyond the end of the tensor."""
    return _widened(load(place, here), place.dtype.element_ty)


@triton.jit
def read_gradient(place: tl.tensor, here: tl.tuple, inverse_scale: tl.tensor) -> Any:
    """A block of a gradient without its loss scale; zeros for one without an address."""
    known = place.to(tl.int64) != 0
    there = here[2] & known if here[4] else known
    found = tl.load(_pointers(place, here), mask=there, other=0)
    wide = _widened(found, place.dtype.element_ty)
    return wide * inverse_scale.to(wide.dtype)


@triton.jit
def read_weight(weight: tl.tensor, param: tl.tensor, here: tl.tuple) -> Any:
    """A block of weights; masters take values that were written to their parameters.

    An element that is still its master's rounding tells nothing new; any other is the master now.
    """
    found = read(weight, here)
    dtype: tl.constexpr = param.dtype.element_ty
    if dtype != weight.dtype.element_ty:
        stored = load(param, here)
        same = found.to(dtype).to(tl.int16, bitcast=True) == stored.to(tl.int16, bitcast=True)
        found = tl.where(same, found, _widened(stored, dtype))
        tl.store(_pointers(weight, here), found, mask=here[2] & (same == 0))
    return found


@triton.jit
def write(place: tl.tensor, here: tl.tuple, numbers: tl.tensor) -> None:
    """Rounds a block of numbers and stores it."""
    found = numbers.to(place.dtype.element_ty)
    tl.store(_pointers(place, here), found, mask=here[2] if here[4] else None)


@triton.jit
def write_weight(weight: tl.tensor, param: tl.tensor, here: tl.tuple, numbers: tl.tensor) -> None:
    """Stores a block of weights, and the parameters that are their roundings."""
    write(weight, here, numbers)
    if param.dtype.element_ty != weight.dtype.element_ty:
        write(param, here, numbers)
