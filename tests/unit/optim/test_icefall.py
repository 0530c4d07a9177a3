"""A run goes on from icefall's checkpoint as icefall itself would have gone on."""

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.optim import ScaledAdam
from tests.contracts.problems import assert_same, snapshot
from tests.golden.trajectories import HERE, Trajectory


def start(recipe="zipformer"):
    golden = Trajectory.read(f"icefall_checkpoint-{recipe}")
    saved = torch.load(HERE / f"icefall_checkpoint-{recipe}.pt", weights_only=True)
    parameters = {name: saved["model"][name].clone().requires_grad_() for name in golden.names}
    return golden, saved["optimizer"], parameters


@pytest.mark.parametrize("recipe", ["stateless7", "zipformer"])
def test_goes_on_where_icefall_stopped(recipe):
    golden, saved, parameters = start(recipe)
    optimizer = ScaledAdam(parameters.values(), **golden.config["kwargs"], recipe=recipe)
    with pytest.raises(InputError, match="load_icefall_state_dict"):
        optimizer.load_state_dict(saved)
    optimizer.load_icefall_state_dict(saved)
    steps = range(golden.config["saved_after"], golden.config["steps"])
    # float32 sums in another order; without the checkpoint's state it is off by 1e-2.
    assert golden.follow(optimizer, parameters, steps) < 2e-5


def test_a_checkpoint_without_clipping_keeps_the_own_record():
    _, saved, parameters = start()
    for state in saved["state"].values():
        for name in ("model_norms", "model_norm_threshold", "num_clipped"):
            state.pop(name, None)
    optimizer = ScaledAdam(parameters.values(), clipping_scale=2.0)
    optimizer.load_icefall_state_dict(saved)
    state = optimizer.state[parameters["w1"]]
    assert state["model_norm_threshold"] == torch.inf
    assert state["model_norms"].shape == (100,)
    # It begins now: early thresholds are still to come.
    assert state["clipping_step"] == 1


# How the optimizer is made, what is done to the file, and the piece of the message.
REFUSED = {
    "fewer parameters": (lambda params: ScaledAdam(params[:1]), None, "parameters"),
    "another order": (lambda params: ScaledAdam(params[::-1]), None, "delta"),
    "clipping period": (lambda p: ScaledAdam(p, clipping_update_period=7), None, "model_norms"),
    "size period": (
        lambda p: ScaledAdam(p, size_update_period=7, clipping_update_period=10),
        None,
        "scale_grads",
    ),
    "a whole checkpoint": (ScaledAdam, lambda saved: {"optimizer": saved}, "checkpoint"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case):
    make, change, match = REFUSED[case]
    _, saved, parameters = start()
    optimizer = make([*parameters.values()])
    params = optimizer.param_groups[0]["params"]
    before = snapshot(optimizer, params)
    with pytest.raises(InputError, match=match):
        optimizer.load_icefall_state_dict(saved if change is None else change(saved))
    assert_same(before, snapshot(optimizer, params))


def test_a_recipe_runs_with_its_imports_changed_only():
    """Groups as icefall's get_parameter_groups_with_lrs makes them."""
    named = {name: torch.ones(3, 2, requires_grad=True) for name in ("encoder.weight", "out")}
    rates = (0.02, 0.04)
    given = [{"named_params": [p], "lr": lr} for p, lr in zip(named.items(), rates, strict=True)]
    groups = ScaledAdam(given, lr=0.04, clipping_scale=2.0).param_groups
    assert [g["param_names"] for g in groups] == [[name] for name in named]
    assert [g["lr"] for g in groups] == [*rates]
    assert all(g["params"][0] is p for g, p in zip(groups, named.values(), strict=True))
