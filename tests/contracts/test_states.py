"""Saving, loading, masters, names and exchanged groups, for every optimizer of the table."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler

from tests.contracts.problems import (
    DTYPES,
    NARROW,
    assert_same,
    clones,
    give_gradients,
    parameters,
    reloaded,
    run,
    snapshot,
)
from tests.contracts.table import TABLE, every_optimizer, every_optimizer_and_mode
from tests.covering import covering

RATES = {
    "number": lambda: 0.02,
    "0-d": lambda: torch.tensor(0.02),
    "one element": lambda: torch.tensor([0.02]),
}


def assert_go_on_alike(optimizer, params, other, others, steps):
    run(optimizer, params, steps)
    run(other, others, steps)
    assert_same(snapshot(optimizer, params), snapshot(other, others))


@pytest.mark.few(28)
@covering(entry=TABLE, dtype=DTYPES, stop=[0, 1, 5], rate=RATES, is_file=[True, False])
def test_resumes_to_the_bit(entry, dtype, stop, rate, is_file):
    """With a schedule, the count of skipped steps, and a copy of all that is loaded."""

    def make(params):
        optimizer = entry(params, lr=rate())
        return optimizer, lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=12)

    def go_on(optimizer, schedule, params, steps):
        for step in steps:
            give_gradients(params, step)
            if step in (3, 7):
                params[4].grad[0, 1, 0] = torch.nan
            optimizer.step()
            schedule.step()

    params = parameters(dtype)
    optimizer, schedule = make(params)
    go_on(optimizer, schedule, params, range(stop))
    others = clones(params)
    resumed, second = make(others)
    load = reloaded if is_file else lambda state_dict: state_dict
    resumed.load_state_dict(load(optimizer.state_dict()))
    second.load_state_dict(load(schedule.state_dict()))
    assert_same(snapshot(optimizer, params), snapshot(resumed, others))
    assert resumed.skipped == (stop > 3)
    # Its own state changes nothing, and a group's record is one tensor, seen from each parameter.
    resumed.load_state_dict(resumed.state_dict())
    assert resumed.state[others[0]]["skipped"] is resumed.state[others[2]]["skipped"]
    go_on(optimizer, schedule, params, range(stop, 10))
    go_on(resumed, second, others, range(stop, 10))
    assert_same(snapshot(optimizer, params), snapshot(resumed, others))
    assert optimizer.skipped == resumed.skipped == 2
    assert float(optimizer.param_groups[0]["lr"]) == float(resumed.param_groups[0]["lr"]) != 0.02


@pytest.mark.few(7)
@every_optimizer_and_mode
@pytest.mark.parametrize("way", ["resumed", "skipped"])
def test_the_first_pass_is_the_same_after_a_pause(entry, way):
    """Whatever a tensor's length: the lengths leave every remainder of 16.

    Each tensor is a group, as a group's norm would hide the rounding of one among many.
    """
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=draw).requires_grad_() for n in range(9, 400, 25)]
    others = clones(params)
    optimizer, paused = (entry([{"params": [p]} for p in own]) for own in (params, others))
    run(optimizer, params, range(4))
    run(paused, others, range(4))
    if way == "resumed":
        state = paused.state_dict()
        paused = entry([{"params": [p]} for p in others])
        paused.load_state_dict(state)
    else:
        give_gradients(others, 4)
        for p in others:
            p.grad[0] = torch.inf
        paused.step()
        assert paused.skipped == 1
    assert_go_on_alike(optimizer, params, paused, others, range(4, 8))


@pytest.mark.few(11)
@every_optimizer_and_mode
def test_an_older_state_dict_lacks_options_and_counts_in_numbers(entry):
    params = parameters()
    optimizer = entry(params)
    run(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"] = [{"params": saved["param_groups"][0]["params"]}]
    for state in saved["state"].values():
        state["step"] = state["step"].item()
    others = clones(params)
    other = entry(others)
    other.load_state_dict(reloaded(saved))
    for option in {*optimizer.param_groups[0]} - {"params"}:
        assert other.param_groups[0][option] == other.defaults[option]
    assert_same(snapshot(optimizer, params), snapshot(other, others))
    assert_go_on_alike(optimizer, params, other, others, range(3, 9))


@every_optimizer
def test_hooks_around_saving_and_loading(entry):
    params, others, seen = parameters(), parameters(), []
    optimizer, other = entry(params), entry(others)
    run(optimizer, params, range(3))

    def faster(own, found):
        # Tensors, as they were saved.
        assert all(type(t) is torch.Tensor for t in found["state"][0].values())
        found["param_groups"][0]["lr"] *= 2

    optimizer.register_state_dict_post_hook(
        lambda own, found: {**found, "groups": found["param_groups"]}
    )
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"]
    other.register_load_state_dict_pre_hook(faster)
    other.register_load_state_dict_pre_hook(
        lambda own, found: {"param_groups": found["groups"], "state": found["state"]},
        prepend=True,
    )
    other.register_load_state_dict_post_hook(
        lambda own: seen.append(float(own.state[others[0]]["step"]))
    )
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 2 * optimizer.param_groups[0]["lr"]
    assert seen == [3.0]


@every_optimizer_and_mode
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_masters_follow_written_weights(entry, dtype):
    params = parameters(dtype)
    optimizer = entry(params)
    run(optimizer, params, range(3))
    with torch.no_grad():
        params[0][0, 0] = 7.0
    twins = clones(params)
    twin = entry(twins)
    twin.load_state_dict(optimizer.state_dict())
    twin.state[twins[0]]["master_weight"][0, 0] = 7.0
    assert_go_on_alike(optimizer, params, twin, twins, [3])
    assert float(params[0].detach()[0, 0]) == pytest.approx(7.0, rel=0.2)


@every_optimizer_and_mode
def test_what_a_wrapper_exchanges_is_noticed(entry):
    """Parameters, as Accelerate prepares a model for `fully_shard`, and a group as a whole."""
    params, others = parameters(), parameters()
    optimizer, twin = entry(parameters()), entry(others)
    optimizer.param_groups[0]["params"] = [torch.empty(1) for _ in params]
    assert optimizer.skipped == 0
    optimizer.param_groups[0]["params"] = params
    optimizer.load_state_dict(optimizer.state_dict())
    run(optimizer, params, range(3))
    run(twin, others, range(3))
    assert {*optimizer.state} == {*params}
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}
    twin.param_groups[0]["lr"] = 0.5
    run(optimizer, params, range(3, 6))
    run(twin, others, range(3, 6))
    assert_same(snapshot(optimizer, params), snapshot(twin, others))
