"""ScaledAdam's clipping counts the steps of its group, whichever parameters take them."""

import io

import pytest
import torch
from torch import nn

from steadygrad.optim import ScaledAdam
from tests.reference.scaled_adam import Clipper

PERIOD = 12
SHARED = ("model_norms", "model_norm_threshold", "num_clipped", "clipping_step", "skipped")
# Head and body lie in one batch, in two, and beside a parameter without elements.
SHAPES = {"alike": (8,), "scalar": (1,), "other": (2, 3), "empty": (0,)}
# Who is trained at which step: frozen leaders, thawed again, and nobody for a time.
LIVES = {
    "frozen": lambda t: "body" if t >= 20 else "head",
    "thawed": lambda t: "body" if 15 <= t < 40 else "both",
    "nobody": lambda t: "none" if 15 <= t < 40 else "both",
}


def make(shape=(8,), recipe="zipformer", **options):
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=draw)) for s in (shape, (8,))]
    options = {"clipping_scale": 0.9, "clipping_update_period": PERIOD, **options}
    return params, ScaledAdam(params, lr=1e-3, recipe=recipe, **options)


def give(params, trained, step):
    draw = torch.Generator().manual_seed(step)
    for p, name in zip(params, ("head", "body"), strict=True):
        p.requires_grad_(trained in (name, "both"))
        scale = 1.0 + 50.0 * (step >= 30) + step % 3
        p.grad = torch.randn(p.shape, generator=draw) * scale if p.requires_grad else None


def norm_of(optimizer, params):
    """As clipping takes it, in float64."""
    sizes = [optimizer.state[p].get("param_rms", torch.tensor(0.1)).double() for p in params]
    terms = [
        (r * p.grad.double().norm()) ** 2
        for r, p in zip(sizes, params, strict=True)
        if p.grad is not None
    ]
    return float(sum(terms) ** 0.5)


def life(shape, when, steps=60, pause=None):
    params, optimizer = make(shape)
    clipper, clipped = Clipper(0.9, PERIOD), 0
    for step in range(steps):
        if step == pause:
            optimizer = reloaded(optimizer)
        give(params, when(step), step)
        if any(p.requires_grad and p.numel() for p in params):
            # The first step measures sizes; none is remembered of it.
            factor = clipper.factor(norm_of(optimizer, params))
            is_due = clipper.t - 1 in (10, *range(0, 99, PERIOD))
            clipped = (factor < 1) + (0 if is_due else clipped)
        optimizer.step()
        yield optimizer.state[params[0]], clipper, clipped


def reloaded(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = ScaledAdam(optimizer.param_groups[0]["params"], clipping_update_period=PERIOD)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("pause", [None, 25, 45])
@pytest.mark.parametrize("when", LIVES.values(), ids=LIVES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_thresholds_follow_the_groups_steps(shape, when, pause):
    thresholds = set()
    for state, clipper, clipped in life(shape, when, pause=pause):
        assert int(state["clipping_step"]) == clipper.t
        # Norms are float32.
        assert state["model_norm_threshold"].item() == pytest.approx(clipper.threshold, rel=1e-5)
        assert state["num_clipped"] == clipped
        thresholds.add(clipper.threshold)
    assert len(thresholds) > 3


def test_a_skipped_step_does_not_count():
    params, optimizer = make()
    for step in range(9):
        give(params, "both", step)
        if step % 2:
            params[1].grad[0] = torch.inf
        optimizer.step()
    assert optimizer.state[params[0]]["clipping_step"] == 5


def test_a_later_group_has_a_clock_of_its_own():
    params, optimizer = make()
    late = nn.Parameter(torch.ones(4))
    for step in range(20):
        if step == 7:
            optimizer.add_param_group({"params": [late]})
        give(params, "both", step)
        late.grad = torch.ones(4)
        optimizer.step()
    assert [int(optimizer.state[p]["clipping_step"]) for p in (*params, late)] == [20, 20, 13]
    # One threshold from as many of its norms as there are.
    assert 0 < optimizer.state[late]["model_norm_threshold"] < torch.inf


def test_clipping_that_is_turned_on_later_begins_anew():
    params, optimizer = make(clipping_scale=None)
    seen = []
    for step in range(1, 40):
        if step == 2 * PERIOD:
            optimizer.param_groups[0]["clipping_scale"] = 2.0
        give(params, "both", 0)
        optimizer.step()
        seen.append(optimizer.state[params[0]]["model_norm_threshold"].item())
    norm = norm_of(optimizer, params)
    assert seen[: 2 * PERIOD + 9] == [torch.inf] * (2 * PERIOD + 9)
    # Twice, and doubled at first; sizes move a little.
    assert seen[-1] in (pytest.approx(4 * norm, rel=0.1), pytest.approx(2 * norm, rel=0.1))
