"""The clipping threshold is the median of a group's recent norms, but for infinite ones."""

import math

import pytest
import torch

from steadygrad.optim import ScaledAdam
from steadygrad.optim.clipping import Clipping, clip
from tests.covering import covering
from tests.reference.scaled_adam import Clipper

RECIPES = ["zipformer", "stateless7"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("period", [1, 2, 3, 5, 11, 45])
def test_equals_the_reference(period, recipe):
    drawn = torch.randn(100, generator=torch.Generator().manual_seed(0)).exp().tolist()
    values, reference = [*drawn, *[0.0] * 2 * period], Clipper(0.9, period, recipe)
    known = Clipping(torch.zeros(period), torch.tensor(math.inf).double(), torch.zeros(()))
    clipped = 0
    for step, norm in enumerate(values):
        given = torch.tensor(norm), torch.tensor(float(step)), torch.tensor(True)
        known, factor = clip(known, *given, scale=0.9, original=recipe == "stateless7")
        expected = reference.factor(norm)
        # Norms are float32.
        assert factor.item() == pytest.approx(expected, rel=1e-6)
        assert known.threshold.item() == pytest.approx(reference.threshold, rel=1e-6)
        clipped += 0 < expected < 1
    assert 10 < clipped < 100


def test_thresholds_follow_the_groups_steps():
    """Whoever takes them: behind a frozen leader they are those of a group without it."""
    gradients = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    gradients[30:] *= 50
    found = []
    for leaders in ([torch.ones(2, 3)], []):
        p = torch.ones(8, requires_grad=True)
        optimizer = ScaledAdam([*leaders, p], clipping_scale=0.9, clipping_update_period=12)
        seen = []
        for p.grad in gradients:
            optimizer.step()
            state = optimizer.state[p]
            seen.append([float(state[n]) for n in ("model_norm_threshold", "num_clipped")])
        found.append(seen)
    assert found[0] == found[1]
    assert len({threshold for threshold, _ in found[0]}) == 6  # with infinity


# Squares of 100 of them add up to 2.25e38, just below float32's range, and those of two
# parameters to 4.5e38. Of both signs, so that inner products with weights of one are zero.
LARGE = torch.tensor([1.5e18, -1.5e18]).repeat(50)
USUAL = torch.tensor([1.0, -1.0]).repeat(50)


def step(params, optimizer, *gradients):
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient.to(p.dtype)
    optimizer.step()
    return optimizer.state[params[0]]


@covering(
    mode=["fused", "foreach"],
    dtype=[torch.float32, torch.float64, torch.bfloat16],
    recipe=RECIPES,
    at=[2, 4, 6],
)
def test_finite_gradients_of_an_infinite_norm_are_left_out_of_the_history(mode, dtype, recipe, at):
    """A large norm, in a place of its own and as the threshold is taken, is left out whole."""
    params = [torch.ones(100, dtype=dtype, requires_grad=True) for _ in range(2)]
    options = {"clipping_scale": 2.0, "clipping_update_period": 4, "lr": 1e-3, mode: True}
    optimizer = ScaledAdam(params, **options, recipe=recipe)
    for _ in range(at):
        state = step(params, optimizer, USUAL, USUAL)
    before = state["model_norms"].clone()
    threshold = float(state["model_norm_threshold"])
    state = step(params, optimizer, LARGE, LARGE)
    # The step is taken: no gradient is infinite.
    assert optimizer.skipped == 0
    assert state["step"] == at + 1
    assert torch.equal(state["model_norms"], before)
    for _ in range(at + 1, 13):
        state = step(params, optimizer, USUAL, USUAL)
        assert state["model_norms"].isfinite().all()
    found = float(state["model_norm_threshold"])
    assert 0 < found < 1e3
    # Weights, and so the sizes in the norms, have moved by a thousandth a step.
    assert at <= 4 or threshold == pytest.approx(found, rel=0.02)
    # Which still clips what is large but finite: so large a gradient moves as much as the bound.
    assert state["num_clipped"] == 0
    state = step(params, optimizer, LARGE, USUAL)
    assert state["num_clipped"] == 1
    # The same gradient on one parameter has a norm within the range, and is kept.
    assert state["model_norms"][13 % 4] == pytest.approx(1.5e19, rel=0.05)
    assert all(p.isfinite().all() for p in params)
