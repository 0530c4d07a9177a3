"""How scales move, against the rule in plain Python; and where measured exponents send them."""

import pytest
import torch

from steadygrad.formulas.exponents import BINS, exponent_histograms
from steadygrad.formulas.loss_scaling import (
    BLIND_STEP,
    Growth,
    followed_shift,
    next_scales,
    relative_shift,
    total_scales,
)
from tests.reference.layerwise import next_scale

RULES = [(2.0, 0.5, 3, 2.0**-10, 2.0**20), (1.7, 0.3, 2, 1.0, 100.0), (1.0, 1.0, 1, 1e-3, 1e9)]


def growth():
    columns = zip(*RULES, strict=True)
    factor, backoff, interval, low, high = (torch.tensor(column) for column in columns)
    wide = (column.double() for column in (factor, backoff, low, high))
    factor, backoff, low, high = wide
    return Growth(factor, backoff, interval.int(), low, high)


def test_scales_move_by_the_rule():
    own, tracker = torch.tensor([8.0, 90.0, 5.0]), torch.zeros(3, dtype=torch.int32)
    expected = [(scale, 0) for scale in own.tolist()]
    draw = torch.Generator().manual_seed(0)
    for _ in range(60):
        found = torch.rand(3, generator=draw) < 0.2
        own, tracker = next_scales(own, tracker, found, growth())
        expected = [
            next_scale(scale, count, bad, *rule)
            for (scale, count), bad, rule in zip(expected, found.tolist(), RULES, strict=True)
        ]
        # Sixty float32 roundings, 2**-24 each, against float64.
        assert own.tolist() == pytest.approx([scale for scale, _ in expected], rel=4e-6)
        assert tracker.tolist() == [count for _, count in expected]


def test_a_scale_does_not_grow_into_infinity():
    rule = growth()._replace(max_scale=torch.full((3,), torch.inf, dtype=torch.float64))
    rule = rule._replace(growth_interval=torch.ones(3, dtype=torch.int32))
    own = torch.tensor([3e38, 3e38, 3e38])
    moved, _ = next_scales(own, torch.zeros(3, dtype=torch.int32), torch.zeros(3) > 0, rule)
    assert torch.equal(moved, own)


def test_totals_multiply_along_the_nesting():
    around = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]) > 0
    totals = total_scales(torch.tensor([2.0, 4.0, 8.0, 16.0]), around)
    assert totals.tolist() == [2.0, 8.0, 64.0, 32.0]


def test_shifts_of_totals_become_shifts_of_own_scales():
    shift, parent = torch.tensor([1.0, 3.0, 3.0, -2.0]), torch.tensor([0, 0, 1, 1])
    own = relative_shift(shift, parent)
    assert own.tolist() == [1.0, 2.0, 0.0, -5.0]


def shift_of(*exponents, zeros=0, infinite=0, underflow=0.1, headroom=4):
    x = [2.0**e for e in exponents] + [0.0] * zeros + [torch.inf] * infinite
    rows = exponent_histograms([torch.tensor(x)]) if x else torch.zeros(1, BINS)
    options = {"underflow": underflow, "headroom": headroom, "dtype": torch.float16}
    return followed_shift(rows, **options).item()


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
