"""State dicts of any outline, from other devices, and through torch's own checkpoints."""

import copy

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.contracts.problems import assert_same, parameters, run, snapshot

MAKERS = {
    "lamb": lambda params: LAMB(params, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0),
    "scaled_adam": lambda params: ScaledAdam(params, clipping_scale=1.5, clipping_update_period=4),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def with_group(**more):
    return lambda saved: {**saved, "param_groups": [{**saved["param_groups"][0], **more}]}


def with_state(first):
    return lambda saved: {**saved, "state": {**saved["state"], 0: first}}


def with_more(value):
    return lambda saved: with_state({**saved["state"][0], "zzz": value})(saved)


def without_params(saved):
    return {**saved, "param_groups": [{"lr": 0.1}]}


OUTLINES = {
    "none": lambda saved: None,
    "a list": lambda saved: [saved],
    "state none": lambda saved: {**saved, "state": None},
    "states a list": lambda saved: {**saved, "state": [*saved["state"].values()]},
    "groups none": lambda saved: {**saved, "param_groups": None},
    "groups text": lambda saved: {**saved, "param_groups": "ab"},
    "a group a list": lambda saved: {**saved, "param_groups": [[0, 1]]},
    "no groups": lambda saved: {**saved, "param_groups": []},
    "two groups": lambda saved: {**saved, "param_groups": saved["param_groups"] * 2},
    "params missing": without_params,
    "params a number": with_group(params=0),
    "lists for keys": with_group(params=[[0], [1]]),
    "one key twice": with_group(params=[0, 0]),
    "names that are none": with_group(param_names=[None, 3]),
    "names a number": with_group(param_names=3),
    "a name too few": with_group(param_names=["first"]),
    "a state none": with_state(None),
    "a strange state none": lambda saved: {**saved, "state": {**saved["state"], 9: None}},
    "a state's names": with_state({1: 2}),
    "an unknown state on meta": with_more(torch.ones(2, device="meta")),
    "an unknown state sparse": with_more(torch.ones(2).to_sparse()),
    "an unknown state too large": with_more(10**400),
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


STRANGE = {
    "a whole number past float64": lambda t: 10**400,
    "nested": lambda t: torch.nested.nested_tensor([torch.ones(2)]),
    "quantized": lambda t: torch.quantize_per_tensor(torch.ones(t.shape), 0.1, 0, torch.qint8),
    "past the type's range": lambda t: torch.full_like(t, 1e300, dtype=torch.float64),
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize")
def test_states_of_strange_types(change):
    params = parameters()
    optimizer = ScaledAdam(params)
    run(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    for name, value in optimizer.state_dict()["state"][0].items():
        # It is infinite before there is one.
        if name != "model_norm_threshold" or change is not STRANGE["past the type's range"]:
            saved = copy.deepcopy(optimizer.state_dict())
            saved["state"][0][name] = change(value)
            with pytest.raises(InputError, match=name):
                optimizer.load_state_dict(saved)
    for name in ("lr", "eps"):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0][name] = 10**400
        with pytest.raises(InputError, match=name):
            optimizer.load_state_dict(saved)
    assert_same(before, snapshot(optimizer, params))


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


def test_a_state_goes_to_its_parameters_device():
    params = parameters(torch.bfloat16)
    optimizer = MAKERS["scaled_adam"](params)
    run(optimizer, params, range(3))
    elsewhere = MAKERS["scaled_adam"]([p.detach().to("meta").requires_grad_() for p in params])
    elsewhere.load_state_dict(optimizer.state_dict())
    for found, expected in zip(elsewhere.state.values(), optimizer.state.values(), strict=True):
        assert [(n, t.dtype) for n, t in found.items()] == [
            (n, t.dtype) for n, t in expected.items()
        ]
        assert {t.device.type for t in found.values()} == {"meta"}


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[1].bfloat16()
    return model


@every_optimizer
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_the_state_dict_api_takes_no_step(make, flat):
    model = network()
    params = [*model.parameters()]
    optimizer = make(params)
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)
    start = snapshot(optimizer, params)
    optimizer.step = None  # not to be called
    state = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer, options=options))
    del optimizer.step
    assert_same(snapshot(optimizer, params), start)
    run(optimizer, params, range(3))
    weights = [p.detach().clone() for p in params]
    optimizer.step = None
    dcp.set_optimizer_state_dict(model, optimizer, state, options=options)
    del optimizer.step
    assert_same([p.detach() for p in params], weights)
    assert all(state["step"] == 0 for state in optimizer.state.values())


@every_optimizer
def test_the_step_with_zero_gradients_moves_no_weight(make):
    """torch.distributed.checkpoint takes one, at a rate of zero, where there is no state."""
    model = network()
    params = [*model.parameters()]
    optimizer = make(params)
    run(optimizer, params, range(3))
    weights, states = copy.deepcopy((params, optimizer.state_dict()["state"]))
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
    optimizer.zero_grad()
    optimizer.state.clear()
    dcp.set_optimizer_state_dict(model, optimizer, saved)
    assert_same(params, weights)
    for place, state in optimizer.state_dict()["state"].items():
        assert state.keys() == states[place].keys()
        assert_same(state.values(), [states[place][name] for name in state])
    assert isinstance(optimizer.param_groups[0]["lr"], float)
