"""Building blocks of the compiled loops: arguments, a shared work list, and 16-bit numbers.

Numba has no bfloat16 and, on CPUs, no float16: their bits travel as ``uint16`` and ``int16``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

# Elements that are added up in the working type; their sums are added up in float64.
BLOCK = 4096
# Sums that a pass may leave for each chunk.
MOST_SUMS = 3
# Columns of addresses. A 16-bit parameter with a master is where the weight goes, rounded.
GRAD, PARAM, WEIGHT, STATES = 0, 1, 2, 3


class KernelArgs(NamedTuple):
    """Arguments of a kernel, int64 numbers in this order: addresses and counts."""

    counter: int  # address of the number of chunks taken
    chunks: int  # number of chunks
    chunk_table: int  # address of rows of tensor, first element and length
    tensors: int  # number of tensors
    addresses: int  # address of the tensors' addresses, a row for each tensor
    fields: int  # length of such a row
    sums: int  # address of float64 partial sums, a row for each chunk
    factors: int  # address of float64 factors, a row of all tensors for each factor
    options: int  # address of float64 numbers that hold for all tensors
    zeros: int  # address of a block of zeros: gradients of tensors that have none


def source_of(*fields: tuple[str, ...]) -> int:
    """A number that changes with the sources of the kernels and the names of their factors.

    Numba's cache checks a function's own file only. Kernels hold on to this number, so that they
    are compiled anew when anything else that they are made of has changed.
    """
    return crc32(Path(__file__).read_bytes() + repr(fields).encode())


# Without `nnan` and `ninf`: given those, the compiler may drop what guards against such values.
FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}

# Plain numbers, as the compiler takes them for constants.
COUNTER, CHUNKS, CHUNK_TABLE, TENSORS, ADDRESSES = range(5)
FIELDS, SUMS, FACTORS, OPTIONS, ZEROS = range(5, 10)
PLACES = len(KernelArgs._fields)
INT16, INT32, INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT32 = ir.FloatType()


def wide(number: Any) -> Any:
    """The type that sums of such numbers are taken in."""
    return np.float32 if number in (np.uint16, np.int16) else number


def compiled(function: Callable[[Any], None], cache: bool) -> Any:
    """The function as C code; its ``address`` is where that starts."""
    signature = types.void(types.voidptr)
    return cfunc(signature, cache=cache, fastmath=FAST, error_model="numpy")(function)


def instruction(returns: Any, takes: Any, emit: Callable[[Any, Any], Any]) -> Any:
    """A function of one value that is written in the compiler's own instructions."""

    @intrinsic
    def call(typing: Any, value: Any) -> Any:
        return returns(takes), lambda _context, builder, _signature, values: emit(
            builder, values[0]
        )

    return call


pointer = instruction(types.voidptr, types.int64, lambda b, x: b.inttoptr(x, cgutils.voidptr_t))
# The next number of a counter that threads share.
fetch_next = instruction(
    types.int64,
    types.int64,
    lambda b, x: b.atomic_rmw(
        "add", b.inttoptr(x, INT64.as_pointer()), ir.Constant(INT64, 1), "monotonic"
    ),
)


@njit(inline="always")
def array_at(address: Any, length: Any, dtype: Any) -> Any:
    """Memory at an address, as an array."""
    return carray(pointer(address), length, dtype)


@njit(inline="always")
def block_at(address: Any, first: Any, length: Any, dtype: Any) -> Any:
    """Some elements of the memory at an address, as an array of their own.

    A loop over it counts from zero: only then does the compiler see that no index is negative,
    which would mean one from the end, and that elements may be worked on side by side.
    """
    size = carray(pointer(address), 1, dtype).itemsize
    return carray(pointer(address + first * size), length, dtype)


