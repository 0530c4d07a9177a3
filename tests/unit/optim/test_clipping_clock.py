"""ScaledAdam's clipping counts the steps of its group, whichever parameters take them."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

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


OLD = {"file": lambda tmp, optimizer: older(optimizer), "parts": lambda *given: in_parts(*given)}


def older(optimizer):
    """As it was saved before there was a clock."""
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        del state["clipping_step"]
    params = copy.deepcopy(optimizer.param_groups[0]["params"])
    fresh = ScaledAdam(params, clipping_update_period=PERIOD)
    fresh.load_state_dict(saved)
    return params, fresh


def in_parts(tmp, optimizer):
    """The same through torch.distributed.checkpoint, which loads what is there."""
    model = nn.ParameterList(optimizer.param_groups[0]["params"])
    other = copy.deepcopy(model)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    for state in saved["state"].values():
        del state["clipping_step"]
    dcp.save(saved, checkpoint_id=tmp)
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    fresh = ScaledAdam([{"params": [*other], **options}])
    found = get_optimizer_state_dict(other, fresh)
    dcp.load(found, checkpoint_id=tmp, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(other, fresh, found)
    return [*other], fresh


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["zipformer", "stateless7"])
@pytest.mark.parametrize(
    ("how", "stop"), [*(("file", stop) for stop in (0, 1, 2, 11, 30)), ("parts", 11)]
)
def test_an_older_checkpoint_goes_on_to_the_bit(how, stop, recipe, tmp_path):
    params, optimizer = make(recipe=recipe)
    for step in range(stop):
        give(params, "both", step)
        optimizer.step()
    others, other = OLD[how](tmp_path, optimizer)
    for step in range(stop, stop + 30):
        give(params, "both", step)
        give(others, "both", step)
        optimizer.step()
        other.step()
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        for name in SHARED:
            assert torch.equal(optimizer.state[p][name], other.state[q][name])


def test_an_older_checkpoint_with_frozen_leaders_has_the_greatest_count():
    params, optimizer = make()
    for step in range(30):
        give(params, "head" if step < 25 else "body", step)
        optimizer.step()
    _, other = older(optimizer)
    assert {int(state["clipping_step"]) for state in other.state.values()} == {25}


def test_an_older_checkpoint_without_clipping_leaves_it_to_begin_anew():
    params, optimizer = make(clipping_scale=None)
    for step in range(30):
        give(params, "both", step)
        optimizer.step()
    _, other = older(optimizer)
    assert {int(state["clipping_step"]) for state in other.state.values()} == {1}
