"""Building blocks of the compiled loops: arguments, a shared work list, and 16-bit numbers.

Numba has no bfloat16 and, on CPUs, no float16: their bits travel as ``uint16`` and ``int16``.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from steadygrad.optim.passes import clamp, root, where

# Elements that are added up in the working type; their sums are added up in float64.
BLOCK = 4096
# Sums that a pass may leave for each chunk.
MOST_SUMS = 3
# Columns of addresses, of which ROW is a number: elements of a row.
GRAD, PARAM, WEIGHT, ROW, STATES = 0, 1, 2, 3, 4

# Places of a kernel's arguments, int64 numbers.
COUNTER = 0  # address of the next free turn, in a line of the cache of its own
COUNT = 1  # number of turns
TURNS = 2  # address of rows of the first chunk, the one after the last, and the same of ways
CHUNK_TABLE = 3  # address of rows of tensor, first element, length, the tensor's chunks, a piece
TENSORS = 4  # number of tensors
ADDRESSES = 5  # address of the tensors' addresses, a row for each tensor
FIELDS = 6  # length of such a row
CHUNKS = 7  # number of chunks
SUMS = 8  # address of float64 partial sums, a row for each chunk
FACTORS = 9  # address of float64 factors, a row of all tensors for each factor
OPTIONS = 10  # address of float64 numbers that hold for all tensors
ZEROS = 11  # address of a block of zeros: gradients of tensors that have none
DONE = 12  # address of how many of its chunks have been looked at, for each tensor
YIELD = 13  # address of the function that lets another thread run
ROWS = 14  # number of factors
NUMBERS = 15  # number of options, the last of which is one over the loss scale in the gradients
PLACES = 16
# Ways to go over the chunks of a turn: to look at directions, and to move.
LOOK, MOVE = 0, 1

# What loops are made of. Numba's cache checks a kernel's own file only: kernels hold on to a number
# that changes with these, so that they are compiled anew.
_OPTIM = Path(__file__).parents[1]
SOURCES = [Path(__file__), Path(__file__).with_name("codes.py"), _OPTIM / "codes.py"]
SOURCES += [_OPTIM / "layerwise_rule.py", _OPTIM / "scaled_adam_rule.py"]
SOURCE = crc32(b"".join(map(Path.read_bytes, SOURCES)))

# Without `nnan` and `ninf`: given those, the compiler may drop what guards against such values.
FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}

INT64 = ir.IntType(64)


class Kinds(NamedTuple):
    """Types that a loop is made for."""

    grad: Any
    weight: Any
    kept: Any  # of states as they lie in memory
    param: Any
    state: Any  # to compute states in
    number: Any  # gradients
    exact: Any  # weights
    total: Any  # first sums
    has_two: bool
    is_exact: bool  # whether sums are wider than weights
    source: int = SOURCE


def kinds_of(
    grad: Any, weight: Any, state: Any, param: Any, total: Any, has_two: bool = False
) -> Kinds:
    """The types, from those of gradients, weights, states and parameters as they lie in memory."""
    number, exact = (np.float32 if t in (np.uint16, np.int16) else t for t in (grad, weight))
    own = np.float32 if state is np.uint8 else state
    is_exact = total is not exact
    return Kinds(grad, weight, state, param, own, number, exact, total, has_two, is_exact)


def compiled(function: Any, cache: bool) -> Any:
    """The function as C code; its ``address`` is where that starts."""
    signature = types.void(types.voidptr)
    return cfunc(signature, cache=cache, fastmath=FAST, error_model="numpy")(function)


def instruction(returns: Any, emit: Any) -> Any:
    """A function of one whole number that is written in the compiler's own instructions."""

    @intrinsic
    def call(typing: Any, value: Any) -> Any:
        return returns(types.int64), lambda _, builder, __, values: emit(builder, *values)

    return call


CELL, FUNCTION = INT64.as_pointer(), ir.FunctionType(ir.IntType(32), []).as_pointer()
# Calls the function of no arguments at an address.
call = instruction(types.int32, lambda b, x: b.call(b.inttoptr(x, FUNCTION), []))
pointer = instruction(types.voidptr, lambda b, x: b.inttoptr(x, cgutils.voidptr_t))
# The next number of a counter that threads share. What a thread wrote before it counted is there
# for one that has looked at the counter.
fetch_next = instruction(
    types.int64, lambda b, x: b.atomic_rmw("add", b.inttoptr(x, CELL), INT64(1), "release")
)
look_at = instruction(types.int64, lambda b, x: b.load_atomic(b.inttoptr(x, CELL), "acquire", 8))


def block_of(function: Any) -> Any:
    """Compiles a function into every loop that calls it."""
    return njit(inline="always")(function)


def by_last(plain: Any, others: dict[Any, Any], **options: Any) -> Any:
    """A function that is chosen by the type of its last argument, or of the argument's elements."""

    def chosen(*given: Any) -> Any: ...

    def choose(*given: Any) -> Any:
        return others.get(getattr(given[-1], "dtype", given[-1]), plain)

    # Not strict, because that compares annotations, which a lambda cannot have.
    overload(chosen, strict=False, **options)(choose)
    return chosen


