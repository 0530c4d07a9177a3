"""LANS on plain tensors: the passes of a step, on what a block may hold."""

import numpy as np
import pytest
import torch

from steadygrad.formulas.lans import (
    Block,
    apply_,
    coefficients,
    direction_sums,
    trust_ratio,
    update_moments_,
)
from steadygrad.formulas.tensors import square_sums
from tests.reference.lans import Lans

SHAPES = [(5, 3), (7,), (), (4,)]
SHAPE = {"eps": 1e-6, "weight_decay": 0.1, "clip_value": 0.4}


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def block(x, g, m, v, t, ok=True):
    inverse = square_sums(g).rsqrt()
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)
    corrections = [(number(1 - 0.9**t), number(1 - 0.99**t))] * len(x)
    return Block(x, g, m, v, list(inverse.unbind()), corrections, torch.tensor(ok))


def take_step(some, lr=0.05, bounds=(None, None)):
    update_moments_(some, betas=(0.9, 0.99), clip_value=SHAPE["clip_value"])
    by = coefficients(direction_sums(some, **SHAPE), some.ok, lr=lr, beta1=0.9, bounds=bounds)
    apply_(some, by, **SHAPE)


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
        take_step(block(x, g, m, v, t), bounds=bounds)
        reference.step(expected, [t.numpy() for t in g])
    for found, wanted in zip(x, expected, strict=True):
        # 19 steps of rounding in another order.
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_nothing_moves_unless_all_is_finite(bad):
    x, m, v, g = draw(0), draw(1), [t.square() for t in draw(2)], draw(3)
    g[1][2] = bad
    before = [t.clone() for t in (*x, *m, *v)]
    take_step(block(x, g, m, v, 3, ok=False))
    assert all(torch.equal(a, b) for a, b in zip((*x, *m, *v), before, strict=True))


def test_trust_ratio_is_one_where_there_is_nothing_to_compare():
    weight = torch.tensor([2.0, 0.0, 3.0, 0.0])
    direction = torch.tensor([4.0, 5.0, 0.0, 0.0])
    assert trust_ratio(weight, direction).tolist() == [0.5, 1.0, 1.0, 1.0]


def test_coefficients():
    sums = number([[4.0, 4.0, 0.0], [1.0, 16.0, 1.0], [64.0, 0.0, 1.0]])
    by = coefficients(sums, torch.tensor(True), lr=number(0.1), beta1=0.75)
    expected = number([[0.15, 0.0375, 0.075], [0.00625, 0.025, 0.025]])
    found = torch.stack([by.momentum, by.gradient])
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    bounded = coefficients(sums, torch.tensor(True), lr=0.1, beta1=0.75, bounds=(0.5, 1.0))
    # Norms of 2, 2 and 0 become 1, 1 and 0.5.
    torch.testing.assert_close(bounded.momentum, torch.tensor([0.075, 0.01875, 0.0375]).double())
    none = coefficients(sums, torch.tensor(False), lr=0.1, beta1=0.75)
    assert not none.momentum.any()
    assert not none.gradient.any()


def test_direction_sums_add_up_over_shards():
    """Squared norms of parts sum to those of the whole: what sharding stands on."""
    x, m, v, g = ([t[0]] for t in (draw(0), draw(1), [t.square() for t in draw(2)], draw(3)))
    whole = block(x, g, m, v, 5)
    halves = [
        Block(*([t[part] for t in ts] for ts in (x, g, m, v)), *list(vars(whole).values())[4:])
        for part in (slice(0, 2), slice(2, 5))
    ]
    parts = sum(direction_sums(half, **SHAPE) for half in halves)
    torch.testing.assert_close(parts, direction_sums(whole, **SHAPE), rtol=1e-14, atol=0)


def test_moments_stay_below_one():
    """Normalised gradients have elements of at most one, and so have their averages."""
    m, v = [torch.zeros(6).double()], [torch.zeros(6).double()]
    for t in range(1, 50):
        g = [torch.randn(6, generator=torch.Generator().manual_seed(t)).double() * 10.0**t]
        update_moments_(block([torch.ones(6).double()], g, m, v, t), betas=(0.9, 0.99))
        assert m[0].norm() <= 1
        assert v[0].sum() <= 1
