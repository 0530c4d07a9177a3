"""Building blocks of the compiled loops: arguments, a shared work list, and 16-bit numbers.

Numba has no bfloat16 and, on CPUs, no float16: their bits travel as ``uint16`` and ``int16``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
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


# Places of a kernel's arguments, int64 numbers.
COUNTER = 0  # address of the number of chunks taken
CHUNKS = 1  # number of chunks
CHUNK_TABLE = 2  # address of rows of tensor, first element and length
TENSORS = 3  # number of tensors
ADDRESSES = 4  # address of the tensors' addresses, a row for each tensor
FIELDS = 5  # length of such a row
SUMS = 6  # address of float64 partial sums, a row for each chunk
FACTORS = 7  # address of float64 factors, a row of all tensors for each factor
OPTIONS = 8  # address of float64 numbers that hold for all tensors
ZEROS = 9  # address of a block of zeros: gradients of tensors that have none
PLACES = 10


def source_of(*fields: tuple[str, ...]) -> int:
    """A number that changes with the sources of the kernels and the names of their factors.

    Numba's cache checks a function's own file only. Kernels hold on to this number, so that they
    are compiled anew when anything else that they are made of has changed.
    """
    return crc32(Path(__file__).read_bytes() + repr(fields).encode())


# Without `nnan` and `ninf`: given those, the compiler may drop what guards against such values.
FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}

INT64 = ir.IntType(64)


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


# Bits of a number are worked on as whole numbers, without a branch, so that many are done at once.


@njit(inline="always")
def wide_bfloat16(bits: Any) -> Any:
    """The number as float32."""
    return np.uint32(np.uint32(bits) << 16).view(np.float32)


@njit(inline="always")
def narrow_bfloat16(x: Any) -> Any:
    """To the nearest, ties to even; a NaN stays one."""
    bits = np.float32(x).view(np.uint32)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return np.uint16(rounded if x == x else 0x7FC0)


@njit(inline="always")
def wide_float16(bits: Any) -> Any:
    """The number as float32."""
    size = np.uint32(bits) & 0x7FFF
    normal = (size << 13) + ((127 - 15) << 23)
    # As the lowest digits of a half, less the half: no multiplication of tiny numbers, which a
    # processor may take for zeros.
    tiny = np.uint32(size | (126 << 23)).view(np.float32) - np.float32(0.5)
    wide = normal | 0x7F800000 if size >= 0x7C00 else normal
    wide = wide if size >= 0x0400 else np.float32(tiny).view(np.uint32)
    return np.uint32(wide | ((np.uint32(bits) & 0x8000) << 16)).view(np.float32)


@njit(inline="always")
def narrow_float16(x: Any) -> Any:
    """To the nearest, ties to even; a NaN stays one, a too large number becomes infinite."""
    bits = np.float32(x).view(np.uint32)
    size = bits & 0x7FFFFFFF
    normal = (size + ((size >> 13) & 1) + 0xFFF - ((127 - 15) << 23)) >> 13
    # A half has its last digit where the smallest float16 has it.
    half = np.uint32(size).view(np.float32) + np.float32(0.5)
    tiny = np.float32(half).view(np.uint32) - (126 << 23)
    narrow = normal if size >= (127 - 14) << 23 else tiny
    narrow = narrow if size < (127 + 16) << 23 else 0x7C00
    narrow = narrow if x == x else 0x7E00
    return np.int16(narrow | ((bits >> 16) & 0x8000))


def widen(number: Any) -> Any:
    """A number as a floating one."""


@overload(widen, strict=False)
def _widen(number: Any) -> Any:
    found = {types.uint16: wide_bfloat16, types.int16: wide_float16}.get(number)
    return (lambda number: number) if found is None else (lambda number: found(number))


def narrow(number: Any, like: Any) -> Any:
    """A number as the type of ``like`` has it."""


# Not strict, because that compares annotations, which a lambda cannot have.
@overload(narrow, strict=False)
def _narrow(number: Any, like: Any) -> Any:
    found = {types.uint16: narrow_bfloat16, types.int16: narrow_float16}.get(like)
    return (lambda number, like: number) if found is None else (lambda number, like: found(number))


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
