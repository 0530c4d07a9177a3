r"""Moments in eight bits: small floating numbers with a scale for each block, rounded at random.

A block is 256 elements within a row of a parameter (an entry of its first dimension, flattened),
or a shorter row. Its scale :math:`s` is a power of two. With a constant :math:`c` that gives
gradual underflow,

.. math:: q = \mathrm{round}(|x| / s + c), \qquad x \approx \pm s\, (q - c)

where :math:`q` has 3 digits behind the first: 5 bits of exponent for second moments, which have
no sign, and 4 for first ones. A number is rounded up as often as it lies beyond the lower code, so
that :math:`E[q] = x`: a moment decays as it does in float32, however slowly. Rounded to the
nearest, one that loses a thousandth at each step would never move.

Random bits are a line along the elements of the whole parameter, modulo 2^32, whose start and slope
are hashes of the parameter and its step: the same on any number of threads and processes, and after
a resume. (With one slope for all steps, elements that are alike would err alike for ever.)
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from steadygrad.shards import first_row

BLOCK = 256  # elements
LEAST = 4096  # smaller parameters keep float32: they take no memory worth saving
SHORTEST = 32  # so do those of shorter rows, each of which would have scales of its own
STEP, PLACE = 0x85EBCA77, 0xC2B2AE3D  # multipliers of the step and of the parameter's place
_MIX = 0x45D9F3B  # less than 2**31, so that no product passes 63 bits
_MASK = 0xFFFFFFFF
DIGITS = 20  # of float32's 23, which are rounded away
EXPONENTS = "_exponents"  # what the name of a moment's scales ends with


class Code(NamedTuple):
    """Form of the codes of a first or a second moment: their numbers are some of float32's."""

    base: int  # bits of `c`, the least number
    top: int  # largest code, without its sign
    shift: int  # of the random bits, so that two moments of an element take others
    carry: int  # what brings bits of a number that may pass the largest code to the next exponent

    @property
    def offset(self) -> float:
        """The constant :math:`c`."""
        return 2.0 ** ((self.base >> 23) - 127)

    @property
    def least(self) -> float:
        """The least number but zero, of the scale."""
        return self.offset * 2.0 ** (DIGITS - 23)


FIRST = Code(112 << 23, 127, 0, (1 << DIGITS) + (1 << 8))
SECOND = Code(96 << 23, 255, 12, (1 << DIGITS) - 1)
CODES = FIRST, SECOND
# Scales, as biased exponents of two: their inverse is a normal number, and the least number that a
# code stands for is one of float32.
LOW, HIGH = 12, 253


def is_coded(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a parameter's moments are kept in eight bits; of a shard the whole tensor counts."""
    if group.get("state_dtype") != "8bit" or parameter.dtype is torch.float64:
        return False
    is_large = parameter.numel() >= LEAST and row_of(parameter) >= SHORTEST
    return is_large and first_row(parameter) is not None


def least_ratio(beta1: float, beta2: float) -> float:
    r"""Least :math:`v / m^2` that any gradients leave in exact averages, by Cauchy and Schwarz.

    Rounded averages may come below. A step goes by a :math:`v` that does not, so that it is no
    longer than the longest one in float32. Zero where there is no such bound.
    """
    if beta1 * beta1 >= beta2:
        return 0.0
    return (1 - beta2) * (1 - beta1 * beta1 / beta2) / ((1 - beta1) * (1 - beta1))


def row_of(tensor: Tensor) -> int:
    """Elements of a row, of which a vector and a number have one."""
    return prod(tensor.shape[1:])


def seeds_at(places: Tensor, steps: Tensor, first: Tensor) -> Tensor:
    """Random bits of parameters: of the first element here, and the distance to the next one's.

    From columns with shape ``(tensors)``: a parameter's place in the optimizer, its steps so far,
    and its first element's place in the whole. Returns a tensor with shape ``(2, tensors)``.
    """
    start = _mixed((places * PLACE + (steps.to(torch.int64) & _MASK) * STEP) & _MASK)
    # Odd, so that it comes to all bits, and of 31 bits, as `_MIX` is.
    slope = (_mixed((start + STEP) & _MASK) >> 1) | 1
    return torch.stack([(start + (first & _MASK) * slope) & _MASK, slope])


def _mixed(x: Tensor) -> Tensor:
    """A hash of numbers of 32 bits."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * _MIX) & _MASK
    return x ^ (x >> 16)


def first_element(parameter: Tensor) -> int:
    """Place in the whole parameter of the first element here."""
    return (first_row(parameter) or 0) * row_of(parameter)


def decode(codes: Tensor, exponents: Tensor, row: int, code: Code) -> Tensor:
    """Numbers in float32, of the shape of their codes."""
    blocks = _in_blocks(codes, row).to(torch.int32)
    size = blocks & code.top if code is FIRST else blocks
    numbers = ((size << DIGITS) + code.base).view(torch.float32) - code.offset
    numbers = numbers * (exponents.to(torch.int32) << 23).view(torch.float32).view(-1, 1)
    if code is FIRST:
        # No negative zero, which a step might keep or not.
        numbers = torch.where(blocks > code.top, 0.0 - numbers, numbers)
    return _in_rows(numbers, codes.shape, row)


def floors(exponents: Tensor, shape: Sequence[int], row: int) -> Tensor:
    """The least second moment but zero that a code of its block stands for, for each element."""
    least = (exponents.to(torch.int32) << 23).view(torch.float32) * SECOND.least
    return _in_rows(least.view(-1, 1).expand(-1, BLOCK), shape, row)


def encode(
    numbers: Tensor, seed: Tensor | Sequence[Tensor], row: int, code: Code
) -> tuple[Tensor, Tensor]:
    """Codes of the shape of numbers in float32, and exponents with shape ``(blocks)``.

    ``seed`` are two entries of :func:`seeds_at`, each ``()``.
    """
    blocks = _in_blocks(numbers, row)
    size = blocks.abs()
    # A column at a time has no maximum.
    largest = size.amax(1) if len(size) else size.new_zeros(0)
    exponents = ((largest.view(torch.int32) + code.carry) >> 23).clamp(LOW, HIGH)
    inverse = ((HIGH + 1 - exponents) << 23).view(torch.float32).view(-1, 1)
    # In place, because whole numbers of 64 bits are large.
    bits = torch.arange(numbers.numel(), device=numbers.device).mul_(seed[1]).add_(seed[0])
    bits = bits.bitwise_right_shift_(code.shift).bitwise_and_((1 << DIGITS) - 1).to(torch.int32)
    size = size.mul_(inverse).add_(code.offset).view(torch.int32).add_(_in_blocks(bits, row))
    found = size.sub_(code.base).bitwise_right_shift_(DIGITS).clamp_(max=code.top)
    if code is FIRST:
        found = torch.where(torch.signbit(blocks), found + (code.top + 1), found)
    return _in_rows(found.to(torch.uint8), numbers.shape, row), exponents.to(torch.uint8)


def _in_blocks(tensor: Tensor, row: int) -> Tensor:
    """Elements with shape ``(blocks, BLOCK)``, zeros after a row that is no multiple."""
    if row % BLOCK == 0:
        return tensor.reshape(-1, BLOCK)
    return pad(tensor.reshape(-1, row), (0, -row % BLOCK)).view(-1, BLOCK)


def _in_rows(blocks: Tensor, shape: Sequence[int], row: int) -> Tensor:
    """The tensor that such elements are from."""
    return blocks.reshape(-1, -(-row // BLOCK) * BLOCK)[:, :row].reshape(shape)
