"""Torch's tests of the state dicts of its own optimizers: after its OptimizerInfo tests.

Left to other files: damaged and foreign state dicts (`test_attacks`, `test_resume`), and those that
are loaded onto another device (`tests/gpu`). Pickled optimizers do not apply: only tensors and
plain numbers are read from files here.
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.contracts.problems import assert_same, parameters, run, snapshot
from tests.contracts.table import OPTIMIZERS, TABLE

every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_optimizer_and_mode = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE)


def clones(params):
    return [p.detach().clone().requires_grad_() for p in params]


def trained(entry, steps=3, **options):
    params = parameters()
    optimizer = entry(params, **options)
    run(optimizer, params, range(steps), none=False)
    return params, optimizer


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def goes_on_alike(optimizer, params, other, others, steps=range(3, 9)):
    run(optimizer, params, steps)
    run(other, others, steps)
    assert_same(snapshot(optimizer, params), snapshot(other, others))


@pytest.mark.few(7)
@every_optimizer_and_mode
def test_every_option_may_be_missing_in_an_older_state_dict(entry):
    """It is then what it was by default, but for those of this optimizer that came later."""
    params, optimizer = trained(entry)
    for option in {*optimizer.param_groups[0]} - {"params"}:
        others = clones(params)
        other = entry(others)
        saved = copy.deepcopy(optimizer.state_dict())
        del saved["param_groups"][0][option]
        other.load_state_dict(saved)
        assert other.param_groups[0][option] == other.defaults[option]
        twin, twins = entry(clone := clones(params)), clone
        twin.load_state_dict(optimizer.state_dict())
        goes_on_alike(twin, twins, other, others)


@every_optimizer_and_mode
def test_steps_are_tensors_of_float32_even_from_plain_numbers(entry):
    params, optimizer = trained(entry)
    others = clones(params)
    other, saved = entry(others), copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        assert isinstance(state["step"], torch.Tensor)
        state["step"] = state["step"].item()
    other.load_state_dict(through_a_file(saved))
    for p, q in zip(params, others, strict=True):
        step = other.state[q]["step"]
        assert (step.dtype, step.shape) == (torch.float32, ())
        assert step == optimizer.state[p]["step"]
    goes_on_alike(optimizer, params, other, others)


@every_optimizer_and_mode
@pytest.mark.parametrize("rate", ["number", "0-d", "one element"])
def test_a_state_dict_goes_through_a_file_with_its_schedule(entry, rate):
    def make(params):
        lr = {"number": 0.02, "0-d": torch.tensor(0.02), "one element": torch.tensor([0.02])}[rate]
        optimizer = entry(params, lr=lr)
        return optimizer, lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=12)

    def go_on(optimizer, schedule, params, steps):
        for step in steps:
            run(optimizer, params, [step], none=False)
            schedule.step()

    params = parameters()
    optimizer, schedule = make(params)
    go_on(optimizer, schedule, params, range(4))
    others = clones(params)
    other, second = make(others)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    second.load_state_dict(through_a_file(schedule.state_dict()))
    go_on(optimizer, schedule, params, range(4, 10))
    go_on(other, second, others, range(4, 10))
    assert_same(snapshot(optimizer, params), snapshot(other, others))
    groups = optimizer.param_groups[0], other.param_groups[0]
    assert float(groups[0]["lr"]) == float(groups[1]["lr"]) != pytest.approx(0.02)
    assert groups[0]["betas"] == groups[1]["betas"]
    assert groups[0]["max_momentum"] == groups[1]["max_momentum"] == 0.95


@every_optimizer_and_mode
def test_two_state_dicts_at_once_are_equal_and_one_may_be_changed(entry):
    params, optimizer = trained(entry)
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert first["param_groups"] == second["param_groups"]
    for place, state in first["state"].items():
        assert [*state] == [*second["state"][place]]
        assert all(state[name] is second["state"][place][name] for name in state)
    first["param_groups"][0]["lr"] = 5.0
    del first["state"][0]
    assert optimizer.param_groups[0]["lr"] != 5.0
    assert optimizer.state[params[0]]["step"] == 3


@every_optimizer_and_mode
def test_no_state_is_empty_and_each_is_saved(entry):
    params = parameters()
    optimizer = entry(params)
    for steps in (range(0), range(2)):
        run(optimizer, params, steps, none=False)
        saved = optimizer.state_dict()["state"]
        assert [*saved] == [*range(len(params))]
        for p, state in zip(params, saved.values(), strict=True):
            assert {"step", "skipped", *entry.large} <= {*state} == {*optimizer.state[p]}
            assert state["step"] == (len(steps) if p.numel() else 0)


@every_optimizer
def test_copies_have_all_that_is_public(entry):
    params, optimizer = trained(entry, lr=torch.tensor(0.02))
    optimizer.note = "of the user's"
    twin = copy.deepcopy(optimizer)

    def public(some):
        return {name for name in vars(some) if not name.startswith("_")}

    # As for torch's own: what is saved is copied, what a user adds is not.
    adam = copy.deepcopy(torch.optim.AdamW(clones(params)))
    assert public(twin) == public(adam) == {"defaults", "state", "param_groups"}
    # torch adds this default to every optimizer that it copies.
    assert {*twin.defaults} - {"differentiable"} == {*optimizer.defaults}
    copies = twin.param_groups[0]["params"]
    assert not {*map(id, copies)} & {*map(id, params)}
    assert_same(snapshot(optimizer, params), snapshot(twin, copies))
    twin.param_groups[0]["lr"].fill_(0.0)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.02)


@every_optimizer
def test_it_can_be_printed(entry):
    optimizer = entry([{"params": parameters()}, {"params": [], "lr": torch.tensor(0.5)}])
    text = repr(optimizer)
    assert text.startswith(f"{entry.make.__name__} (\nParameter Group 0\n")
    assert text.count("    betas: ") == 2
    assert "    lr: 0.5\n" in text
    assert "params" not in text


NAMED = {
    "none": lambda model: model.parameters(),
    "names": lambda model: model.named_parameters(),
    "groups": lambda model: [
        {"params": [("weight", model.weight)]},
        {"params": [("bias", model.bias)], "lr": 0.005},
    ],
}


@every_optimizer
@pytest.mark.parametrize("way", NAMED)
def test_names_are_kept_and_saved(entry, way):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return [*model.parameters()], entry(NAMED[way](model))

    params, optimizer = make()
    run(optimizer, params, range(3), none=False)
    saved = through_a_file(optimizer.state_dict())
    names = [group.get("param_names") for group in saved["param_groups"]]
    assert (
        names
        == {
            "none": [None],
            "names": [["weight", "bias"]],
            "groups": [["weight"], ["bias"]],
        }[way]
    )
    others, other = make()
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p)
    other.load_state_dict(saved)
    assert [group.get("param_names") for group in other.param_groups] == names
    goes_on_alike(optimizer, params, other, others)


@every_optimizer
def test_a_hook_may_pair_states_by_name(entry):
    """As torch's documentation shows it, for parameters in another order."""
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    optimizer = entry([("weight", model.weight), ("bias", model.bias)])
    other = entry([("bias", twin.bias), ("weight", twin.weight)])
    run(optimizer, [model.weight, model.bias], range(3), none=False)
    twin.load_state_dict(model.state_dict())

    def by_name(own, state_dict):
        saved = state_dict["param_groups"][0]
        at = dict(zip(saved["param_names"], saved["params"], strict=True))
        names = own.param_groups[0]["param_names"]
        states = {i: state_dict["state"][at[name]] for i, name in enumerate(names)}
        return {"state": states, "param_groups": [{**saved, "param_names": names}]}

    other.register_load_state_dict_pre_hook(by_name)
    other.load_state_dict(optimizer.state_dict())
    run(optimizer, [model.weight, model.bias], [3], none=False)
    run(other, [twin.weight, twin.bias], [3], none=False)
    assert_same([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])


