"""The clipping threshold is the median of a group's recent norms, whoever of it takes the steps."""

import io
import math

import pytest
import torch
from torch import nn

from steadygrad.optim import ScaledAdam
from steadygrad.optim.clipping import Clipping, clip, total_norm
from tests.covering import covering
from tests.reference.scaled_adam import Clipper

recipes = pytest.mark.parametrize("recipe", ["zipformer", "stateless7"])


def steps(period, values, recipe, scale):
    known = Clipping(torch.zeros(period), torch.tensor(math.inf).double(), torch.zeros(()))
    for t, norm in enumerate(values):
        given = torch.tensor(norm), torch.tensor(float(t)), torch.tensor(True)
        known, factor = clip(known, *given, scale=scale, original=recipe == "stateless7")
        yield known, factor.item()


@recipes
@pytest.mark.parametrize("period", [1, 2, 3, 5, 11, 20, 45])
def test_equals_the_reference(period, recipe):
    drawn = torch.randn(100, generator=torch.Generator().manual_seed(0)).exp().tolist()
    values, reference = [*drawn, *[0.0] * 2 * period], Clipper(0.9, period, recipe)
    clipped = 0
    for norm, (known, factor) in zip(values, steps(period, values, recipe, 0.9), strict=True):
        expected = reference.factor(norm)
        # Norms are float32.
        assert factor == pytest.approx(expected, rel=1e-6)
        assert known.threshold.item() == pytest.approx(reference.threshold, rel=1e-6)
        clipped += 0 < expected < 1
    assert 10 < clipped < 100


@recipes
def test_counts_the_clipped_since_the_last_threshold(recipe):
    values = [1.0] * 12 + [9.0, 1.0, 9.0, 1.0] + [1.0] * 6
    counts = [int(known.clipped) for known, _ in steps(4, values, recipe, 2.0)]
    # Taken anew at 16, where the count begins again.
    assert counts[12:16] == [1, 1, 2, 2]
    assert counts[16:] == [0] * 6


@recipes
def test_a_norm_that_overflowed_is_no_nan(recipe):
    """Before there is a threshold it is infinite too; after, nothing of such a step is left."""
    values = [1.0, math.inf, *[1.0] * 4, math.inf]
    factors = [factor for _, factor in steps(4, values, recipe, 0.9)]
    assert (factors[1], factors[6]) == (1.0, 0.0)
    assert not any(map(math.isnan, factors))


def test_the_total_norm_of_float64_rounds_after_every_shape():
    # One and a little: float32 forgets each of the small ones, unless a shape has them together.
    terms = torch.tensor([1.0, *[2.0**-24] * 4], dtype=torch.float64)
    apart = total_norm(terms, [("f", n) for n in range(5)])
    together = total_norm(terms, [("f", 0), *[("f", 1)] * 4])
    assert apart.item() == 1.0 < together.item()
    assert apart.dtype is together.dtype is torch.float32


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


def reloaded(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = ScaledAdam(optimizer.param_groups[0]["params"], clipping_update_period=PERIOD)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@covering(shape=SHAPES, when=LIVES, pause=[None, 25, 45])
def test_thresholds_follow_the_groups_steps(shape, when, pause):
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=draw)) for s in (shape, (8,))]
    optimizer = ScaledAdam(params, lr=1e-3, clipping_scale=0.9, clipping_update_period=PERIOD)
    clipper, clipped, thresholds = Clipper(0.9, PERIOD), 0, set()
    for step in range(60):
        if step == pause:
            optimizer = reloaded(optimizer)
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
