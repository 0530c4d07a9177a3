"""Sketches against their definition: every sign, shards, micro-batches, types, and the variance."""

import math

import numpy as np
import pytest
import torch

from steadygrad.trace.equations import PROJECTIONS, distance, signs
from steadygrad.trace.sketches import Key, Sketches
from tests.reference.sketches import deviation, enumerated, projections, sign, variance

KEY = Key("weight", "a")
# Terms of a projection are added up in any order: a few roundings of the largest.
CLOSE = {"rel": 1e-5, "abs": 1e-5}


def sketch(*tensors, **options):
    sketches = Sketches()
    for tensor in tensors:
        sketches.take(KEY, tensor, **options)
    ((_, one, row),) = sketches.numbers()
    return one, row[:PROJECTIONS], row[PROJECTIONS:]


@pytest.mark.parametrize(
    ("x", "matrix"),
    [
        (torch.randn(5, 7), lambda x: x),
        (torch.randn(6), lambda x: x[:, None]),
        (torch.randn(()), lambda x: x.reshape(1, 1)),
        (torch.randn(3, 2, 4, dtype=torch.float64), lambda x: x.reshape(3, 8)),
        (torch.randn(4, 3).to(torch.bfloat16), lambda x: x),
        (torch.randint(-9, 9, (4, 3)), lambda x: x),
        (torch.tensor([[True, False]]), lambda x: x),
        (torch.randn(2, 3, dtype=torch.complex64), lambda x: torch.view_as_real(x).reshape(2, 6)),
        (torch.randn(3, 5).T, lambda x: x),
    ],
    ids=["matrix", "vector", "number", "cube", "bf16", "whole", "bool", "complex", "transposed"],
)
def test_the_definition(x, matrix):
    one, z, (square, bad) = sketch(x)
    plain = matrix(x).double().numpy()
    assert z == pytest.approx(projections(plain), **CLOSE)
    assert square == pytest.approx((plain**2).sum(), rel=1e-5)
    assert bad == 0
    assert one.count == x.numel()


def test_signs_are_those_of_places_beyond_32_bits():
    places = [0, 1, 77, 2**31, 2**33 + 5]
    found = signs(torch.tensor(places), "row", torch.float64)
    assert found.tolist() == [[sign(p, 0x9E3779B9, j) for j in range(16)] for p in places]


def test_long_tensors_are_taken_in_pieces(monkeypatch):
    x = torch.randn(40, 11)
    whole = sketch(x)[1]
    monkeypatch.setattr("steadygrad.trace.sketches._CHUNK", 32)
    assert sketch(x)[1] == pytest.approx(whole, **CLOSE)
    assert sketch(x)[2] == pytest.approx(sketch(x.double())[2], rel=1e-5)


def test_a_sparse_gradient_has_the_dense_ones_projections():
    table = torch.nn.Embedding(9, 3, sparse=True)
    table(torch.tensor([4, 1, 4, 8])).sum().backward()
    assert not table.weight.grad.is_coalesced()
    _, z, rest = sketch(table.weight.grad)
    _, dense, other = sketch(table.weight.grad.to_dense())
    assert z == pytest.approx(dense, **CLOSE)
    assert rest == pytest.approx(other, **CLOSE)


def test_micro_batches_add_up_in_any_cut_and_order():
    x = torch.randn(6, 3, 4)
    one, z, rest = sketch(x, batch=0)
    assert z == pytest.approx(projections(x.sum(0)), **CLOSE)
    assert one.rows == 6
    cut, other, squares = sketch(x[4:], x[:1], x[1:4], batch=0)
    assert other == pytest.approx(z, **CLOSE)
    assert squares == pytest.approx(rest, rel=1e-5)
    assert (cut.rows, cut.count) == (one.rows, one.count)


def test_the_batch_may_be_another_dimension():
    x = torch.randn(3, 6, 4)
    assert sketch(x, batch=1)[1] == pytest.approx(projections(x.sum(1)), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_what_is_not_finite_is_counted_and_has_its_place(dtype):
    x = torch.tensor([1.0, math.nan, math.inf, 2.0, -math.inf], dtype=dtype)
    _, z, rest = sketch(x)
    _, plain, other = sketch(torch.tensor([1.0, 0.0, 1.0, 2.0, -1.0], dtype=dtype))
    assert (z, rest, other[1]) == (plain, [other[0], 3], 0)


def test_squares_beyond_float32():
    x = torch.tensor([[1e30, -3e38]])
    _, z, (square, bad) = sketch(x)
    assert z == pytest.approx(projections(x.double()), rel=1e-5)
    assert (square, bad) == (pytest.approx(9e76, rel=1e-5), 0)


@pytest.mark.parametrize("tensor", [torch.empty(0, 3), torch.empty(2, device="meta")])
def test_nothing_to_look_at(tensor):
    sketches = Sketches()
    sketches.take(KEY, tensor)
    assert [row for _, _, row in sketches.numbers()] in ([], [[0.0] * 18])


def test_autocast_does_not_reach_a_sketch():
    x = torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sketch(x)[1] == pytest.approx(projections(x), **CLOSE)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 6), (6, 1), (4, 5)])
def test_the_variance_by_all_signs(shape):
    x = np.random.default_rng(0).normal(size=shape)
    mean, spread = enumerated(x)
    assert mean == pytest.approx((x**2).sum())
    assert spread == pytest.approx(variance(x))


def test_the_distance_is_known_to_within_a_third():
    """Over many pairs the estimate has the mean and the spread of the equations."""
    generator = torch.Generator().manual_seed(0)
    place = torch.randint(2**40, (400, 2), generator=generator)
    x = torch.randn(24, 24, generator=generator, dtype=torch.float64)
    shares = []
    for row, column in place.tolist():
        u = signs(torch.arange(row, row + 24), "row", x.dtype)
        v = signs(torch.arange(column, column + 24), "column", x.dtype)
        z = ((x @ v) * u).sum(0)
        shares.append(float(z.square().mean() / x.square().sum()))
    # Of 400 estimates: four standard errors of a mean and of a standard deviation.
    spread = deviation(x.numpy())
    assert np.mean(shares) == pytest.approx(1, abs=4 * spread / 20)
    assert np.std(shares) == pytest.approx(spread, rel=0.3)


def test_a_distance_of_projections():
    x, y = torch.randn(30, 20), torch.randn(30, 20)
    apart = distance(sketch(x)[1], sketch(y)[1])
    assert apart == pytest.approx(distance(sketch(x - y)[1], [0.0] * 16), rel=1e-5)
    assert apart == pytest.approx(float((x - y).norm()), rel=0.5)
