"""Norms, shares and scales against the literal rule, and at their edges."""

import math

import pytest
import torch

from steadygrad.balance.equations import (
    balanced_scales,
    gram,
    norm_sum,
    norms_from_sums,
    shares,
    weighted_sum,
)
from tests.reference.balance import ReferenceBalancer

TIGHT = {"rtol": 1e-13, "atol": 0.0}  # float64, a few operations


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


KINDS = [(item, free) for item in (True, False) for free in (False, True)]


@pytest.mark.parametrize(("per_item", "batch_independent"), KINDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_norms_are_those_of_the_joined_gradient(per_item, batch_independent, ranks):
    blocks = [draw(4, 6, seed=s) for s in range(ranks)]
    sums = sum(norm_sum([b], per_item=per_item) for b in blocks).reshape(1)
    items = torch.tensor(4.0 * ranks, dtype=torch.float64)
    got = norms_from_sums(
        sums, items, per_item=per_item, batch_independent=batch_independent, ranks=ranks
    )
    reference = ReferenceBalancer(
        {"a": 1.0}, per_item=per_item, batch_independent=batch_independent
    )
    expected = reference.norm([[{"a": b.tolist()} for b in blocks]], "a", [4] * ranks)
    torch.testing.assert_close(got, torch.tensor([expected], dtype=torch.float64), **TIGHT)


def test_a_nest_has_the_norm_of_its_concatenation():
    a, b = draw(3, 2, 2), draw(3, 5, seed=1)
    whole = torch.cat([a.flatten(1), b], 1)
    torch.testing.assert_close(norm_sum([a, b], per_item=True), whole.norm(dim=1).sum(), **TIGHT)
    torch.testing.assert_close(norm_sum([a, b], per_item=False), whole.square().sum(), **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inner_products_do_not_overflow_or_vanish(dtype):
    big, small = torch.full((64,), 1024.0, dtype=dtype), torch.full((64,), 2.0**-20, dtype=dtype)
    found = gram([[big], [small]])
    # Powers of two: 2^26, 2^-4 and 2^-34 are exact, and only the middle one is a float16.
    assert found.tolist() == [[2.0**26, 2.0**-4], [2.0**-4, 2.0**-34]]


@pytest.mark.parametrize("per_item", [True, False])
def test_the_range_of_float32_norms(per_item):
    """The module's statement: squares have to be float32's, sums do not."""
    for size, rel in ((1e18, 1e-6), (1e-17, 1e-6)):
        row = torch.full((1, 4), size)
        got = norm_sum([row], per_item=per_item).item()
        assert got == pytest.approx(2 * size if per_item else 4 * size**2, rel=rel)
        pair = norm_sum([row, row], per_item=per_item).item()
        assert pair == pytest.approx(8**0.5 * size if per_item else 8 * size**2, rel=rel)
    assert norm_sum([torch.full((1, 4), 1e20)], per_item=per_item).item() == math.inf
    assert norm_sum([torch.full((1, 4), 1e-24)], per_item=per_item).item() == 0.0
    # Each row's square fits in, but that of both rows together does not.
    big = torch.full((1, 1, 1), 1.5e19)
    assert norm_sum([big, big], per_item=per_item).item() == pytest.approx(
        2**0.5 * 1.5e19 if per_item else 2 * 1.5e19**2, rel=1e-6
    )
    wide = torch.full((1, 4), 1e25, dtype=torch.float64)
    assert norm_sum([wide], per_item=True).item() == pytest.approx(2e25)


def test_one_number_an_item_is_a_norm_an_item():
    y = torch.tensor([3.0, -4.0])
    assert norm_sum([y], per_item=True).item() == 7.0
    assert norm_sum([y], per_item=False).item() == 25.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_norms_do_not_overflow_or_vanish(dtype):
    big, small = torch.full((1, 64), 4e4, dtype=dtype), torch.full((1, 64), 1e-6, dtype=dtype)
    # 1e-6 rounds to one of fp16's subnormals; the norm is that of the rounded numbers.
    for g in (big, small):
        expected = g.double().norm().item()
        assert norm_sum([g], per_item=True).item() == pytest.approx(expected, rel=1e-6)


def test_no_items_have_no_norm():
    empty = torch.zeros(0, 5)
    assert norm_sum([empty], per_item=True).item() == 0.0
    assert norm_sum([empty], per_item=False).item() == 0.0
    zero = torch.zeros(1, dtype=torch.float64)
    got = norms_from_sums(zero, zero[0], per_item=True, batch_independent=False)
    assert math.isnan(got.item())


def test_shares_count_only_the_active():
    amounts = torch.tensor([1.0, 3.0, torch.nan])
    active = torch.tensor([True, True, False])
    assert shares(amounts, active).tolist() == [0.25, 0.75, 0.0]
    assert shares(amounts, torch.zeros(3, dtype=torch.bool)).tolist() == [0.0, 0.0, 0.0]


def test_scales_give_each_its_share_of_the_total():
    averages = torch.tensor([2.0, 0.5, 10.0], dtype=torch.float64)
    weights = torch.tensor([1.0, 3.0, 4.0], dtype=torch.float64)
    targets = shares(weights, torch.tensor([True, True, False]))
    scales = balanced_scales(averages, targets, total_norm=2.0, eps=0.0)
    assert (scales * averages).tolist() == [0.5, 1.5, 0.0]


def test_eps_bounds_the_scale():
    tiny = torch.tensor([1e-30], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    scales = balanced_scales(tiny, one, total_norm=3.0, eps=1e-6)
    assert scales.item() == pytest.approx(3e6)


def test_a_sum_leaves_out_what_is_not_finite():
    good, bad = torch.tensor([1.0, 2.0]), torch.tensor([torch.nan, torch.inf])
    got = weighted_sum([good, bad, None, good], torch.tensor([2.0, 0.0, 9.0, 0.5]))
    assert got.tolist() == [2.5, 5.0]
    assert good.tolist() == [1.0, 2.0]
    assert bad.isnan().any()
    assert weighted_sum([None, None], torch.ones(2)) is None


def test_a_scale_beyond_float16_is_no_obstacle():
    g = torch.full((4,), 2.0**-20, dtype=torch.float16)
    got = weighted_sum([g, g], torch.tensor([2.0**21, 2.0**20], dtype=torch.float64))
    assert got.dtype == torch.float16
    assert got.tolist() == [3.0] * 4


def test_gram_is_the_product_of_stacked_gradients():
    rows = [[draw(3, 2, seed=s), draw(4, seed=9 + s)] for s in range(3)]
    matrix = torch.stack([torch.cat([t.flatten() for t in row]) for row in rows])
    torch.testing.assert_close(gram(rows), matrix @ matrix.T, rtol=1e-12, atol=1e-14)
    rows[1][0] = None
    assert gram([rows[0], [], rows[2]])[1].tolist() == [0.0, 0.0, 0.0]
    matrix[1, :6] = 0
    torch.testing.assert_close(gram(rows), matrix @ matrix.T, rtol=1e-12, atol=1e-14)
