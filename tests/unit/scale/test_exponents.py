"""Histograms of exponents against frexp on Python's floats, and what a type makes of them."""

import math

import pytest
import torch

from steadygrad.scale.equations import (
    BINS,
    LOWEST,
    NONFINITE_BIN,
    exponent_histogram,
    largest_exponents,
)
from tests.reference.layerwise import histogram


def values(n=400):
    draw = torch.Generator().manual_seed(0)
    spread = torch.randint(-40, 30, (n,), generator=draw)
    drawn = torch.ldexp(torch.randn(n, generator=draw), spread)
    edges = [0.0, -0.0, 1.0, -2.0, 2.0**-149, 2.0**-126, 2.0**127, 65504.0, 65520.0]
    return torch.cat([drawn, torch.tensor([*edges, math.inf, -math.inf, math.nan])])


def by_exponent(row):
    exponents = [-math.inf, *range(LOWEST, 128), math.inf]
    return {e: int(n) for e, n in zip(exponents, row.tolist(), strict=True) if n}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_counts_are_frexps(dtype):
    x = values().to(dtype)
    assert by_exponent(exponent_histogram(x)) == histogram(x.double().tolist())


def test_tensors_may_have_any_shape():
    x = values()
    for some in (x[:4].reshape(2, 2), x[4:5].squeeze(), torch.empty(0, 3)):
        assert torch.equal(exponent_histogram(some), exponent_histogram(some.flatten()))
        assert exponent_histogram(some).sum() == some.numel()


def test_float64_beyond_float32_counts_at_the_ends():
    x = torch.tensor([1e-300, 1e300], dtype=torch.float64)
    assert by_exponent(exponent_histogram(x)) == {-149: 1, 127: 1}


def test_complex_numbers_count_both_parts():
    found = by_exponent(exponent_histogram(torch.tensor([1 + 4j])))
    assert found == {0: 1, 2: 1}


def test_needs_no_host():
    # The meta device has no values: whoever asked for one would fail.
    assert exponent_histogram(torch.ones(3, device="meta")).shape == (BINS,)


def test_largest_exponents_leave_out_what_is_not_finite():
    rows = [torch.tensor([3.0, -9.0, math.inf]), torch.zeros(2), torch.empty(0)]
    histograms = torch.stack([exponent_histogram(row) for row in rows])
    assert largest_exponents(histograms).tolist() == [3.0, -math.inf, -math.inf]
    assert histograms[0, NONFINITE_BIN] == 1