@every_optimizer_and_mode
def test_groups_may_be_added_emptied_and_taken_away(entry):
    """The rest goes on as if nothing had been: a group's joint step aside, which is its own."""
    params, late = parameters(), torch.full((5, 2), 0.5, requires_grad=True)
    twins = clones(params)
    optimizer, twin = entry([{"params": params}]), entry([{"params": twins}])
    goes_on_alike(optimizer, params, twin, twins, range(2))
    optimizer.add_param_group({"params": [late], "lr": 0.0})
    late.grad = torch.zeros_like(late)
    goes_on_alike_but_for(optimizer, params, twin, twins, range(2, 4), late)
    assert optimizer.state[late]["step"] == 2
    optimizer.param_groups[1]["params"] = []
    goes_on_alike(optimizer, params, twin, twins, range(4, 6))
    assert late not in optimizer.state
    del optimizer.param_groups[1]
    goes_on_alike(optimizer, params, twin, twins, range(6, 8))
    assert [*optimizer.state_dict()["state"]] == [*range(len(params))]


def goes_on_alike_but_for(optimizer, params, twin, twins, steps, late):
    run(optimizer, params, steps)
    run(twin, twins, steps)
    assert_same(params, twins)
    assert torch.equal(late, torch.full((5, 2), 0.5))
