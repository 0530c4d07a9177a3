"""The clipping threshold is the median of a group's recent norms, whoever of it takes the steps."""

import math

import pytest
import torch
from torch import nn

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


PERIOD = 12
# Head and body lie in one batch, in two, and beside a parameter without elements.
SHAPES = {"alike": (8,), "scalar": (1,), "other": (2, 3), "empty": (0,)}
# Who is trained at which step: frozen leaders, thawed again, and nobody for a time.
LIVES = {
    "frozen": lambda t: "body" if t >= 20 else "head",
    "thawed": lambda t: "body" if 15 <= t < 40 else "both",
    "nobody": lambda t: "none" if 15 <= t < 40 else "both",
}


def give(params, trained, step):
    draw = torch.Generator().manual_seed(step)
    for p, name in zip(params, ("head", "body"), strict=True):
        p.requires_grad_(trained in (name, "both"))
        scale = 1.0 + 50.0 * (step >= 30) + step % 3
        p.grad = torch.randn(p.shape, generator=draw) * scale if p.requires_grad else None


def norm_of(optimizer, params):
    """As clipping takes it, in float64."""
    terms = [
        (optimizer.state[p].get("param_rms", torch.tensor(0.1)).double() * p.grad.double().norm())
        for p in params
        if p.grad is not None
    ]
    return float(sum(term**2 for term in terms) ** 0.5)


@covering(shape=SHAPES, when=LIVES)
def test_thresholds_follow_the_groups_steps(shape, when):
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=draw)) for s in (shape, (8,))]
    optimizer = ScaledAdam(params, lr=1e-3, clipping_scale=0.9, clipping_update_period=PERIOD)
    clipper, clipped, thresholds = Clipper(0.9, PERIOD), 0, set()
    for step in range(60):
        give(params, when(step), step)
        if any(p.requires_grad and p.numel() for p in params):
            factor = clipper.factor(norm_of(optimizer, params))
            is_due = clipper.t - 1 in (10, *range(0, 99, PERIOD))
            clipped = (factor < 1) + (0 if is_due else clipped)
        optimizer.step()
        state = optimizer.state[params[0]]
        assert int(state["clipping_step"]) == clipper.t
        # Norms are float32.
        assert state["model_norm_threshold"].item() == pytest.approx(clipper.threshold, rel=1e-5)
        assert state["num_clipped"] == clipped
        thresholds.add(clipper.threshold)
    assert len(thresholds) > 3


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
