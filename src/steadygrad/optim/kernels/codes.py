"""Moments in kernels, numbers or codes: :mod:`steadygrad.optim.codes`, four blocks at a time.

Codes depend on the largest number of their block, so a program works on whole ones: a row for each,
with zeros where the parameter's row has ended. Every operation is rounded by itself, as multi-tensor
calls do it: both come to the same codes.
"""

from typing import Any

import triton
import triton.language as tl

from steadygrad.optim import codes
from steadygrad.optim.kernels.memory import factors_of, load, read, write

BLOCK = tl.constexpr(codes.BLOCK)
DIGITS, LOW_DIGITS = tl.constexpr(codes.DIGITS), tl.constexpr((1 << codes.DIGITS) - 1)
LOW, HIGH = tl.constexpr(codes.LOW), tl.constexpr(codes.HIGH)
# Least number, its bits, largest code, shift of random bits, and carry of each moment.
FIRST, SECOND = (
    tl.constexpr((c.offset, c.base, c.top, c.shift, c.carry)) for c in (codes.FIRST, codes.SECOND)
)
LEAST = tl.constexpr(codes.SECOND.least)


@triton.jit
def lanes_of(block: tl.constexpr, coded: tl.constexpr) -> Any:
    """Places of a block's elements, for codes with a row for each of their blocks."""
    if coded:
        found = (tl.arange(0, block // BLOCK) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    else:
        found = tl.arange(0, block)
    return found


@triton.jit
def chunk_at(first: tl.tensor, line: tl.tensor, coded: tl.constexpr) -> Any:
    """A chunk's first element from its place where all rows, or lines, have whole blocks.

    Then its block's place in its line, blocks of a line, and what a line lacks to whole ones. One
    division of 64 bits is for a whole chunk.
    """
    if coded:
        blocks, place = (line + BLOCK - 1) // BLOCK, first // BLOCK
        above, gap = place // blocks, blocks * BLOCK - line
        place, blocks = (place - above * blocks).to(tl.int32), blocks.to(tl.int32)
        found = first - above * gap, place, blocks, gap.to(tl.int32)
    else:
        found = (first,)
    return found


@triton.jit
def elements_at(
    chunk: tl.tuple, line: tl.tensor, begin: tl.tensor, lanes: tl.tensor, coded: tl.constexpr
) -> Any:
    """Offsets in memory from the chunk's first element, and which are of a line."""
    if coded:
        place = chunk[1] + begin // BLOCK + tl.arange(0, lanes.shape[0])
        above = place // chunk[2]
        column = (place - above * chunk[2]).to(tl.int64) * BLOCK
        size = tl.minimum(line - column, BLOCK).to(tl.int32)
        inside = tl.arange(0, BLOCK)[None, :] < size[:, None]
        found = begin + lanes - (above * chunk[3])[:, None], inside
    else:
        found = begin + lanes, lanes >= 0
    return found


@triton.jit
def blocks_at(first: tl.tensor, begin: tl.tensor, length: tl.tensor, block: tl.constexpr) -> Any:
    """Places of the scales of some blocks of codes, and which there are."""
    places = begin + tl.arange(0, block // BLOCK) * BLOCK
    return first // BLOCK + places // BLOCK, places < length


@triton.jit
def seeds_of(
    factors: tl.tensor, tensors: tl.tensor, tensor: tl.tensor, columns: tl.constexpr
) -> Any:
    """A parameter's random bits, which follow its factors: the first element's, and the slope."""
    start, slope = factors_of(factors + columns * tensors.to(tl.int64), tensors, tensor, 2)
    return start.to(tl.int64).to(tl.uint32), slope.to(tl.int64).to(tl.uint32)


@triton.jit
def _power(exponent: tl.tensor) -> Any:
    """Powers of two with biased exponents."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scales(place: tl.tensor, here: tl.tuple) -> Any:
    """Scales of blocks, ``(4, 1)``."""
    return _power(tl.load(place + here[5][0], mask=here[5][1], other=LOW))[:, None]


@triton.jit
def _decoded(place: tl.tensor, scale: tl.tensor, here: tl.tuple, code: tl.constexpr) -> Any:
    """Numbers of codes."""
    offset: tl.constexpr = code[0]
    found = load(place, here).to(tl.int32)
    size = ((found & code[2]) << DIGITS) + code[1]
    number = (size.to(tl.float32, bitcast=True) - offset) * scale
    return tl.where(found > code[2], 0.0 - number, number)


@triton.jit
def read_moments(places: tl.tuple, here: tl.tuple) -> Any:
    """Both large states as numbers, and the least second one to go by, zero if they are numbers."""
    if places[2].dtype.element_ty == tl.uint8:
        scale = _scales(places[5], here)
        m = _decoded(places[2], _scales(places[4], here), here, FIRST)
        found = m, _decoded(places[3], scale, here, SECOND), scale * LEAST
    else:
        found = read(places[2], here), read(places[3], here), 0.0
    return found


@triton.jit
def used(places: tl.tuple, v: tl.tensor, floor: tl.tensor, least: tl.tensor) -> Any:
    """Second moments to go by: of codes not below the least but zero, nor below a bound."""
    if places[2].dtype.element_ty == tl.uint8:
        v = tl.maximum(tl.maximum(v, floor), least)
    return v


@triton.jit
def root_of(x: tl.tensor) -> Any:
    """Square roots to the last digit, which the compiler's own are not."""
    if x.dtype == tl.float32:
        found = tl.sqrt_rn(x)
    else:
        found = tl.sqrt(x)
    return found


@triton.jit
def quotient(x: tl.tensor, y: tl.tensor) -> Any:
    """Quotients to the last digit, which the compiler's own are not."""
    if x.dtype == tl.float32:
        found = tl.div_rn(x, y)
    else:
        found = x / y
    return found


@triton.jit
def _encode(
    place: tl.tensor, scales: tl.tensor, here: tl.tuple, numbers: tl.tensor, code: tl.constexpr
) -> None:
    """Codes blocks of numbers, and writes them and their scales."""
    own = numbers.to(tl.int32, bitcast=True)
    size = own & 0x7FFFFFFF
    # By bits, whose order is that of the numbers.
    exponent = (tl.max(size, axis=1) + code[4]) >> 23
    exponent = tl.minimum(tl.maximum(exponent, LOW), HIGH)
    found = size.to(tl.float32, bitcast=True) * _power(-exponent + (HIGH + 1))[:, None] + code[0]
    element = here[0].to(tl.uint32) + here[1].to(tl.uint32)
    bits = ((here[6][0] + element * here[6][1]) >> code[3]) & LOW_DIGITS
    found = (found.to(tl.int32, bitcast=True) + bits.to(tl.int32) - code[1]) >> DIGITS
    found = tl.minimum(found, code[2])
    if code[2] == FIRST[2]:
        found = tl.where(own < 0, found + (code[2] + 1), found)
    write(place, here, found)
    tl.store(scales + here[5][0], exponent.to(tl.uint8), mask=here[5][1])


@triton.jit
def write_moments(places: tl.tuple, here: tl.tuple, m: tl.tensor, v: tl.tensor) -> None:
    """Writes both large states."""
    if places[2].dtype.element_ty == tl.uint8:
        _encode(places[2], places[4], here, m, FIRST)
        _encode(places[3], places[5], here, v, SECOND)
    else:
        write(places[2], here, m)
        write(places[3], here, v)