@njit(inline="always")
def arguments(data: Any, factors: Any, options: Any) -> Any:
    """The arguments and their tables: addresses, sums, factors and options.

    ``data`` is the kernel's only argument, ``factors`` and ``options`` say how many there are. One
    over the loss scale in the gradients follows as the last option.
    """
    args = carray(data, PLACES, np.int64)
    addresses = array_at(args[ADDRESSES], (args[TENSORS], args[FIELDS]), np.int64)
    sums = array_at(args[SUMS], (args[CHUNKS], MOST_SUMS), np.float64)
    table = array_at(args[FACTORS], (factors, args[TENSORS]), np.float64)
    return args, addresses, sums, table, array_at(args[OPTIONS], options + 1, np.float64)


@njit(inline="always")
def chunk_of(args: Any, table: Any, sums: Any, factors: Any, of_gradients: Any) -> Any:
    """The next chunk that is free: place, tensor, start, stop; a negative place: none.

    A tensor takes part if its first factor is not zero, and with ``of_gradients`` in any case if it
    has a gradient. Sums are set to zero, and those of chunks that are passed over too.
    """
    while True:
        place = fetch_next(args[COUNTER])
        if place >= args[CHUNKS]:
            return np.int64(-1), np.int64(0), np.int64(0), np.int64(0)
        row = array_at(args[CHUNK_TABLE] + place * 24, 3, np.int64)
        for i in range(MOST_SUMS):
            sums[place, i] = 0.0
        there = of_gradients and table[row[0], GRAD] != 0
        if there or (len(factors) > 0 and factors[0, row[0]] != 0.0):
            return place, row[0], row[1], row[1] + row[2]


@njit(inline="always")
def arrays_at(args: Any, row: Any, first: Any, size: Any, types: Any) -> Any:
    """A block of a tensor's gradient, zeros if it has none, its weight and parameter."""
    grad, weight, _state, param = types
    found, start = (row[GRAD], first) if row[GRAD] != 0 else (args[ZEROS], 0)
    return (
        block_at(found, start, size, grad),
        block_at(row[WEIGHT], first, size, weight),
        block_at(row[PARAM], first, size, param),
    )


@njit(inline="always")
def state_at(row: Any, number: Any, first: Any, size: Any, types: Any) -> Any:
    """A block of one of a tensor's large states."""
    return block_at(row[STATES + number], first, size, types[2])


@njit(inline="always")
def unscaled(gradient: Any, inverse_scale: Any, largest: Any) -> Any:
    """A finite gradient without its loss scale.

    The bounds, the largest number of its type, change nothing. They keep the compiler from taking
    the product of two small factors first, which may be too small for float32.
    """
    return min(max(gradient * inverse_scale, -largest), largest)


def _int(value: int) -> Any:
    return ir.Constant(INT32, value)


def _wide_bfloat16(b: Any, x: Any) -> Any:
    return b.bitcast(b.shl(b.zext(x, INT32), _int(16)), FLOAT32)


def _round_bfloat16(b: Any, x: Any) -> Any:
    """To the nearest, ties to even; a NaN stays one."""
    bits = b.bitcast(x, INT32)
    odd = b.and_(b.lshr(bits, _int(16)), _int(1))
    rounded = b.lshr(b.add(bits, b.add(odd, _int(0x7FFF))), _int(16))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), _int(0x7FC0), rounded), INT16)


def _wide_float16(b: Any, x: Any) -> Any:
    bits = b.zext(x, INT32)
    sign = b.shl(b.and_(bits, _int(0x8000)), _int(16))
    size = b.and_(bits, _int(0x7FFF))
    normal = b.add(b.shl(size, _int(13)), _int((127 - 15) << 23))
    special = b.or_(normal, _int(0x7F800000))
    # As the lowest digits of a half, less the half: no multiplication of tiny numbers, which a
    # processor may take for zeros.
    half = ir.Constant(FLOAT32, 0.5)
    tiny = b.bitcast(b.or_(size, _int(126 << 23)), FLOAT32)
    tiny = b.bitcast(b.fsub(tiny, half), INT32)
    wide = b.select(b.icmp_unsigned(">=", size, _int(0x7C00)), special, normal)
    wide = b.select(b.icmp_unsigned("<", size, _int(0x0400)), tiny, wide)
    return b.bitcast(b.or_(wide, sign), FLOAT32)


