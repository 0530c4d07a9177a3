"""A run goes on from icefall's checkpoint as icefall itself would have gone on."""

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.optim import Eden, ScaledAdam, codes
from tests.golden.trajectories import HERE, Trajectory
from tests.reference.schedules import icefall_eden

RECIPES = ["stateless7", "zipformer"]


def start(recipe):
    golden = Trajectory.read(f"icefall_checkpoint-{recipe}")
    saved = torch.load(HERE / f"icefall_checkpoint-{recipe}.pt", weights_only=True)
    parameters = {name: saved["model"][name].clone().requires_grad_() for name in golden.names}
    return golden, saved["optimizer"], parameters


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_goes_on_where_icefall_stopped(recipe, foreach):
    golden, saved, parameters = start(recipe)
    kwargs = golden.config["kwargs"]
    optimizer = ScaledAdam(parameters.values(), **kwargs, recipe=recipe, foreach=foreach)
    optimizer.load_icefall_state_dict(saved)
    steps = range(golden.config["saved_after"], golden.config["steps"])
    # float32 sums in another order; without the checkpoint's state it is off by 1e-2.
    assert golden.follow(optimizer, parameters, steps) < 2e-5


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_part_of_the_stacks_arrives(recipe):
    golden, saved, parameters = start(recipe)
    optimizer = ScaledAdam(parameters.values(), **golden.config["kwargs"], recipe=recipe)
    optimizer.load_icefall_state_dict(saved)
    stack = saved["state"][1]  # w1 and w2
    for row, name in enumerate(["w1", "w2"]):
        state = optimizer.state[parameters[name]]
        assert torch.equal(state["delta"], stack["delta"][row])
        assert torch.equal(state["exp_avg_sq"], stack["exp_avg_sq"][row])
        assert torch.equal(state["param_rms"], stack["param_rms"][row, 0, 0])
        assert torch.equal(state["scale_grads"], stack["scale_grads"][:, row, 0, 0])
        assert state["step"] == 24
    clipping = saved["state"][6]  # of the first stack, that of the 0-d parameter
    for p in parameters.values():
        assert torch.equal(optimizer.state[p]["model_norms"], clipping["model_norms"])
        assert optimizer.state[p]["model_norm_threshold"] == clipping["model_norm_threshold"]
        assert optimizer.state[p]["num_clipped"] == clipping["num_clipped"]
        assert optimizer.state[p]["clipping_step"] == 24
    fresh = ScaledAdam(
        [p.detach().clone().requires_grad_() for p in parameters.values()],
        **golden.config["kwargs"],
        recipe=recipe,
    )
    for p, q in zip(parameters.values(), fresh.param_groups[0]["params"], strict=True):
        types = {name: t.dtype for name, t in fresh.state[q].items()}
        assert {name: t.dtype for name, t in optimizer.state[p].items()} == types


def test_moments_may_become_codes(monkeypatch):
    monkeypatch.setattr(codes, "LEAST", 1)
    monkeypatch.setattr(codes, "SHORTEST", 2)
    golden, saved, parameters = start("zipformer")
    kwargs = golden.config["kwargs"] | {"state_dtype": "8bit"}
    optimizer = ScaledAdam(parameters.values(), **kwargs)
    optimizer.load_icefall_state_dict(saved)
    state, stack = optimizer.state[parameters["w2"]], saved["state"][1]
    row = codes.row_of(parameters["w2"])
    found = codes.decode(state["delta"], state["delta_exponents"], row, codes.FIRST)
    torch.testing.assert_close(found, stack["delta"][1], rtol=0.125, atol=1e-4)
    assert state["step"] == 24


def change(optimizer):
    return {k: v.clone() for s in optimizer.state.values() for k, v in s.items()}


def test_other_parameters_are_refused_and_nothing_changes():
    golden, saved, parameters = start("zipformer")
    few = ScaledAdam([parameters["w1"]])
    with pytest.raises(InputError, match=r"groups of \[1\] parameters. Found \[7\]"):
        few.load_icefall_state_dict(saved)
    swapped = dict(reversed(parameters.items()))
    optimizer = ScaledAdam(swapped.values())
    before = change(optimizer)
    with pytest.raises(InputError, match=r"`delta` of shape .* in the order"):
        optimizer.load_icefall_state_dict(saved)
    after = change(optimizer)
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert golden.names == list(parameters)


def test_a_checkpoint_without_clipping_keeps_the_own_record():
    golden, saved, parameters = start("zipformer")
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
    assert len(golden.names) == 7


@pytest.mark.parametrize("option", ["size_update_period", "clipping_update_period"])
def test_another_period_is_refused(option):
    golden, saved, parameters = start("zipformer")
    options = {**golden.config["kwargs"], option: 7}
    optimizer = ScaledAdam(parameters.values(), **options)
    with pytest.raises(InputError, match=r"shape \(7,\)\. Found \((4|10),\).*the same periods"):
        optimizer.load_icefall_state_dict(saved)


def test_a_whole_checkpoint_is_told_from_the_optimizers_entry():
    _, saved, parameters = start("zipformer")
    optimizer = ScaledAdam(parameters.values())
    with pytest.raises(InputError, match=r"Remedy: hand in checkpoint\['optimizer'\]"):
        optimizer.load_icefall_state_dict({"model": {}, "optimizer": saved})


def test_each_loader_names_the_other():
    """A recipe resumes once from icefall's file, and from then on from its own."""
    _, saved, parameters = start("zipformer")
    optimizer = ScaledAdam(parameters.values())
    with pytest.raises(InputError, match=r"Remedy: load_icefall_state_dict"):
        optimizer.load_state_dict(saved)
    with pytest.raises(InputError, match=r"`delta` of shape .*icefall's ScaledAdam"):
        optimizer.load_icefall_state_dict(optimizer.state_dict())


def test_a_recipe_runs_with_its_imports_changed_only():
    """Groups as icefall's get_parameter_groups_with_lrs makes them, and its order of calls."""
    draw = torch.Generator().manual_seed(0)
    start = {name: torch.randn(3, 2, generator=draw) for name in ("encoder.weight", "out.weight")}
    runs = []
    for is_icefall in (True, False):
        pairs = [(name, value.clone().requires_grad_()) for name, value in start.items()]
        key = "named_params" if is_icefall else "params"
        groups = [{key: [pair], "lr": lr} for pair, lr in zip(pairs, (0.02, 0.04), strict=True)]
        optimizer = ScaledAdam(groups, lr=0.04, clipping_scale=2.0)
        schedule = Eden(optimizer, lr_batches=5, lr_epochs=2, warmup_batches=4)
        for batch in range(1, 9):
            schedule.step_epoch((batch - 1) // 4)
            if is_icefall:
                schedule.step_batch(batch)
            else:
                rates = {"lr_batches": 5, "lr_epochs": 2, "warmup_batches": 4, "warmup_start": 0.5}
                factor = icefall_eden(batch, (batch - 1) // 4, **rates)
                for group, lr in zip(optimizer.param_groups, (0.02, 0.04), strict=True):
                    group["lr"] = lr * factor
            for _, p in pairs:
                p.grad = p.detach() + batch
            optimizer.step()
        assert [g["param_names"] for g in optimizer.param_groups] == [[name] for name in start]
        runs.append([p.detach() for _, p in pairs])
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)  # the rates' last digit
