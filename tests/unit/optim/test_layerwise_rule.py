"""LANS on plain tensors: the passes of a step and the columns between them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from steadygrad.optim.layerwise_rule import (
    LANS_DIRECTIONS,
    LANS_PASSES,
    Factors,
    Options,
    coefficients,
    factors,
    inverse_norms,
    trust_ratio,
)
from steadygrad.optim.passes import Bucket
from tests.reference.lans import Lans

SHAPES = [(5, 3), (7,), (), (4,)]
RULE = Options(0.9, 0.99, 1e-6, 0.1, 0.4)


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def batch(x, g, m, v):
    """Buckets of two parameters, those without a gradient left out."""
    places = [[i for i in pair if i < len(x) and g[i] is not None] for pair in ((0, 1), (2, 3))]
    buckets = [
        Bucket(
            own, *([t[i] for i in own] for t in (x, g)), tuple([t[i] for i in own] for t in (m, v))
        )
        for own in places
        if own
    ]
    return SimpleNamespace(weights=x, grads=g, buckets=buckets, tables=(), compiled=False)


def factors_at(some, t, ok=True):
    taken = torch.tensor([ok and g is not None for g in some.grads])
    step = torch.full((len(some.weights),), float(t), dtype=torch.float64)
    return factors(inverse_norms(LANS_PASSES.grad_sq_norms(some)[0]), step, taken, RULE)


def rule_at(lr, bounds=(None, None), rule=RULE):
    low, high = bounds
    return rule._replace(lr=lr, low=low or 0.0, high=high or torch.inf)


def take_step(some, t, *, ok=True, lr=0.05, bounds=(None, None)):
    by = factors_at(some, t, ok)
    sums = LANS_PASSES.move_moments(some, by, RULE)
    LANS_PASSES.move_weights(some, coefficients(sums, by, rule_at(lr, bounds)), RULE)


@pytest.mark.parametrize("bounds", [(None, None), (0.5, 1.5), (0.0, 2.0)], ids=str)
def test_three_passes_are_the_equation(bounds):
    x = draw(0)
    x[3].zero_()
    m, v = ([torch.zeros_like(t) for t in x] for _ in range(2))
    low, high = bounds
    reference = Lans(0.05, (0.9, 0.99), 1e-6, 0.1, low, high, clip_value=0.4)
    expected = [t.numpy().copy() for t in x]
    for t in range(1, 20):
        g = draw(t)
        g[1] *= t % 3  # a block without gradient, now and then
        take_step(batch(x, g, m, v), t, bounds=bounds)
        reference.step(expected, [t.numpy() for t in g])
    for found, wanted in zip(x, expected, strict=True):
        # 19 steps of rounding in another order.
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_nothing_moves_unless_all_is_finite(bad):
    x, m, v, g = draw(0), draw(1), [t.square() for t in draw(2)], draw(3)
    g[1][2] = bad
    before = [t.clone() for t in (*x, *m, *v)]
    take_step(batch(x, g, m, v), 3, ok=False)
    assert all(torch.equal(a, b) for a, b in zip((*x, *m, *v), before, strict=True))


def test_trust_ratio_is_one_where_there_is_nothing_to_compare():
    weight = torch.tensor([2.0, 0.0, 3.0, 0.0])
    direction = torch.tensor([4.0, 5.0, 0.0, 0.0])
    assert trust_ratio(weight, direction).tolist() == [0.5, 1.0, 1.0, 1.0]


def norms_of(*taken):
    ones = torch.ones(3, dtype=torch.float64)
    return Factors(torch.tensor(taken), ones, ones, ones)


def test_coefficients():
    sums = number([[4.0, 4.0, 0.0], [1.0, 16.0, 1.0], [64.0, 0.0, 1.0]])
    rule, all_take = RULE._replace(beta1=0.75), norms_of(True, True, True)
    by = coefficients(sums, all_take, rule_at(number(0.1), rule=rule))
    expected = number([[0.15, 0.0375, 0.075], [0.00625, 0.025, 0.025]])
    found = torch.stack([by.along_m, by.along_g])
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(by.keep, 1 - 0.1 * expected.sum(0), rtol=1e-14, atol=0)
    bounded = coefficients(sums, all_take, rule_at(0.1, (0.5, 1.0), rule))
    # Norms of 2, 2 and 0 become 1, 1 and 0.5.
    torch.testing.assert_close(bounded.along_m, torch.tensor([0.075, 0.01875, 0.0375]).double())
    sums[:, 1] = torch.nan
    some = coefficients(sums, norms_of(True, False, True), rule_at(0.1, rule=rule))
    assert some.along_m.tolist() == [by.along_m[0], 0.0, by.along_m[2]]
    assert some.keep[1] == 1.0


def test_direction_sums_add_up_over_shards():
    """Squared norms of parts sum to those of the whole: what sharding stands on."""
    x, m, v, g = ([t[0]] for t in (draw(0), draw(1), [t.square() for t in draw(2)], draw(3)))
    whole = batch(x, g, m, v)
    by = factors_at(whole, 5)
    halves = [
        batch(*([t[part] for t in ts] for ts in (x, g, m, v))) for part in (slice(2), slice(2, 5))
    ]
    parts = sum(LANS_DIRECTIONS(half, by, RULE) for half in halves)
    torch.testing.assert_close(parts, LANS_DIRECTIONS(whole, by, RULE), rtol=1e-14, atol=0)


def test_moments_stay_below_one():
    """Normalised gradients have elements of at most one, and so have their averages."""
    m, v = [torch.zeros(6).double()], [torch.zeros(6).double()]
    for t in range(1, 50):
        g = [torch.randn(6, generator=torch.Generator().manual_seed(t)).double() * 10.0**t]
        some = batch([torch.ones(6).double()], g, m, v)
        LANS_PASSES.move_moments(some, factors_at(some, t), RULE._replace(clip_value=torch.inf))
        assert m[0].norm() <= 1
        assert v[0].sum() <= 1


def test_a_parameter_without_gradient_is_left_alone():
    x, m, v, g = draw(0), draw(1), [t.square() for t in draw(2)], draw(3)
    g[1] = None
    before = [t[1].clone() for t in (x, m, v)]
    some = batch(x, g, m, v)
    by = factors_at(some, 3)
    sums = LANS_PASSES.move_moments(some, by, RULE)
    LANS_PASSES.move_weights(some, coefficients(sums, by, rule_at(0.05)), RULE)
    assert all(torch.equal(a, b) for a, b in zip((x[1], m[1], v[1]), before, strict=True))
    assert not torch.equal(x[2], draw(0)[2])
    # The others' sums stay in their places.
    assert (sums != 0).any(0).tolist() == [True, False, True, True]
