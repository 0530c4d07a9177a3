"""How scales move, against the rule in plain Python; and where measured exponents send them."""

import pytest
import torch

from steadygrad.scale.equations import (
    BLIND_STEP,
    GrowthRule,
    exponent_histogram,
    followed_shift,
    next_scales,
)
from tests.reference.layerwise import next_scale

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


def shift_of(*exponents, zeros=0, infinite=0, underflow=0.1, headroom=4):
    x = [2.0**e for e in exponents] + [0.0] * zeros + [torch.inf] * infinite
    rows = exponent_histogram(torch.tensor(x))[None]
    return followed_shift(rows, underflow, headroom).item()


def test_follows_what_was_measured():
    # float16: normal from -14 on, infinite at 16; with a headroom of 4 the largest goes to 11.
    assert shift_of(-5, 0, 5) == 0
    assert shift_of(-20, -18, -3) == 14  # starved, up to where the largest is at 11
    assert shift_of(*[-20] + [0] * 30) == 0  # no more starved than accepted
    assert shift_of(-20, -18, 10) == 0  # starved, but there is hardly room
    assert shift_of(0, 12) == 0  # a little into the headroom: slack
    assert shift_of(0, 13) == -2
    assert shift_of(0, 40) == -29
    assert shift_of(0, 3, infinite=1) == -5  # at least 16
    assert shift_of(0, 20, infinite=1) == -9
    assert shift_of(zeros=7) == BLIND_STEP
    assert shift_of() == 0


def test_the_bound_on_underflow_is_that_of_nonzero_values():
    exponents = [-20] * 2 + [0] * 8
    assert shift_of(*exponents, zeros=100, underflow=0.19) == 11
    assert shift_of(*exponents, zeros=100, underflow=0.21) == 0
