"""State dicts of any outline, from other devices, and through torch's own checkpoints."""

import copy

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.contracts.problems import assert_same, run, snapshot

MAKERS = {
    "lamb": lambda params: LAMB(params, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0),
    "scaled_adam": lambda params: ScaledAdam(params, clipping_scale=1.5, clipping_update_period=4),
}


def with_group(**more):
    return lambda saved: {**saved, "param_groups": [{**saved["param_groups"][0], **more}]}


def with_state(first):
    return lambda saved: {**saved, "state": {**saved["state"], 0: first}}


OUTLINES = {
    "a list": lambda saved: [saved],
    "states a list": lambda saved: {**saved, "state": [*saved["state"].values()]},
    "groups text": lambda saved: {**saved, "param_groups": "ab"},
    "a group a list": lambda saved: {**saved, "param_groups": [[0, 1]]},
    "two groups": lambda saved: {**saved, "param_groups": saved["param_groups"] * 2},
    "params missing": lambda saved: {**saved, "param_groups": [{"lr": 0.1}]},
    "params a number": with_group(params=0),
    "lists for keys": with_group(params=[[0], [1]]),
    "one key twice": with_group(params=[0, 0]),
    "names a number": with_group(param_names=3),
    "a name too few": with_group(param_names=["first"]),
    "a state none": with_state(None),
    "a state's names": with_state({1: 2}),
    "a state past float64": lambda saved: with_state({**saved["state"][0], "step": 10**400})(saved),
    "an option past float64": with_group(lr=10**400),
    "an unknown state sparse": with_state({"zzz": torch.ones(2).to_sparse()}),
}


@pytest.mark.parametrize("change", OUTLINES)
def test_state_dicts_of_other_outlines(change):
    params = [(name, nn.Parameter(torch.ones(3, 2))) for name in ("first", "second")]
    optimizer = ScaledAdam(params, lr=0.01)
    before = snapshot(optimizer, [p for _, p in params])
    for load in (optimizer.load_state_dict, optimizer.load_icefall_state_dict):
        found = OUTLINES[change](copy.deepcopy(optimizer.state_dict()))
        # torch itself counts groups and parameters.
        with pytest.raises(ValueError, match=r"Remedy|parameter group") as caught:
            load(found)
        assert "\n" not in str(caught.value)
    assert_same(before, snapshot(optimizer, [p for _, p in params]))


def test_names_in_another_order_are_refused():
    shapes = {"a": (3,), "b": (3,), "c": (2,)}
    named = {name: torch.ones(shape).requires_grad_() for name, shape in shapes.items()}
    optimizer, other = LANS(named.items()), LANS([(name, named[name]) for name in "bac"])
    with pytest.raises(InputError, match=r"'a'.*'b'"):
        optimizer.load_state_dict(other.state_dict())
    groups = [{"params": [(name, named[name])]} for name in "ab"]
    with pytest.raises(InputError, match=r"'b'.*'a'"):
        LANS(groups[::-1]).load_state_dict(LANS(groups).state_dict())
    renamed = LANS([(f"module.{name}", p) for name, p in named.items()])
    renamed.state[named["a"]]["step"].fill_(5)
    optimizer.load_state_dict(renamed.state_dict())
    assert optimizer.state[named["a"]]["step"] == 5


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[1].bfloat16()
    return model


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_the_state_dict_api_moves_no_weight(make, flat):
    """Nor takes it a step, but where there is no state: with zero gradients at a rate of zero."""
    model = network()
    params = [*model.parameters()]
    optimizer = make(params)
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)
    run(optimizer, params, range(3), none=False)
    start = snapshot(optimizer, params)
    optimizer.zero_grad()
    optimizer.step = None  # not to be called
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer, options=options))
    del optimizer.step
    optimizer.state.clear()
    dcp.set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert_same(snapshot(optimizer, params), start)
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    run(optimizer, params, range(3), none=False)
    weights = [p.detach().clone() for p in params]
    optimizer.step = None
    dcp.set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert_same([p.detach() for p in params], weights)
    assert all(state["step"] == 3 for state in optimizer.state.values())
