"""ScaledAdam on plain tensors: sizes, factors, and the update."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from steadygrad.optim.passes import Bucket
from steadygrad.optim.scaled_adam_rule import (
    Rule,
    Sizes,
    StepScales,
    finite,
    needs_products,
    remembered,
    size_step,
    step_scales,
    sums,
    update,
)
from tests.reference import scaled_adam as reference

NEW = Rule(0.1, (0.9, 0.98), 1e-8, 0.1, 1e-5, 3.0, 10.0, 4, original=False)
OLD = replace(NEW, original=True)
rules = pytest.mark.parametrize("rule", [NEW, OLD], ids=["zipformer", "stateless7"])
TRUE, FALSE = torch.tensor([True]), torch.tensor([False])


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def steps_at(t, count):
    return torch.full((count,), float(t), dtype=torch.float64)


def batch(p, g, delta, v):
    buckets = [
        Bucket([i], [p[i]], [g[i]], tuple([t[i]] for t in (delta, v))) for i in range(len(p))
    ]
    return SimpleNamespace(
        weights=p, moments=(delta, v), buckets=buckets, tables=(), compiled=False
    )


@pytest.mark.parametrize("needed", [[True, False], [False, False]], ids=str)
def test_sums_are_those_of_the_originals_loop(needed):
    p, g = (torch.arange(1.0, 7).view(2, 3), torch.ones(2, 3).half())
    expected = torch.tensor([[6.0, 6], [21, -21], [91, 91]])
    some = batch([p, p], [g, -g], [p, p], [p, p])
    found = sums(some, (torch.tensor(needed),))
    if needed == [False, False]:
        expected[1:] = 0  # the weights are not read
    # A norm is squared again: float32 roundings.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("period", [1, 4])
def test_products_are_needed_at_the_first_step_and_at_size_steps(period):
    found = [bool(needs_products(steps_at(t, 1), replace(NEW, period=period))) for t in range(8)]
    expected = {1: [True] * 8, 4: [True, False, False, True, False, False, False, True]}
    assert found == expected[period]


def test_sums_that_overflow_stop_a_step_where_they_are_used():
    rows = torch.tensor([[1.0, 1.0, torch.inf], [1e30, 1e30, 1.0], [1.0, torch.nan, 1.0]])
    needed = torch.tensor([True, False, False])
    assert finite(rows, needed, torch.float32, 4).tolist() == [False, True, False]
    assert finite(rows[:, :1].double(), needed[:1], torch.float64, 4).tolist() == [True]


def test_squares_that_are_finite_may_overflow_in_their_sum():
    """Eight squares of 9e18 are more than float32 holds, and four are not."""
    rows = torch.tensor([[1.0], [9e18], [1.0]])
    assert [finite(rows, TRUE, torch.float32, period).item() for period in (2, 4)] == [True, False]
    kept = [remembered(torch.zeros(1, p), rows[1], steps_at(0, 1), TRUE)[0, 0] for p in (2, 4)]
    assert kept == [rows[1], 0.0]
    ring = remembered(torch.full((1, 4), 6e18), torch.tensor([6e18]), steps_at(3, 1), TRUE)
    assert ring.min() > 0
    assert ring.square().mean(1).isfinite()


def test_the_last_gradients_of_sizes_are_remembered():
    ring = torch.zeros(3, 4)
    h = torch.tensor([2.0, 1e30, 5.0])
    found = remembered(ring, h, steps_at(6, 3), torch.tensor([True, True, False]))
    # One whose square overflows counts as zero; one that is not taken is not remembered.
    assert found.tolist() == [[0, 0, 2, 0], [0] * 4, [0] * 4]


@rules
def test_sizes_are_learned_as_in_the_reference(rule):
    count, period = 3, rule.period
    draw = torch.Generator().manual_seed(0)
    known = Sizes(vector(0, 0, 0), vector(0, 0, 0), torch.zeros(count, period).double())
    slow = reference.ScaledAdam(
        0.1, recipe="stateless7" if rule.original else "zipformer", size_update_period=period
    )
    states = [reference.new_state(torch.ones(2).numpy(), period) for _ in range(count)]
    for t in range(40):
        h = torch.randn(count, generator=draw).double() * 10 ** (t % 5 - 2)
        # The last parameter is too large, the first too small, for a while.
        rms = vector(1e-6 if t < 20 else 0.1, 0.5, 5.0 if t > 10 else 2.999)
        known, size = size_step(known, h, rms, steps_at(t, count), TRUE, rule)
        ring = remembered(known.gradients, h, steps_at(t, count), TRUE)
        known = replace(known, gradients=ring)
        slow.t = t
        for i, state in enumerate(states):
            state["ring"][t % period] = h[i].item()
            turn = t % period == period - 1
            if turn or t == 0:
                state["rms"] = rms[i].item()
            expected = slow.size_step(state) if turn and t else 0.0
            assert size[i].item() == pytest.approx(expected, rel=1e-12)
            assert known.rms[i].item() == state["rms"]
            assert known.mean_square[i].item() == pytest.approx(state["q"], rel=1e-12)


@rules
def test_a_step_not_taken_keeps_the_sizes(rule):
    known = Sizes(vector(0.5), vector(2.0), vector(1.0, 2.0, 3.0, 4.0)[None])
    for t in (0, 2, 3):
        found, size = size_step(known, vector(math.nan), vector(9.0), steps_at(t, 1), FALSE, rule)
        assert all(torch.equal(getattr(found, name), kept) for name, kept in vars(known).items())
        assert size.item() == 0.0


def size_at(rule, h, rms):
    ring = torch.full((1, 4), h).double()
    known = Sizes(vector(rms), vector(h**2), ring)
    return size_step(known, vector(h), vector(rms), steps_at(7, 1), TRUE, rule)[1].item()


def test_a_size_step_has_bounds():
    fast = replace(NEW, lr=10.0)
    assert size_at(fast, 1.0, 0.5) == -0.1
    assert size_at(fast, -1.0, 0.5) == 0.1
    # No further than the greatest size, and back to it from beyond.
    assert size_at(fast, -1.0, 2.9) == pytest.approx(0.1 / 2.9)
    assert size_at(fast, -1.0, 4.0) == pytest.approx(-0.25)
    assert size_at(fast, 1.0, 1e-6) == 0.0


def test_a_size_step_of_2022_shrinks_what_is_too_large():
    assert size_at(OLD, -1.0, 3.1) == pytest.approx(-0.1 * 0.1 * 4)
    assert size_at(OLD, 1.0, 1e-6) == 0.0


@rules
def test_a_parameter_of_zeros_has_no_size_step(rule):
    assert size_at(rule, 0.0, 0.0) == 0.0


@rules
@pytest.mark.parametrize("t", [0, 1, 100, 227, 228, 5000])
def test_step_scales(rule, t):
    correction = 1 - 0.98 ** (t + 1)
    scalar = step_scales(steps_at(t, 2), None, one(0.5)[0], TRUE, rule)
    assert scalar.weight.tolist() == [0.0, 0.0]
    assert scalar.gradient.tolist() == pytest.approx([-0.01, -0.01], rel=1e-15)
    # The recipe of 2022 corrects scalars for ever.
    corrected = 1 / correction if rule.original or correction < 0.99 else 1.0
    assert scalar.second_moment.tolist() == pytest.approx([corrected] * 2, rel=1e-12)
    known = vector(0.5, 1e-9), vector(0.3, 0)
    tensor = step_scales(steps_at(t, 2), known, one(0.5)[0], TRUE, rule)
    corrected = 1 / correction if correction < 0.99 else 1.0
    assert tensor.second_moment.tolist() == pytest.approx([corrected] * 2, rel=1e-12)
    assert tensor.gradient.tolist() == pytest.approx([-0.05, -1e-6], rel=1e-12)
    assert torch.equal(tensor.weight, vector(0.3, 0))
    assert tensor.clip.tolist() == [0.5, 0.5]


def one(value):
    return torch.tensor([value], dtype=torch.float64)


def options(rule):
    return rule.update_options(is_scalar=False)


def start(bad=0.0):
    g = vector(1.0 + bad, -4.0)
    return batch([vector(2.0, 3.0)], [g], [vector(0.5, -0.5)], [vector(0.0, 9.0)])


def test_the_update_by_hand():
    some = start()
    by = StepScales(TRUE, one(0.5), one(2.0), one(-0.1), one(0.25))
    # The product is that of the weights before the update.
    assert update(some, by, options(replace(NEW, eps=1.0))).tolist() == [[2.0 - 12.0]]
    v = [0.02 * 0.25, 0.98 * 9 + 0.02 * 4]
    step = [-0.1 * g / (math.sqrt(2 * x) + 1) for g, x in zip((0.5, -2.0), v, strict=True)]
    before = zip((0.5, -0.5), step, (2.0, 3.0), strict=True)
    delta = [0.9 * d + 0.1 * (s + 0.25 * p) for d, s, p in before]
    torch.testing.assert_close(some.moments[1][0], vector(*v), rtol=1e-14, atol=0)
    torch.testing.assert_close(some.moments[0][0], vector(*delta), rtol=1e-14, atol=0)
    expected = vector(2.0 + delta[0], 3.0 + delta[1])
    torch.testing.assert_close(some.weights[0], expected, rtol=1e-14, atol=0)


@rules
@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0], ids=str)
def test_nothing_moves_unless_the_step_is_taken(rule, bad):
    some, before = start(bad), start()
    by = StepScales(FALSE, one(1.0), one(1.0), one(-0.1), one(0.0))
    update(some, by, options(rule))
    assert torch.equal(some.weights[0], before.weights[0])
    for found, expected in zip(some.moments, before.moments, strict=True):
        assert torch.equal(found[0], expected[0])


@rules
def test_a_weight_that_is_not_finite_does_not_reach_the_averages(rule):
    some = start()
    some.weights[0][0] = math.nan
    update(some, StepScales(TRUE, one(1.0), one(1.0), one(-0.1), one(0.0)), options(rule))
    assert some.moments[0][0].isfinite().all()


@pytest.mark.parametrize(("rule", "expected"), [(NEW, 10.0), (OLD, 10.45)])
def test_when_a_scalar_is_bounded(rule, expected):
    """Now after the step; in 2022 before it, so that a scalar could lie past its bound."""
    p = one(20.0)
    some = batch([p], [one(0.0)], [one(0.5)], [one(0.0)])
    by = StepScales(TRUE, one(1.0), one(1.0), one(-0.1), one(0.0))
    update(some, by, rule.update_options(is_scalar=True))
    assert p.item() == pytest.approx(expected)
