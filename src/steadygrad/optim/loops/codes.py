"""States of compiled loops, numbers or codes: :mod:`steadygrad.optim.codes`, one by one.

A loop takes blocks of a tensor. It reads what its states stand for, moves them, and writes them
when it has seen the largest of the block: the scale of codes depends on that.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from steadygrad.optim.codes import BLOCK, DIGITS, FIRST, HIGH, LOW, SECOND, least_ratio
from steadygrad.optim.loops.numbers import STATES, block_at, block_of, by_last, state_at

# Columns of addresses behind those of a first and a second state: their scales.
SCALES = STATES + 2

LOW_DIGITS = np.uint32((1 << DIGITS) - 1)
FIRST_OFFSET, SECOND_OFFSET = np.float32(FIRST.offset), np.float32(SECOND.offset)
SECOND_LEAST = np.float32(SECOND.least)
SIGN = np.uint32(1 << 31)
FIRST_BITS = np.uint32(SIGN | (FIRST.top << DIGITS))
# Of one type with what they meet: numba makes a floating number of two whole ones with and without
# a sign.
FIRST_BASE, FIRST_CARRY, FIRST_TOP = map(np.uint32, (FIRST.base, FIRST.carry, FIRST.top))
SECOND_BASE, SECOND_CARRY, SECOND_TOP = map(np.uint32, (SECOND.base, SECOND.carry, SECOND.top))
SECOND_SHIFT, LOW, HIGH = np.uint32(SECOND.shift), np.uint32(LOW), np.uint32(HIGH)

# Rounded after each operation, as multi-tensor calls do: both ways come to the same codes. It must
# be said: a function without a word of its own may do what its caller may.
exactly = njit(error_model="numpy", fastmath=False)
least_ratio_of = exactly(least_ratio)


@exactly
def product(first: Any, second: Any) -> Any:
    """The product of two numbers, rounded, whatever it goes into.

    A gradient, one over its loss scale and a factor are multiplied in this order: the product of
    two small factors may be too small for float32.
    """
    return first * second


@exactly
def averaged(old: Any, new: Any, beta: Any, rest: Any) -> Any:
    """A moving average."""
    return old * beta + new * rest


@block_of
def power(exponent: Any) -> Any:
    """The power of two with a biased exponent."""
    return np.uint32(np.uint32(exponent) << 23).view(np.float32)


@exactly
def first_code(number: Any, inverse: Any, bits: Any) -> Any:
    """Code of a first moment, by random bits."""
    own = np.float32(number).view(np.uint32)
    size = np.float32(np.uint32(own & 0x7FFFFFFF).view(np.float32) * inverse + FIRST_OFFSET)
    found = np.uint32(size.view(np.uint32) + (bits & LOW_DIGITS) - FIRST_BASE) >> DIGITS
    return np.uint8(min(found, FIRST_TOP) | (own >> 31 << 7))


@exactly
def second_code(number: Any, inverse: Any, bits: Any) -> Any:
    """Code of a second moment, by random bits."""
    size = np.float32(np.float32(number) * inverse + SECOND_OFFSET)
    low = np.uint32(bits >> SECOND_SHIFT) & LOW_DIGITS
    found = np.uint32(size.view(np.uint32) + low - SECOND_BASE) >> DIGITS
    return np.uint8(min(found, SECOND_TOP))


@njit(error_model="numpy")
def blocks_of(row: Any, first: Any, size: Any) -> Any:
    """Of some elements from the first of a block on: each block's first, length, and place."""
    line, stop = first // row, first + size
    column = first - line * row
    place = line * ((row + BLOCK - 1) // BLOCK) + column // BLOCK
    while first < stop:
        n = min(BLOCK, row - column, stop - first)
        yield first, n, place
        first, place = first + n, place + 1
        column = 0 if column + n == row else column + n


def if_coded(numbers: Any, **options: Any) -> Any:
    """A decorator of a function of codes, its last argument; of numbers there is another."""
    return lambda codes: by_last(numbers, {types.uint8: codes}, **options)


ONE = np.float32(1)


@if_coded(lambda row, place, state: (ONE, ONE))
def scales_of(row: Any, place: Any, state: Any) -> Any:
    """Scales of a block's first and second state."""
    e = block_at(row[SCALES], place, 1, np.uint8)
    f = block_at(row[SCALES + 1], place, 1, np.uint8)
    return power(e[0]), power(f[0])


@block_of
def states_at(row: Any, first: Any, size: Any, place: Any, types: Any) -> Any:
    """A block of the first and of the second state, and their scales."""
    q, w = state_at(row, 0, first, size, types), state_at(row, 1, first, size, types)
    return q, w, scales_of(row, place, q)


# A product and a sum in one, where either order is exact.
FUSED = {"fastmath": {"contract"}, "error_model": "numpy"}


@if_coded(lambda scale, state: state, jit_options=FUSED)
def first_number(scale: Any, state: Any) -> Any:
    """A first moment as a number."""
    # The sign fills all bits above a code.
    bits = np.uint32(np.int32(np.int8(state)) << DIGITS)
    size = np.uint32((bits & FIRST_BITS) | FIRST_BASE).view(np.float32)
    offset = np.float32(scale * FIRST_OFFSET).view(np.uint32)
    return size * scale - np.uint32((bits & SIGN) | offset).view(np.float32)


@if_coded(lambda scale, state: state, jit_options=FUSED)
def second_number(scale: Any, state: Any) -> Any:
    """A second moment as a number."""
    size = np.uint32((np.uint32(state) << DIGITS) | SECOND_BASE).view(np.float32)
    return size * scale - np.float32(scale * SECOND_OFFSET)


@if_coded(lambda second, least, scale, state: second)
def used(second: Any, least: Any, scale: Any, state: Any) -> Any:
    """A second moment to go by: not below the least code but zero, nor below a bound."""
    return max(max(second, scale * SECOND_LEAST), least)


@if_coded(lambda number, state: np.uint32(0))
def bits_of(number: Any, state: Any) -> Any:
    """Bits of a number without a sign, in the numbers' order; zero where no scale needs them."""
    return np.float32(number).view(np.uint32)


def _in_place(number: Any, place: Any, new: Any, state: Any) -> None:
    state[place] = number


@if_coded(_in_place, inline="always")
def put(number: Any, place: Any, new: Any, state: Any) -> None:
    """Keeps a moved state: in its place, or until the block's scale is known."""
    new[place] = number


@block_of
def exponent_of(largest: Any, carry: Any) -> Any:
    """Biased exponent of a block's scale, from the bits of its largest number."""
    return np.uint8(min(max(np.uint32(largest + carry) >> 23, LOW), HIGH))


@if_coded(lambda row, first, place, by, largest, new, q, w: None)
def write(
    row: Any, first: Any, place: Any, by: Any, largest: Any, new: Any, q: Any, w: Any
) -> None:
    """Codes a block of both states, from arrays of their numbers and the bits of their largest.

    Numbers are in their places already. Random bits are from the last two factors.
    """
    e = block_at(row[SCALES], place, 1, np.uint8)
    f = block_at(row[SCALES + 1], place, 1, np.uint8)
    e[0], f[0] = exponent_of(largest[0], FIRST_CARRY), exponent_of(largest[1], SECOND_CARRY)
    by_m, by_v = power(HIGH + 1 - e[0]), power(HIGH + 1 - f[0])
    slope = np.uint32(by[-1])
    bits = np.uint32(np.uint32(by[-2]) + np.uint32(first) * slope)
    for i in range(len(q)):
        q[i] = first_code(new[0][i], by_m, bits)
        w[i] = second_code(new[1][i], by_v, bits)
        bits = np.uint32(bits + slope)


@intrinsic
def _memory(typing: Any, element: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        array = ir.ArrayType(context.get_value_type(element.dtype), BLOCK)
        return builder.bitcast(cgutils.alloca_once(builder, array), cgutils.voidptr_t)

    return types.voidptr(element), emit


@block_of
def room(dtype: Any) -> Any:
    """Room for a block of numbers, on the stack."""
    return carray(_memory(dtype), BLOCK, dtype)
