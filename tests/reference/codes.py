"""Moments in eight bits, in float64: what codes stand for, and which codes a number may have."""

from dataclasses import dataclass

import numpy as np

BLOCK = 256
# Least exponent of a scale.
LOW = 12


@dataclass(frozen=True)
class Code:
    """Codes of one moment: exponents from that of ``offset`` on, and three digits."""

    offset: float
    top: int  # without the sign
    is_signed: bool
    shift: int  # of the random bits
    largest: float  # of a number in [1, 2), from which on the scale is twice its power of two


FIRST = Code(2.0**-15, 127, True, 0, 2 - 2.0**-3 - 2.0**-15)
SECOND = Code(2.0**-31, 255, False, 12, 2 - 2.0**-3 + 2.0**-23)


def scales(exponents: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The scale of each element, from biased exponents with shape ``(rows, blocks)``."""
    row = int(np.prod(shape[1:]))
    each = np.repeat(exponents, BLOCK, axis=1)[:, :row].reshape(shape)
    return np.ldexp(1.0, each.astype(int) - 127)


def decode(codes: np.ndarray, exponents: np.ndarray, code: Code) -> np.ndarray:
    """Numbers that codes stand for."""
    size = codes.astype(int) & code.top
    numbers = (1 + size % 8 / 8) * np.ldexp(code.offset, size // 8) - code.offset
    signs = np.where(codes.astype(int) > code.top, -1.0, 1.0)
    return signs * numbers * scales(exponents, codes.shape)


def floor(exponents: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The least second moment but zero that each element's block can hold."""
    return scales(exponents, shape) * SECOND.offset / 8


def used(state: dict, betas: tuple[float, float] = (1.0, 0.0)) -> np.ndarray:
    """The second moment that a step goes by.

    Of codes it is no smaller than their least one, and than any history's beside the first moment.
    """
    beta1, beta2 = betas
    if "floor" not in state:
        return state["v"]
    v = np.maximum(state["v"], state["floor"])
    if beta1**2 >= beta2:
        return v
    ratio = (1 - beta2) * (1 - beta1**2 / beta2) / (1 - beta1) ** 2
    return np.maximum(v, ratio * state["m"] ** 2)


def random_parts(place: int, step: int, count: int, shift: int) -> np.ndarray:
    """What is added to each element before it is cut, of a code: in [0, 1)."""
    start = _mixed((place * 0xC2B2AE3D + step * 0x85EBCA77) % 2**32)
    slope = _mixed((start + 0x85EBCA77) % 2**32) >> 1 | 1
    bits = (start + np.arange(count, dtype=np.uint64) * np.uint64(slope)) % np.uint64(2**32)
    return (bits >> np.uint64(shift)) % np.uint64(2**20) / 2.0**20


def _mixed(x: int) -> int:
    for _ in range(2):
        x = (x ^ x >> 16) * 0x45D9F3B % 2**32
    return x ^ x >> 16


def exponents_of(sizes: np.ndarray, code: Code) -> np.ndarray:
    """Biased exponents of the blocks of numbers without a sign, with shape ``(rows, blocks)``."""
    rows = sizes.reshape(len(sizes), -1)
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK)))
    part, power = np.frexp(padded.reshape(len(rows), -1, BLOCK).max(2))
    found = power + 126 + (2 * part >= code.largest)
    return np.where(part == 0, LOW, np.clip(found, LOW, 253))


def are_wrong(
    codes: np.ndarray,
    exponents: np.ndarray,
    numbers: np.ndarray,
    errors: np.ndarray,
    code: Code,
    place: int,
    step: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Codes that no numbers within errors have, and codes that two of them differ in."""
    low, high = np.maximum(np.abs(numbers) - errors, 0), np.abs(numbers) + errors
    ends = [exponents_of(end, code) for end in (low, high)]
    bad = scales(np.where((ends[0] <= exponents) & (exponents <= ends[1]), 0, 1), codes.shape)
    parts = random_parts(place, step, codes.size, code.shift).reshape(codes.shape)
    ends = []
    # The sum with the constant is rounded, too.
    for end, rounding in ((low, 1 - 2.0**-23), (high, 1 + 2.0**-23)):
        y = (end / scales(exponents, codes.shape) + code.offset) * rounding
        part, power = np.frexp(y / code.offset)
        ends.append(np.minimum(np.floor(8 * (power - 1) + 8 * (2 * part - 1) + parts), code.top))
    size = codes.astype(int) & code.top
    is_wrong = (size < ends[0]) | (size > ends[1]) | (bad > 2.0**-127)
    if code.is_signed:
        is_wrong |= ((codes > code.top) != np.signbit(numbers)) & (np.abs(numbers) > errors)
    return is_wrong, ends[0] != ends[1]
