"""A run goes on from icefall's checkpoint as icefall itself would have gone on."""

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.optim import Eden, ScaledAdam, codes
from tests.contracts.problems import assert_same, snapshot
from tests.golden.trajectories import HERE, Trajectory
from tests.reference.schedules import icefall_eden

recipes = pytest.mark.parametrize("recipe", ["stateless7", "zipformer"])


def start(recipe="zipformer"):
    golden = Trajectory.read(f"icefall_checkpoint-{recipe}")
    saved = torch.load(HERE / f"icefall_checkpoint-{recipe}.pt", weights_only=True)
    parameters = {name: saved["model"][name].clone().requires_grad_() for name in golden.names}
    return golden, saved["optimizer"], parameters


@recipes
def test_goes_on_where_icefall_stopped(recipe):
    golden, saved, parameters = start(recipe)
    optimizer = ScaledAdam(parameters.values(), **golden.config["kwargs"], recipe=recipe)
    optimizer.load_icefall_state_dict(saved)
    steps = range(golden.config["saved_after"], golden.config["steps"])
    # float32 sums in another order; without the checkpoint's state it is off by 1e-2.
    assert golden.follow(optimizer, parameters, steps) < 2e-5


@recipes
def test_every_part_of_the_stacks_arrives(recipe):
    golden, saved, parameters = start(recipe)
    optimizer = ScaledAdam(parameters.values(), **golden.config["kwargs"], recipe=recipe)
    types = [{n: t.dtype for n, t in optimizer.state[p].items()} for p in parameters.values()]
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
    for p, expected in zip(parameters.values(), types, strict=True):
        state = optimizer.state[p]
        assert torch.equal(state["model_norms"], clipping["model_norms"])
        assert state["model_norm_threshold"] == clipping["model_norm_threshold"]
        assert state["num_clipped"] == clipping["num_clipped"]
        assert state["clipping_step"] == 24
        assert {name: t.dtype for name, t in state.items()} == expected


def test_moments_may_become_codes(monkeypatch):
    monkeypatch.setattr(codes, "LEAST", 1)
    monkeypatch.setattr(codes, "SHORTEST", 2)
    golden, saved, parameters = start()
    kwargs = golden.config["kwargs"] | {"state_dtype": "8bit"}
    optimizer = ScaledAdam(parameters.values(), **kwargs)
    optimizer.load_icefall_state_dict(saved)
    state, stack = optimizer.state[parameters["w2"]], saved["state"][1]
    row = codes.row_of(parameters["w2"])
    found = codes.decode(state["delta"], state["delta_exponents"], row, codes.FIRST)
    torch.testing.assert_close(found, stack["delta"][1], rtol=0.125, atol=1e-4)
    assert state["step"] == 24


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


REFUSED = {
    "fewer parameters": (lambda params: ScaledAdam(params[:1]), None, "parameters"),
    "another order": (lambda params: ScaledAdam(params[::-1]), None, "delta"),
    "another size period": (
        lambda params: ScaledAdam(params, size_update_period=7, clipping_update_period=10),
        None,
        "scale_grads",
    ),
    "another clipping period": (
        lambda params: ScaledAdam(params, clipping_update_period=7),
        None,
        "model_norms",
    ),
    "a whole checkpoint": (
        ScaledAdam,
        lambda saved: {"model": {}, "optimizer": saved},
        r"checkpoint\['optimizer'\]",
    ),
    **{
        f"a stack that is {value!r}": (
            ScaledAdam,
            lambda saved, value=value: {
                **saved,
                "state": {**saved["state"], 1: {**saved["state"][1], "delta": value}},
            },
            "delta",
        )
        for value in (1, "x", None)
    },
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


def test_each_loader_names_the_other():
    """A recipe resumes once from icefall's file, and from then on from its own."""
    _, saved, parameters = start()
    optimizer = ScaledAdam(parameters.values())
    with pytest.raises(InputError, match="load_icefall_state_dict"):
        optimizer.load_state_dict(saved)
    with pytest.raises(InputError, match="icefall"):
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
