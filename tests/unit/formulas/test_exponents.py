"""Histograms of exponents against frexp on Python's floats, and what a type makes of them."""

import math

import pytest
import torch

from steadygrad.formulas.exponents import (
    BINS,
    NONFINITE_BIN,
    exponent_histograms,
    exponents_of_bins,
    largest_exponents,
    limits,
    shares,
)
from tests.reference.layerwise import fates, histogram


def values(n=400):
    draw = torch.Generator().manual_seed(0)
    spread = torch.randint(-40, 30, (n,), generator=draw)
    drawn = torch.ldexp(torch.randn(n, generator=draw), spread)
    edges = [0.0, -0.0, 1.0, -2.0, 2.0**-149, 2.0**-126, 2.0**127, 65504.0, 65520.0]
    return torch.cat([drawn, torch.tensor([*edges, math.inf, -math.inf, math.nan])])


def by_exponent(row):
    exponents = exponents_of_bins().tolist()
    return {e: int(n) for e, n in zip(exponents, row.tolist(), strict=True) if n}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_counts_are_frexps(dtype):
    x = values().to(dtype)
    assert by_exponent(exponent_histograms([x])[0]) == histogram(x.double().tolist())


def test_rows_are_tensors_of_any_shape():
    x = values()
    found = exponent_histograms([x[:4].reshape(2, 2), x[4:5].squeeze(), torch.empty(0, 3), x])
    assert found.shape == (4, BINS)
    assert found.sum(1).tolist() == [4, 1, 0, len(x)]
    assert torch.equal(found[3], exponent_histograms([x])[0])


def test_float64_beyond_float32_counts_at_the_ends():
    x = torch.tensor([1e-300, 1e300], dtype=torch.float64)
    assert by_exponent(exponent_histograms([x])[0]) == {-149: 1, 127: 1}


def test_complex_numbers_count_both_parts():
    found = by_exponent(exponent_histograms([torch.tensor([1 + 4j])])[0])
    assert found == {0: 1, 2: 1}


def test_needs_no_host():
    # The meta device has no values: whoever asked for one would fail.
    assert exponent_histograms([torch.ones(3, device="meta")]).shape == (1, BINS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("log2_scale", [-12, 0, 9])
def test_shares_are_those_of_the_values_themselves(dtype, log2_scale):
    x = values()
    found = shares(exponent_histograms([x]), log2_scale, dtype)
    expected = fates(x.tolist(), 2.0**log2_scale, dtype)
    # Counts below 2**24 divided once, in float32.
    assert [share.item() for share in found] == pytest.approx(expected, rel=1e-6)


def test_shares_may_have_a_scale_for_each_row():
    x = torch.tensor([2.0**-26, 2.0**-14, 2.0**17])
    found = shares(exponent_histograms([x, x, x]), torch.tensor([0.0, 12.0, -2.0]))
    third = pytest.approx(1 / 3)
    assert found.flushed.tolist() == [third, 0.0, third]
    assert found.subnormal.tolist() == [0.0, 0.0, third]
    assert found.overflow.tolist() == [third, third, 0.0]
    assert found.zero.tolist() == [0.0, 0.0, 0.0]


def test_an_empty_row_has_no_shares():
    found = shares(torch.zeros(1, BINS), 0.0)
    assert [share.item() for share in found] == [0.0] * 4


def test_largest_exponents_leave_out_what_is_not_finite():
    rows = [torch.tensor([3.0, -9.0, math.inf]), torch.zeros(2), torch.empty(0)]
    assert largest_exponents(exponent_histograms(rows)).tolist() == [3.0, -math.inf, -math.inf]
    assert exponent_histograms(rows)[0, NONFINITE_BIN] == 1


def test_limits_of_types():
    assert limits(torch.float16) == (-14, -24, 16)
    assert limits(torch.bfloat16) == (-126, -133, 128)
