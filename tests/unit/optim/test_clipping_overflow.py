"""Finite gradients whose joint norm is past float32's range, and ScaledAdam's clipping."""

import pytest
import torch

from steadygrad.optim import ScaledAdam
from tests.covering import covering

PERIOD = 4
# Squares of 100 of them add up to 2.25e38, just below float32's range, and those of two
# parameters to 4.5e38. Of both signs, so that inner products with weights of one are zero.
LARGE = torch.tensor([1.5e18, -1.5e18]).repeat(50)
USUAL = torch.tensor([1.0, -1.0]).repeat(50)
MODES = ["fused", "foreach"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def make(mode, dtype, recipe):
    params = [torch.ones(100, dtype=dtype, requires_grad=True) for _ in range(2)]
    options = {"clipping_scale": 2.0, "clipping_update_period": PERIOD, "lr": 1e-3}
    return params, ScaledAdam(params, **options, recipe=recipe, **{mode: True})


def step(params, optimizer, *gradients):
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient.to(p.dtype)
    optimizer.step()
    return optimizer.state[params[0]]


@covering(mode=MODES, dtype=DTYPES, recipe=["zipformer", "stateless7"], at=[2, 4, 6])
def test_an_infinite_norm_is_left_out_of_the_history(mode, dtype, recipe, at):
    """A large norm, in a place of its own and as the threshold is taken, is left out whole."""
    params, optimizer = make(mode, dtype, recipe)
    for _ in range(at):
        state = step(params, optimizer, USUAL, USUAL)
    before = state["model_norms"].clone()
    threshold = float(state["model_norm_threshold"])
    state = step(params, optimizer, LARGE, LARGE)
    # The step is taken: no gradient is infinite.
    assert optimizer.skipped == 0
    assert state["step"] == at + 1
    assert torch.equal(state["model_norms"], before)
    for _ in range(at + 1, 3 * PERIOD + 1):
        state = step(params, optimizer, USUAL, USUAL)
        assert state["model_norms"].isfinite().all()
    found = float(state["model_norm_threshold"])
    assert 0 < found < 1e3
    # Weights, and so the sizes in the norms, have moved by a thousandth a step.
    assert at <= PERIOD or threshold == pytest.approx(found, rel=0.02)
    # Which still clips what is large but finite: so large a gradient moves as much as the bound.
    assert state["num_clipped"] == 0
    state = step(params, optimizer, USUAL * 1e6, USUAL * 1e6)
    assert state["num_clipped"] == 1
    assert all(p.isfinite().all() for p in params)


@covering(mode=MODES, dtype=DTYPES)
def test_a_norm_within_the_range_is_kept(mode, dtype):
    """The same gradient on one parameter: so it is the joint norm that is left out above."""
    params, optimizer = make(mode, dtype, "zipformer")
    for _ in range(2):
        step(params, optimizer, USUAL, USUAL)
    kept = step(params, optimizer, LARGE, USUAL)["model_norms"]
    # Weights of one have moved by a thousandth or two, and bfloat16 rounds the gradient.
    assert kept[2] == pytest.approx(1.5e19, rel=0.02)
