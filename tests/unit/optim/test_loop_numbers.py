"""16-bit numbers, and 8-bit codes, are read and rounded as torch does it, every one of them."""

import numpy as np
import pytest
import torch
from numba import njit

from steadygrad.optim.codes import BLOCK, CODES, FIRST, HIGH, LOW, decode, encode
from steadygrad.optim.loops import codes, numbers

KINDS = {torch.bfloat16: np.uint16, torch.float16: np.int16}
kinds = pytest.mark.parametrize(("dtype", "bits"), KINDS.items(), ids=map(str, KINDS))
EVERY = torch.arange(-(2**15), 2**15, dtype=torch.int16)


# With the flags that the loops are compiled with.
@njit(fastmath=numbers.FAST, error_model="numpy")
def widen_all(given, found):
    for i in range(len(given)):
        found[i] = numbers.widen(given[i])


@njit(fastmath=numbers.FAST, error_model="numpy")
def narrow_all(given, found):
    for i in range(len(given)):
        found[i] = numbers.narrow(given[i], found[i])


def assert_same_numbers(found, expected):
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    # As bits, so that the sign of zero counts.
    kind = torch.int16 if found.element_size() == 2 else torch.int32
    known = ~expected.isnan()
    assert torch.equal(found[known].view(kind), expected[known].view(kind))


@kinds
def test_every_number_is_read(dtype, bits):
    found = np.zeros(2**16, np.float32)
    widen_all(EVERY.numpy().view(bits), found)
    assert_same_numbers(torch.from_numpy(found), EVERY.view(dtype).float())


@kinds
def test_numbers_are_rounded_to_the_nearest(dtype, bits):
    exact = EVERY.view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    halfway = (exact[:-1].double() + exact[1:].double()).div(2).float()
    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**31), 2**31, (100_000,), generator=draw, dtype=torch.int64)
    top = torch.finfo(dtype).max
    extreme = torch.tensor([torch.inf, -torch.inf, torch.nan, top * 1.001, 3.4e38, 1e-45, -0.0])
    parts = [exact, halfway, noise.to(torch.int32).view(torch.float32), extreme]
    given = torch.cat([*parts, *(torch.nextafter(halfway, e) for e in extreme[:2])])
    found = np.zeros(len(given), bits)
    narrow_all(given.numpy(), found)
    assert_same_numbers(torch.from_numpy(found.view(np.int16)).view(dtype), given.to(dtype))


@njit(fastmath=numbers.FAST, error_model="numpy")
def read_all(read, given, by, found):
    for i in range(len(given)):
        found[i] = read(given[i], by[i])


@njit(fastmath=numbers.FAST, error_model="numpy")
def code_all(write, given, by, bits, found):
    for i in range(len(given)):
        found[i] = write(given[i], by[i], bits[i])


SLOPE = 0x5E3779B1


def as_powers(exponents):
    return (exponents.int() << 23).view(torch.float32).repeat_interleave(BLOCK)


@pytest.mark.parametrize("code", CODES, ids=["first", "second"])
def test_every_code_is_read_and_every_number_coded(code):
    exponents = torch.arange(LOW, HIGH + 1, dtype=torch.uint8)
    given = torch.arange(BLOCK, dtype=torch.uint8).repeat(len(exponents))
    expected, found = decode(given, exponents, BLOCK, code), np.zeros(len(given), np.float32)
    of, to = (codes.first_of, codes.first_code), (codes.second_of, codes.second_code)
    read, write = of if code is FIRST else to
    read_all(read, given.numpy(), as_powers(exponents).numpy(), found)
    assert_same_numbers(torch.from_numpy(found), expected)
    # Of numbers of all sizes within the scales, and none.
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(given), generator=draw) * expected.abs().roll(77)
    drawn[::5] = 0
    drawn = drawn if code is FIRST else drawn.abs()
    coded, exponents = encode(drawn, torch.tensor([5, SLOPE]), BLOCK, code)
    bits = (torch.arange(len(drawn)) * SLOPE + 5).int().numpy().view(np.uint32)
    inverse, own = as_powers(HIGH + 1 - exponents.int()).numpy(), np.zeros(len(drawn), np.uint8)
    code_all(write, drawn.numpy(), inverse, bits, own)
    assert torch.equal(torch.from_numpy(own), coded)