@block_of
def array_at(address: Any, length: Any, dtype: Any) -> Any:
    """Memory at an address, as an array."""
    return carray(pointer(address), length, dtype)


@block_of
def block_at(address: Any, first: Any, length: Any, dtype: Any) -> Any:
    """Some elements of the memory at an address, as an array of their own.

    A loop over it counts from zero: only then does the compiler see that no index is negative,
    which would mean one from the end, and that elements may be worked on side by side.
    """
    return array_at(address + first * array_at(address, 1, dtype).itemsize, length, dtype)


@block_of
def arguments(data: Any) -> Any:
    """Arguments of a kernel; tables of chunks, addresses, sums, factors and options."""
    args = carray(data, PLACES, np.int64)
    chunks = array_at(args[CHUNK_TABLE], (args[CHUNKS], 6), np.int64)
    addresses = array_at(args[ADDRESSES], (args[TENSORS], args[FIELDS]), np.int64)
    sums = array_at(args[SUMS], (args[CHUNKS], MOST_SUMS), np.float64)
    table = array_at(args[FACTORS], (args[ROWS], args[TENSORS]), np.float64)
    options = array_at(args[OPTIONS], args[NUMBERS], np.float64)
    return args, chunks, addresses, sums, table, options


@block_of
def go_over(
    block: Any, args: Any, row: Any, chunk: Any, by: Any, given: Any, types: Any, sums: Any
) -> Any:
    """Adds up the sums that a function returns for each piece of a chunk."""
    stop = chunk[1] + chunk[2]
    for first in range(chunk[1], stop, chunk[5]):
        parts = block(args, row, first, min(chunk[5], stop - first), by, given, types)
        for i in range(len(parts)):
            sums[i] += np.float64(parts[i])


@block_of
def take_turn(block: Any, data: Any, types: Any, of_gradients: Any) -> Any:
    """Calls a function with every piece of all chunks that no other thread has taken.

    A tensor takes part if its first factor is not zero, and with ``of_gradients`` in any case if it
    has a gradient.
    """
    args, chunks, table, sums, factors, given = arguments(data)
    while True:
        place = fetch_next(args[COUNTER])
        if place >= args[CHUNKS]:
            return
        chunk = chunks[place]
        row, by = table[chunk[0]], factors[:, chunk[0]]
        if (of_gradients and row[GRAD] != 0) or (len(by) > 0 and by[0] != 0.0):
            go_over(block, args, row, chunk, by, given, types, sums[place])


@block_of
def arrays_at(args: Any, row: Any, first: Any, size: Any, types: Any) -> Any:
    """A block of a tensor's gradient, zeros if it has none, its weight and parameter."""
    found, start = (row[GRAD], first) if row[GRAD] != 0 else (args[ZEROS], 0)
    return (
        block_at(found, start, size, types.grad),
        block_at(row[WEIGHT], first, size, types.weight),
        block_at(row[PARAM], first, size, types.param),
    )


@block_of
def state_at(row: Any, number: Any, first: Any, size: Any, types: Any) -> Any:
    """A block of one of a tensor's large states."""
    return block_at(row[STATES + number], first, size, types.kept)


# The arithmetic of rules, on numbers.
overload(root, strict=False)(lambda x: lambda x: math.sqrt(x))
overload(clamp, strict=False)(lambda x, low, high: lambda x, low, high: min(max(x, low), high))
overload(where, strict=False)(
    lambda flag, first, second: lambda flag, first, second: first if flag else type(first)(second)
)


# Bits of a number are worked on as whole numbers, without a branch, so that many are done at once.


def wide_bfloat16(bits: Any) -> Any:
    """The number as float32."""
    return np.uint32(np.uint32(bits) << 16).view(np.float32)


def narrow_bfloat16(x: Any, like: Any) -> Any:
    """To the nearest, ties to even; a NaN stays one."""
    bits = np.float32(x).view(np.uint32)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return np.uint16(rounded if x == x else 0x7FC0)


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


def narrow_float16(x: Any, like: Any) -> Any:
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


# A number as a floating one, and as the type of another has it.
widen = by_last(lambda bits: bits, {types.uint16: wide_bfloat16, types.int16: wide_float16})
narrow = by_last(lambda x, like: x, {types.uint16: narrow_bfloat16, types.int16: narrow_float16})


@block_of
def sync_masters(master: Any, parameter: Any, size: Any) -> None:
    """Copies values that were written to parameters into their masters.

    An element that is still its master's rounding tells nothing new; any other is the master now.
    """
    for i in range(0 if master.dtype == parameter.dtype else size):
        same = narrow(master[i], parameter[i]) == parameter[i]
        master[i] = master[i] if same else widen(parameter[i])


@block_of
def round_masters(master: Any, parameter: Any, size: Any) -> None:
    """Rounds masters to their parameters."""
    for i in range(0 if master.dtype == parameter.dtype else size):
        parameter[i] = narrow(master[i], parameter[i])
