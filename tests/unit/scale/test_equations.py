"""Histograms of exponents, the rule by which scales move, and where measurements send them."""

import math

import pytest
import torch

from steadygrad.scale.equations import (
    BINS,
    BLIND_STEP,
    LOWEST,
    NONFINITE_BIN,
    GrowthRule,
    exponent_histogram,
    followed_shift,
    largest_exponents,
    next_scales,
)
from tests.reference.layerwise import histogram, next_scale


def by_exponent(row):
    exponents = [-math.inf, *range(LOWEST, 128), math.inf]
    return {e: int(n) for e, n in zip(exponents, row.tolist(), strict=True) if n}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_counts_are_frexps(dtype):
    """On Python's floats, and after what the type makes of them."""
    draw = torch.Generator().manual_seed(0)
    spread = torch.randint(-40, 30, (400,), generator=draw)
    edges = [0.0, -0.0, 1.0, -2.0, 2.0**-149, 2.0**-126, 2.0**127, 65504.0, 65520.0]
    drawn = torch.ldexp(torch.randn(400, generator=draw), spread)
    x = torch.cat([drawn, torch.tensor([*edges, math.inf, -math.inf, math.nan])]).to(dtype)
    for some in (x, x.reshape(4, -1), x[4:5].squeeze(), torch.empty(0, 3)):
        expected = histogram(some.flatten().double().tolist())
        assert by_exponent(exponent_histogram(some)) == expected


def test_numbers_of_wider_types():
    """float64 beyond float32 counts at the ends; complex numbers count by both parts."""
    x = torch.tensor([1e-300, 1e300], dtype=torch.float64)
    assert by_exponent(exponent_histogram(x)) == {-149: 1, 127: 1}
    assert by_exponent(exponent_histogram(torch.tensor([1 + 4j]))) == {0: 1, 2: 1}


def test_counting_needs_no_host():
    # The meta device has no values: whoever asked for one would fail.
    assert exponent_histogram(torch.ones(3, device="meta")).shape == (BINS,)


def test_largest_exponents_leave_out_what_is_not_finite():
    rows = [torch.tensor([3.0, -9.0, math.inf]), torch.zeros(2), torch.empty(0)]
    histograms = torch.stack([exponent_histogram(row) for row in rows])
    assert largest_exponents(histograms).tolist() == [3.0, -math.inf, -math.inf]
    assert histograms[0, NONFINITE_BIN] == 1


RULES = [(2.0, 0.5, 3, 2.0**-10, 2.0**20), (1.7, 0.3, 2, 1.0, 100.0), (1.0, 1.0, 1, 1e-3, 1e9)]


@pytest.mark.parametrize("rule", RULES)
def test_scales_move_by_the_rule(rule):
    scales, tracker = torch.tensor([8.0, 90.0, 5.0]), torch.zeros(3, dtype=torch.int32)
    fixed = torch.tensor([False, False, True])
    expected = [(scale, 0) for scale in scales.tolist()]
    draw = torch.Generator().manual_seed(0)
    for _ in range(60):
        bad = torch.rand(3, generator=draw) < 0.2
        scales, tracker = next_scales(scales, tracker, bad, fixed, GrowthRule(*rule))
        expected = [
            next_scale(scale, count, hit, *rule)
            for (scale, count), hit in zip(expected, bad.tolist(), strict=True)
        ]
        # Sixty float32 roundings, 2**-24 each, against float64.
        moved = [scale for scale, _ in expected[:2]]
        assert scales.tolist() == [*(pytest.approx(scale, rel=4e-6) for scale in moved), 5.0]
        assert tracker.tolist() == [count for _, count in expected]


def test_a_scale_does_not_grow_into_infinity():
    scales, none = torch.tensor([3e38, 3e38]), torch.zeros(2) > 0
    rule = GrowthRule(2.0, 0.5, 1, 2.0**-126, torch.finfo(torch.float32).max)
    moved, _ = next_scales(scales, torch.zeros(2, dtype=torch.int32), none, none, rule)
    assert torch.equal(moved, scales)


# float16 is normal from -14 on, and infinite at 16; with a headroom of 4 the largest goes to 11.
SHIFTS = {
    "fits": ([-5, 0, 5], {}, 0),
    "starved": ([-20, -18, -3], {}, 14),
    "no more starved than accepted": ([-20] + [0] * 30, {}, 0),
    "starved, but there is hardly room": ([-20, -18, 10], {}, 0),
    "a little into the headroom: slack": ([0, 12], {}, 0),
    "into the headroom": ([0, 13], {}, -2),
    "far too large": ([0, 40], {}, -29),
    "infinite is at least 16": ([0, 3], {"infinite": 1}, -5),
    "infinite, and larger seen": ([0, 20], {"infinite": 1}, -9),
    "zeros alone": ([], {"zeros": 7}, BLIND_STEP),
    "nothing": ([], {}, 0),
    # The bound is on the share of those that are not zero.
    "a fifth, too many": ([-20] * 2 + [0] * 8, {"zeros": 100, "underflow": 0.19}, 11),
    "a fifth, accepted": ([-20] * 2 + [0] * 8, {"zeros": 100, "underflow": 0.21}, 0),
}


@pytest.mark.parametrize("case", SHIFTS)
def test_follows_what_was_measured(case):
    def shift_of(exponents, zeros=0, infinite=0, underflow=0.1):
        x = [2.0**e for e in exponents] + [0.0] * zeros + [torch.inf] * infinite
        return followed_shift(exponent_histogram(torch.tensor(x))[None], underflow, 4).item()

    exponents, options, expected = SHIFTS[case]
    assert shift_of(exponents, **options) == expected
