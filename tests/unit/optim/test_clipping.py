"""The clipping threshold is the median of recent norms, taken without host synchronisation."""

import math

import pytest
import torch

from steadygrad.optim.clipping import EARLY, Clipping, clip, total_norm
from tests.reference.scaled_adam import Clipper

TRUE = torch.tensor(True)
recipes = pytest.mark.parametrize("recipe", ["zipformer", "stateless7"])


def nothing(period: int) -> Clipping:
    return Clipping(torch.zeros(period), torch.tensor(math.inf).double(), torch.zeros(()))


def norms(count: int) -> list[float]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(count, generator=draw).exp().tolist()


def steps(period: int, values: list[float], recipe: str, scale: float = 0.9):
    known = nothing(period)
    for t, norm in enumerate(values):
        given = torch.tensor(norm), torch.tensor(float(t)), TRUE
        known, factor = clip(known, *given, scale=scale, original=recipe == "stateless7")
        yield known, factor


@recipes
@pytest.mark.parametrize("period", [1, 2, 3, 5, 11, 20, 45])
def test_equals_the_reference(period, recipe):
    values, reference = norms(100), Clipper(0.9, period, recipe)
    clipped = 0
    for norm, (known, factor) in zip(values, steps(period, values, recipe), strict=True):
        expected = reference.factor(norm)
        # Norms are float32.
        assert factor.item() == pytest.approx(expected, rel=1e-6)
        assert known.threshold.item() == pytest.approx(reference.threshold, rel=1e-6)
        clipped += expected < 1
    assert 10 < clipped < 100


def test_the_recipe_of_2022_waits_for_a_whole_period():
    first = {}
    for recipe in ("zipformer", "stateless7"):
        factors = [f.item() for _, f in steps(50, [*norms(49), 1e9, 1e9, 1e9], recipe)]
        first[recipe] = next(t for t, f in enumerate(factors) if f < 1)
    assert first["stateless7"] == 50
    assert first["zipformer"] in range(EARLY[0], 50)


@recipes
def test_counts_the_clipped_since_the_last_threshold(recipe):
    values = [1.0] * 12 + [9.0, 1.0, 9.0, 1.0] + [1.0] * 6
    counts = [int(k.clipped) for k, _ in steps(4, values, recipe, scale=2.0)]
    # Taken anew at 16, where the count begins again.
    assert counts[12:16] == [1, 1, 2, 2]
    assert counts[16:] == [0] * 6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.0], ids=str)
@pytest.mark.parametrize("step", [0, 1, 10, 40, 50])
def test_a_step_that_is_not_taken_leaves_everything(bad, step):
    known = [k for k, _ in steps(50, norms(50), "zipformer")][-1]
    given = torch.tensor(bad), torch.tensor(float(step)), torch.tensor(False)
    found, factor = clip(known, *given, scale=0.9, original=False)
    assert torch.equal(found.norms, known.norms)
    assert torch.equal(found.threshold, known.threshold)
    assert torch.equal(found.clipped, known.clipped)
    assert factor.item() == 1.0


@recipes
def test_norms_of_zero_do_no_harm(recipe):
    for known, factor in steps(4, [0.0] * 12, recipe):
        assert 0.0 <= factor.item() <= 1.0
        assert not known.threshold.isnan()
    assert known.threshold.item() == 0.0


@recipes
def test_a_norm_that_overflowed_is_no_nan(recipe):
    """Before there is a threshold it is infinite too; after, nothing of such a step is left."""
    values = [1.0, math.inf, *[1.0] * 4, math.inf]
    factors = [factor.item() for _, factor in steps(4, values, recipe)]
    assert factors[1] == 1.0
    assert factors[6] == 0.0
    assert not any(math.isnan(factor) for factor in factors)


def test_total_norm():
    draw = torch.Generator().manual_seed(0)
    terms = torch.rand(6, generator=draw, dtype=torch.float64)
    shapes = [("torch.float64", n) for n in (3, 2, 3, 1, 2, 2)]
    for dtype in (torch.float32, torch.float64):
        found = total_norm(terms.to(dtype), shapes if dtype is torch.float64 else ())
        assert (found.dtype, found.shape) == (torch.float32, ())
        assert found.item() == pytest.approx(math.sqrt(terms.sum()), rel=1e-6)


def test_total_norm_of_float64_rounds_after_every_shape():
    # One and a little: float32 forgets each of the small ones, unless a shape has them together.
    terms = torch.tensor([1.0, *[2.0**-24] * 4], dtype=torch.float64)
    apart = total_norm(terms, [("f", n) for n in range(5)])
    together = total_norm(terms, [("f", 0), *[("f", 1)] * 4])
    assert apart.item() == 1.0
    assert together.item() > 1.0


def test_an_infinite_norm_without_a_threshold_scales_nothing():
    """Infinity over infinity is no factor; a norm may overflow where each gradient is finite."""
    known = Clipping(torch.zeros(5), torch.tensor(torch.inf), torch.zeros(()))
    _, factor = clip(
        known,
        torch.tensor(torch.inf),
        torch.tensor(3.0),
        torch.tensor(True),
        scale=2.0,
        original=True,
    )
    assert factor == 1
