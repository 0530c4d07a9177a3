"""Norms, sums and inner products at their edges, and against the literal rule for several ranks."""

import math

import pytest
import torch

from steadygrad.balance.equations import gram, norm_sum, norms_from_sums, shares, weighted_sum
from tests.reference.balance import ReferenceBalancer
from tests.unit.balance.problems import draw

TIGHT = {"rtol": 1e-13, "atol": 0.0}  # float64, a few operations
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@pytest.mark.parametrize("per_item", [True, False])
@pytest.mark.parametrize("batch_independent", [True, False])
def test_norms_are_those_of_the_joined_gradient(per_item, batch_independent):
    kind = {"per_item": per_item, "batch_independent": batch_independent}
    blocks = [draw(4, 6, seed=s) for s in range(3)]
    sums = sum(norm_sum([b], per_item=per_item) for b in blocks).reshape(1)
    got = norms_from_sums(sums, torch.tensor(12.0, dtype=torch.float64), ranks=3, **kind)
    reference = ReferenceBalancer({"a": 1.0}, **kind)
    expected = reference.norm([[{"a": b.tolist()} for b in blocks]], "a", [4] * 3)
    torch.testing.assert_close(got, torch.tensor([expected], dtype=torch.float64), **TIGHT)


@HALVES
def test_half_precision_inner_products_do_not_overflow_or_vanish(dtype):
    big, small = torch.full((64,), 1024.0, dtype=dtype), torch.full((64,), 2.0**-20, dtype=dtype)
    found = gram([[big], [small]])
    # Powers of two: 2^26, 2^-4 and 2^-34 are exact, and only the middle one is a float16.
    assert found.tolist() == [[2.0**26, 2.0**-4], [2.0**-4, 2.0**-34]]


@HALVES
@pytest.mark.parametrize("size", [4e4, 1e-6])
def test_half_precision_norms_do_not_overflow_or_vanish(dtype, size):
    # 1e-6 rounds to one of fp16's subnormals; the norm is that of the rounded numbers.
    gradient = torch.full((1, 64), size, dtype=dtype)
    expected = gradient.double().norm().item()
    for per_item, power in ((True, 1), (False, 2)):
        found = norm_sum([gradient], per_item=per_item).item()
        assert found == pytest.approx(expected**power, rel=1e-6)


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


def test_no_items_have_no_norm():
    for per_item in (True, False):
        assert norm_sum([torch.zeros(0, 5)], per_item=per_item).item() == 0.0
    zero = torch.zeros(1, dtype=torch.float64)
    got = norms_from_sums(zero, zero[0], per_item=True, batch_independent=False)
    assert math.isnan(got.item())


def test_shares_count_only_the_active():
    amounts = torch.tensor([1.0, 3.0, torch.nan])
    active = torch.tensor([True, True, False])
    assert shares(amounts, active).tolist() == [0.25, 0.75, 0.0]
    assert shares(amounts, torch.zeros(3, dtype=torch.bool)).tolist() == [0.0, 0.0, 0.0]


def test_a_sum_leaves_out_what_is_not_finite_and_changes_nothing():
    good, bad = torch.tensor([1.0, 2.0]), torch.tensor([torch.nan, torch.inf])
    got = weighted_sum([good, bad, None, good], torch.tensor([2.0, 0.0, 9.0, 0.5]))
    assert got.tolist() == [2.5, 5.0]
    assert good.tolist() == [1.0, 2.0]
    assert bad.isnan().any()
    assert weighted_sum([None, None], torch.ones(2)) is None


def test_gram_is_the_product_of_stacked_gradients():
    rows = [[draw(3, 2, seed=s), draw(4, seed=9 + s)] for s in range(3)]
    matrix = torch.stack([torch.cat([t.flatten() for t in row]) for row in rows])
    torch.testing.assert_close(gram(rows), matrix @ matrix.T, rtol=1e-12, atol=1e-14)
    rows[1][0] = None
    assert gram([rows[0], [], rows[2]])[1].tolist() == [0.0, 0.0, 0.0]
    matrix[1, :6] = 0
    torch.testing.assert_close(gram(rows), matrix @ matrix.T, rtol=1e-12, atol=1e-14)