def _round_float16(b: Any, x: Any) -> Any:
    """To the nearest, ties to even; a NaN stays one, a too large number becomes infinite."""
    bits = b.bitcast(x, INT32)
    sign = b.lshr(b.and_(bits, _int(0x80000000)), _int(16))
    size = b.and_(bits, _int(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, _int(13)), _int(1))
    normal = b.sub(b.add(size, b.add(odd, _int(0xFFF))), _int((127 - 15) << 23))
    # A half has its last digit where the smallest float16 has it.
    half = ir.Constant(FLOAT32, 0.5)
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(size, FLOAT32), half), INT32), _int(126 << 23))
    narrow = b.select(
        b.icmp_unsigned("<", size, _int((127 - 14) << 23)), tiny, b.lshr(normal, _int(13))
    )
    narrow = b.select(b.icmp_unsigned(">=", size, _int((127 + 16) << 23)), _int(0x7C00), narrow)
    narrow = b.select(b.fcmp_unordered("uno", x, x), _int(0x7E00), narrow)
    return b.trunc(b.or_(narrow, sign), INT16)


wide_bfloat16 = instruction(types.float32, types.uint16, _wide_bfloat16)
wide_float16 = instruction(types.float32, types.int16, _wide_float16)
narrow_bfloat16 = instruction(types.uint16, types.float32, _round_bfloat16)
narrow_float16 = instruction(types.int16, types.float32, _round_float16)


def widen(number: Any) -> Any:
    """A number as a floating one."""


# Not strict, because that compares annotations, which a lambda cannot have.
@overload(widen, strict=False)
def _widen(number: Any) -> Any:
    if number == types.uint16:
        return lambda number: wide_bfloat16(number)
    if number == types.int16:
        return lambda number: wide_float16(number)
    return lambda number: number


def narrow(number: Any, like: Any) -> Any:
    """A number as the type of ``like`` has it."""


@overload(narrow, strict=False)
def _narrow(number: Any, like: Any) -> Any:
    if like == types.uint16:
        return lambda number, like: narrow_bfloat16(np.float32(number))
    if like == types.int16:
        return lambda number, like: narrow_float16(np.float32(number))
    return lambda number, like: number


@njit(inline="always")
def sync_masters(master: Any, parameter: Any, size: Any) -> None:
    """Copies values that were written to parameters into their masters.

    An element that is still its master's rounding tells nothing new; any other is the master now.
    """
    for i in range(size):
        same = narrow(master[i], parameter[i]) == parameter[i]
        master[i] = master[i] if same else widen(parameter[i])


@njit(inline="always")
def round_masters(master: Any, parameter: Any, size: Any) -> None:
    """Rounds masters to their parameters."""
    for i in range(size):
        parameter[i] = narrow(master[i], parameter[i])


def grad_kernel(grad: Any, weight: Any, state: Any, param: Any) -> Callable[[Any], None]:
    """Squared norms of gradients."""
    exact, number, types = wide(weight), wide(grad), (grad, weight, state, param)

    def kernel(data: Any) -> None:
        args, table, sums, factors, options = arguments(data, 0, 0)
        inverse_scale = number(options[-1])
        while True:
            c, tensor, start, stop = chunk_of(args, table, sums, factors, True)
            if c < 0:
                return
            for first in range(start, stop, BLOCK):
                size = min(BLOCK, stop - first)
                g, _x, _p = arrays_at(args, table[tensor], first, size, types)
                part = exact(0)
                for i in range(size):
                    x = exact(widen(g[i]) * inverse_scale)
                    part += x * x
                sums[c, 0] += np.float64(part)

    return kernel
