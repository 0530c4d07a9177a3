"""The check of sums against the literal definition."""

import pytest
import torch

from steadygrad.noise.equations import is_altered
from tests.reference import summed_parts as reference

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def drawn(seed, m, dtype, mean=0.0):
    generator = torch.Generator().manual_seed(seed)
    return list((torch.randn(m, 40, generator=generator, dtype=torch.float64) + mean).to(dtype))


def judged(parts, gradient):
    rows = torch.stack([part.double() for part in parts])
    unit = max(torch.finfo(gradient.dtype).eps / 2, 2**-48)
    return bool(is_altered(rows.sum(0), gradient.double(), reference.running_squares(rows), unit))


@pytest.mark.few(9)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("m", [2, 8, 64])
def test_a_sum_with_its_roundings_is_no_alteration(dtype, mean, m):
    for seed in range(200):
        parts = drawn(seed, m, dtype, mean)
        gradient = reference.accumulated(parts, dtype)
        assert not reference.is_altered(parts, gradient)
        assert not judged(parts, gradient), seed


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "change",
    [lambda g: g * 0.8, lambda g: g / 2, lambda g: g * 1024, lambda g: g + 0.5 * g.flip(0)],
    ids=["clipped", "divided", "scaled", "left over"],
)
def test_every_alteration_is_noticed(dtype, change):
    for seed in range(200):
        parts = drawn(seed, 4, dtype)
        gradient = change(reference.accumulated(parts, dtype)).to(dtype)
        assert reference.is_altered(parts, gradient)
        assert judged(parts, gradient), seed


def test_between_processes_any_order_of_additions_is_allowed():
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        own = [part.bfloat16() for part in drawn(seed, 8, torch.float64, mean=seed % 3)]
        order = torch.randperm(8, generator=generator).tolist()
        found = reference.accumulated([own[i] for i in order], torch.bfloat16).double()
        squares = sum(reference.running_squares(part.double()[None]) for part in own)
        seen = torch.stack(own).double().sum(0)
        assert not is_altered(seen, found, squares, 2**-8, processes=8)
        assert is_altered(seen, found / 2, squares, 2**-8, processes=8)


def test_parts_that_are_not_finite_are_no_alteration():
    rows = torch.tensor([[1.0, torch.inf], [1.0, 1.0]])
    assert not is_altered(
        rows.sum(0), torch.tensor([2.0, 2.0]), reference.running_squares(rows), 1e-7
    )
