"""Moments in kernels, numbers or codes: :mod:`steadygrad.optim.codes`, four blocks at a time.

A scale is of the largest number of its block, so programs work on whole ones, as if each row of a
parameter had whole ones. Every operation is rounded by itself, as multi-tensor calls do.
"""

from typing import Any

import triton
import triton.language as tl

from steadygrad.optim import codes
from steadygrad.optim.kernels.memory import load, read, write

BLOCK, DIGITS = tl.constexpr(codes.BLOCK), tl.constexpr(codes.DIGITS)
LOW, HIGH = tl.constexpr(codes.LOW), tl.constexpr(codes.HIGH)
LOW_DIGITS, LEAST = tl.constexpr((1 << codes.DIGITS) - 1), tl.constexpr(codes.SECOND.least)
# Least number, its bits, largest code, shift of random bits, and carry of each moment.
FIRST, SECOND = (
    tl.constexpr((c.offset, c.base, c.top, c.shift, c.carry)) for c in (codes.FIRST, codes.SECOND)
)


@triton.jit
def lanes_of(block: tl.constexpr, coded: tl.constexpr) -> Any:
    """Places of a block's elements, for codes with a row for each of their blocks."""
    if coded:
        found = (tl.arange(0, block // BLOCK) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    else:
        found = tl.arange(0, block)
    return found


@triton.jit
def without_gaps(place: tl.tensor, number: tl.tensor, line: tl.tensor, odd: tl.constexpr) -> Any:
    """Places in memory of elements of blocks with some numbers, and which are of the same line."""
    if odd:
        blocks = (line + BLOCK - 1) // BLOCK
        above = number // blocks
        rest = line - (number - above * blocks) * BLOCK
        inside = tl.arange(0, BLOCK)[None, :] < rest[:, None]
        place = place - (above * (blocks * BLOCK - line))[:, None]
    else:
        inside = place >= 0
    return place, inside


@triton.jit
def _power(exponent: tl.tensor) -> Any:
    """Powers of two with biased exponents, ``(blocks, 1)``."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _decoded(place: tl.tensor, scale: tl.tensor, here: tl.tuple, code: tl.constexpr) -> Any:
    """Numbers of codes."""
    found = load(place, here).to(tl.int32)
    size = (((found & code[2]) << DIGITS) + code[1]).to(tl.float32, bitcast=True)
    number = (size - code[0]) * scale
    return tl.where(found > code[2], 0.0 - number, number)


@triton.jit
def read_moments(places: tl.tuple, here: tl.tuple) -> Any:
    """Both large states as numbers, and the least second one that a code but zero stands for."""
    if places[2].dtype.element_ty == tl.uint8:
        one = _power(tl.load(places[4] + here[5], mask=here[6], other=LOW))
        two = _power(tl.load(places[5] + here[5], mask=here[6], other=LOW))
        m, v = _decoded(places[2], one, here, FIRST), _decoded(places[3], two, here, SECOND)
        found = m, v, two * LEAST
    else:
        found = read(places[2], here), read(places[3], here), 0.0
    return found


@triton.jit
def used(places: tl.tuple, v: tl.tensor, floor: tl.tensor, least: tl.tensor) -> Any:
    """Second moments to go by, of codes not below some bounds."""
    is_coded: tl.constexpr = places[2].dtype.element_ty == tl.uint8
    return tl.maximum(tl.maximum(v, floor), least) if is_coded else v


@triton.jit
def _encode(
    places: tl.tuple, i: tl.constexpr, here: tl.tuple, by: tl.tuple, numbers: tl.tensor
) -> None:
    """Codes blocks of numbers, and writes them and their scales."""
    code: tl.constexpr = SECOND if i else FIRST
    own = numbers.to(tl.int32, bitcast=True)
    size = own & 0x7FFFFFFF
    # By bits, whose order is that of the numbers.
    exponent = (tl.max(size, axis=1) + code[4]) >> 23
    exponent = tl.minimum(tl.maximum(exponent, LOW), HIGH)
    size = size.to(tl.float32, bitcast=True) * _power(-exponent + (HIGH + 1)) + code[0]
    # The last factors are the random bits of the parameter's first element, and their slope.
    start, slope = by[-2].to(tl.int64).to(tl.uint32), by[-1].to(tl.int64).to(tl.uint32)
    bits = start + (here[0].to(tl.uint32) + here[1].to(tl.uint32)) * slope
    bits = ((bits >> code[3]) & LOW_DIGITS).to(tl.int32)
    found = tl.minimum((size.to(tl.int32, bitcast=True) + bits - code[1]) >> DIGITS, code[2])
    if i == 0:
        found = tl.where(own < 0, found + (code[2] + 1), found)
    write(places[2 + i], here, found)
    tl.store(places[4 + i] + here[5], exponent.to(tl.uint8), mask=here[6])


@triton.jit
def write_moments(
    places: tl.tuple, here: tl.tuple, by: tl.tuple, m: tl.tensor, v: tl.tensor
) -> None:
    """Writes both large states."""
    if places[2].dtype.element_ty == tl.uint8:
        _encode(places, 0, here, by, m)
        _encode(places, 1, here, by, v)
    else:
        write(places[2], here, m)
        write(places[3], here, v)
