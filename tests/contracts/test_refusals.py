"""What cannot be used is refused by its name, from whichever source, and nothing changes."""

import copy
import inspect

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.contracts.problems import assert_same, parameters, run, snapshot
from tests.contracts.table import OPTIMIZERS, every_optimizer

WRONG = [(name, options) for name, entry in OPTIMIZERS.items() for options in entry.wrong]

# What a damaged file may have in place of a state.
DAMAGES = {
    "empty": lambda t: t.new_zeros(0),
    "short": lambda t: t.reshape(-1)[: t.numel() // 2].clone(),
    "more axes": lambda t: t[None],
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.to(torch.bool),
    "meta": lambda t: t.to("meta"),
    "text": lambda t: "0",
    "none": lambda t: None,
    "list": lambda t: t.tolist() if t.ndim else [0.0],
}
NUMBERS = {
    "nan": lambda t: torch.full_like(t, torch.nan),
    "one nan": lambda t: torch.cat([t.new_full((1,), torch.nan), t.reshape(-1)[1:]]).view(t.shape),
    "minus inf": lambda t: torch.full_like(t, -torch.inf),
}
# Every number up to 255 is a code.
CODES = {"floats": lambda t: t.float(), "wide": lambda t: t.to(torch.int16)}
SCALES = {
    "no scale": lambda t: torch.full_like(t, 0),
    "past float32": lambda t: torch.full_like(t, 254),
}
NEVER_NEGATIVE = {
    "step",
    "exp_avg_sq",
    "skipped",
    "param_rms",
    "scale_exp_avg_sq",
    "model_norms",
    "clipping_step",
}


def trained(entry):
    params = parameters(torch.bfloat16)
    optimizer = entry(params, fused=True)
    run(optimizer, params, range(3), none=False)
    return params, optimizer


def assert_refused(optimizer, params, saved, match):
    before = snapshot(optimizer, params)
    options = copy.deepcopy([{**g, "params": 0} for g in optimizer.param_groups])
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)
    assert_same(before, snapshot(optimizer, params))
    assert [{**g, "params": 0} for g in optimizer.param_groups] == options


@pytest.mark.parametrize(("name", "options"), WRONG, ids=str)
def test_wrong_options_are_refused_by_name(name, options):
    """At construction, in a group, and in a state dict."""
    entry, option = OPTIMIZERS[name], next(iter(options))
    with pytest.raises(InputError, match=f"`{option}`"):
        entry(parameters(), **options)
    params, optimizer = trained(entry)
    with pytest.raises(InputError, match=f"`{option}`"):
        optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)], **options})
    assert len(optimizer.param_groups) == 1
    # How states are kept is the loading optimizer's own affair.
    if option != "state_dtype":
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0].update(options)
        assert_refused(optimizer, params, saved, f"`{option}`")


@every_optimizer
@pytest.mark.parametrize("option", ["maximise", "lr_mult"])
def test_a_misspelt_option_of_a_group_is_refused(entry, option):
    with pytest.raises(InputError, match=option):
        entry([{"params": parameters(), option: 2.0}])
    # What schedules and users put there is none of the optimizer's business.
    entry([{"params": parameters(), "initial_lr": 0.1, "name": "a", "lr_scale": 3}])


@every_optimizer
def test_parameters_that_cannot_be_optimized_leave_the_optimizer_as_it_was(entry):
    params, fresh = parameters(), parameters()
    optimizer = entry(params)
    unfit = [torch.zeros(3, dtype=torch.complex64), torch.eye(3).to_sparse(), torch.ones(2).long()]
    for parameter in unfit:
        with pytest.raises(InputError, match="parameters"):
            entry([parameter])
    other = torch.ones(2, requires_grad=True)
    for wrong in (unfit[0], unfit[1], unfit[2], [other, params[0]], {other}):
        with pytest.raises((TypeError, ValueError)):
            optimizer.add_param_group({"params": wrong})
    assert len(optimizer.param_groups) == 1
    assert {*optimizer.state} == {*params}
    run(optimizer, params, range(2))
    run(entry(fresh), fresh, range(2))
    assert_same(fresh, params)


@pytest.mark.parametrize("kind", [LANS, LAMB, ScaledAdam])
def test_every_option_is_tried(kind):
    """An option of its own is in the table, and so held against the equations."""
    tried = {"params", "lr", "betas", "eps", "maximize"}
    tried |= {"master_weights", "foreach", "fused", "capturable"}
    for entry in OPTIMIZERS.values():
        tried |= {*entry.options}.union(*entry.others) if entry.make is kind else set()
    assert {*inspect.signature(kind).parameters} <= tried


def test_options_of_one_name_have_one_default():
    lans, lamb = (kind(parameters()).defaults for kind in (LANS, LAMB))
    shared = lans.keys() & lamb.keys()
    assert {name: lans[name] for name in shared} == {name: lamb[name] for name in shared}


@every_optimizer
def test_sparse_gradients_are_refused(entry):
    params, seen = parameters(), []
    optimizer = entry(params)
    optimizer.register_step_post_hook(lambda *args: seen.append("post"))
    run(optimizer, params, range(2), none=False)
    before = snapshot(optimizer, params)
    params[0].grad = params[0].grad.to_sparse()
    with pytest.raises(InputError, match="gradients"):
        optimizer.step()
    assert_same(before, snapshot(optimizer, params))
    assert len(seen) == 2


@pytest.mark.few(4)
@every_optimizer
def test_a_damaged_state_is_refused(entry):
    params, optimizer = trained(entry)
    for name, value in optimizer.state_dict()["state"][4].items():
        changes = {**DAMAGES, **(NUMBERS if value.is_floating_point() else CODES)}
        if name.endswith("_exponents"):
            changes |= SCALES
        elif name in NEVER_NEGATIVE and value.is_floating_point():
            changes["negative"] = lambda t: torch.full_like(t, -1.0)
        for change in changes.values():
            saved = copy.deepcopy(optimizer.state_dict())
            saved["state"][4][name] = change(value)
            assert_refused(optimizer, params, saved, name)
    run(optimizer, params, range(3, 5))
    assert optimizer.skipped == 0


@every_optimizer
def test_states_that_are_missing_exchanged_or_of_another_optimizer(entry):
    params, optimizer = trained(entry)
    for name in optimizer.state_dict()["state"][4]:
        if name != "master_weight":  # it is made anew from the weight
            saved = copy.deepcopy(optimizer.state_dict())
            del saved["state"][4][name]
            # Codes without their exponents would be taken for numbers.
            assert_refused(optimizer, params, saved, name.removesuffix("_exponents"))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0], saved["state"][4] = saved["state"][4], saved["state"][0]
    assert_refused(optimizer, params, saved, "shape")
    adam = torch.optim.AdamW(params)
    adam.step()
    # Adan has three betas.
    assert_refused(optimizer, params, adam.state_dict(), "`state_dict` of|`betas`")
    assert_refused(optimizer, params, entry(params[:2]).state_dict(), "size of optimizer's group")
    for part in ({}, {"state": {}}, {"param_groups": []}, {"state": [], "param_groups": {}}):
        assert_refused(optimizer, params, part, "`state_dict` with param_groups")
