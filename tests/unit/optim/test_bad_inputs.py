"""Input that a step cannot use is refused before anything moves, or works."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.contracts.problems import assert_same, snapshot

KINDS = [LAMB, LANS, ScaledAdam]
MODES = [{"fused": True}, {"foreach": True}, {"foreach": False}]
every = pytest.mark.parametrize("kind", KINDS)
each_mode = pytest.mark.parametrize("mode", MODES, ids=["fused", "foreach", "single"])

OPTIONS = [
    {"lr": float("nan")},
    {"lr": -1.0},
    {"lr": "fast"},
    {"lr": torch.tensor(torch.nan)},
    {"lr": torch.ones(2)},
    {"lr": torch.tensor([0.1]).to_sparse()},
    {"lr": torch.tensor(0.1, device="meta")},
    {"betas": (2, 2)},
    {"betas": 0.9},
    {"eps": -1.0},
    {"maximize": None},
    {"fused": True, "foreach": True},
]
OWN = [
    (LAMB, {"max_grad_norm": 0.0}),
    (LAMB, {"adapt": 2}),
    (LANS, {"clip_value": -1.0}),
    (LANS, {"lower_bound": 2.0, "upper_bound": 1.0}),
    (ScaledAdam, {"recipe": "zzz"}),
    (ScaledAdam, {"clipping_scale": -1.0}),
    (ScaledAdam, {"param_max_rms": 0.0}),
    (ScaledAdam, {"clipping_update_period": 0}),
]


def trained(kind, mode, **options):
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((4, 3), (5,))]
    optimizer = kind(params, lr=0.01, **mode, **options)
    for _ in range(2):
        fill(params)
        optimizer.step()
    fill(params)
    return params, optimizer


def fill(params):
    for p in params:
        p.grad = torch.linspace(-1, 2, p.numel(), dtype=p.dtype).view(p.shape)


def assert_refused(params, optimizer, match):
    before = snapshot(optimizer, params)
    with pytest.raises(InputError, match=match) as caught:
        optimizer.step()
    assert "\n" not in str(caught.value)
    assert_same(before, snapshot(optimizer, params))


@every
@each_mode
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{next(iter(o.items()))}"[:30])
def test_options_edited_to_what_cannot_be(kind, mode, options):
    params, optimizer = trained(kind, mode)
    good = {name: optimizer.param_groups[0][name] for name in options}
    optimizer.param_groups[0].update(options)
    for _ in range(2):  # it is not taken for known
        assert_refused(params, optimizer, next(iter(options)))
    optimizer.param_groups[0].update(good)
    before = params[0].detach().clone()
    optimizer.step()
    assert not torch.equal(params[0], before)


@every
@each_mode
def test_a_list_of_options_edited_in_place(kind, mode):
    params, optimizer = trained(kind, mode)
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    optimizer.step()
    optimizer.param_groups[0]["betas"][1] = 2.0
    assert_refused(params, optimizer, "betas")


@every
@each_mode
@pytest.mark.parametrize("place", [0, 1])
def test_a_count_whose_memory_was_exchanged(kind, mode, place):
    """Through `.data`, of whichever parameter."""
    params, optimizer = trained(kind, mode)
    optimizer.state[params[place]]["step"].data = torch.tensor(7.0)
    optimizer.step()
    assert optimizer.state[params[place]]["step"] == 8
    assert optimizer.state[params[1 - place]]["step"] == 3


@every
def test_numpy_rates_are_saved_as_plain_numbers(kind, tmp_path):
    optimizer = kind([nn.Parameter(torch.ones(3))], lr=np.float64(0.1))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert type(saved["param_groups"][0]["lr"]) is float
    assert saved["param_groups"][0]["lr"] == 0.1


@each_mode
@pytest.mark.parametrize(("kind", "options"), OWN, ids=str)
def test_own_options_edited_to_what_cannot_be(kind, mode, options):
    params, optimizer = trained(kind, mode)
    optimizer.param_groups[0].update(options)
    assert_refused(params, optimizer, next(iter(options)))


@every
@pytest.mark.parametrize("options", OPTIONS[3:7], ids=["nan", "two", "sparse", "meta"])
def test_tensors_that_are_no_learning_rate(kind, options):
    with pytest.raises(InputError, match="lr"):
        kind([nn.Parameter(torch.ones(3))], **options)


@every
@each_mode
def test_a_tensor_learning_rate_that_became_nan(kind, mode):
    params, optimizer = trained(kind, mode)
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.01)
    optimizer.step()
    rate.fill_(torch.nan)
    assert_refused(params, optimizer, "lr")


@every
@pytest.mark.parametrize(
    ("parameter", "found"),
    [
        (lambda: nn.Parameter(torch.zeros(1).expand(5)), "share memory"),
        (lambda: nn.Parameter(torch.zeros(2, 1).expand(2, 5)), "share memory"),
        (lambda: nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn)), "float8_e4m3fn"),
    ],
    ids=["expanded", "in one axis", "float8"],
)
def test_parameters_that_no_step_can_write_to(kind, parameter, found):
    with pytest.raises(InputError, match=found):
        kind([parameter()])
    optimizer = kind([nn.Parameter(torch.ones(3))])
    with pytest.raises(InputError, match=found):
        optimizer.add_param_group({"params": [parameter()]})
    assert len(optimizer.param_groups) == 1
    # One element in memory is no overlap.
    kind([nn.Parameter(torch.zeros(1).expand(1, 1))])


DATA = {
    "another shape": (lambda p: torch.zeros(6), "shape"),
    "as many elements": (lambda p: torch.zeros(5, 1), "shape"),
    "expanded": (lambda p: torch.zeros(1).expand(5), "share memory"),
    "float8": (lambda p: p.detach().to(torch.float8_e5m2), "float8_e5m2"),
}


@every
@each_mode
@pytest.mark.parametrize("change", DATA)
def test_data_exchanged_for_what_does_not_fit(kind, mode, change):
    """Of the last parameter, so that another could have moved before it is found."""
    params, optimizer = trained(kind, mode)
    (first, last), (make, found) = params, DATA[change]
    states, weight = copy.deepcopy(optimizer.state_dict()["state"]), first.detach().clone()
    last.grad, kept = None, last.detach().clone()
    last.data = make(last)
    last.grad = None if change == "float8" else torch.ones_like(last)
    with pytest.raises(InputError, match=found):
        optimizer.step()
    assert torch.equal(first, weight)
    for i, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, states[i][name])
    last.grad, last.data = None, kept.clone()
    fill(params)
    optimizer.step()
    assert not torch.equal(last, kept)


@every
@each_mode
def test_a_state_on_another_device(kind, mode):
    """As a model's that was moved after its optimizer was built."""
    params, optimizer = trained(kind, mode)
    state, weight = optimizer.state[params[1]], params[0].detach().clone()
    kept, state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg_sq"].to("meta")
    with pytest.raises(InputError, match="device"):
        optimizer.step()
    assert torch.equal(params[0], weight)
    state["exp_avg_sq"] = kept
    optimizer.step()
    assert not torch.equal(params[0], weight)


@pytest.mark.few(9)
@every
@each_mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_data_exchanged_for_another_type(kind, mode, dtype):
    params, optimizer = trained(kind, mode)
    before = [p.detach().clone() for p in params]
    params[1].grad = None
    params[1].data = params[1].data.to(dtype)
    fill(params)
    optimizer.step()
    assert all(not torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert all(p.isfinite().all() for p in params)


@every
@pytest.mark.parametrize("freed", ["gradient", "parameter", "state"])
def test_freed_memory_is_no_zero_to_kernels(kind, freed):
    """Multi-tensor calls are torch's own, which read freed memory."""
    params, optimizer = trained(kind, {"fused": True})
    state = next(s for s in optimizer.state[params[1]].values() if s.shape == (5,))
    tensor = {"gradient": params[1].grad, "parameter": params[1].data, "state": state}[freed]
    before, moments = params[0].detach().clone(), optimizer.state[params[0]]["step"].clone()
    kept = tensor.clone()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="memory"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert optimizer.state[params[0]]["step"] == moments
    tensor.untyped_storage().resize_(20)
    tensor.copy_(kept)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == moments + 1


@every
@each_mode
def test_steps_in_inference_mode(kind, mode):
    """The first, a later one, and such a one among ordinary ones."""
    params, optimizer = trained(kind, mode)
    draw = torch.Generator().manual_seed(0)
    others = [nn.Parameter(torch.randn(p.shape, generator=draw)) for p in params]
    with torch.inference_mode():
        theirs = kind(others, lr=0.01, **mode)
    for count in range(4):
        fill(others)
        with torch.inference_mode(count < 2):
            theirs.step()
    fill(params)
    optimizer.step()
    optimizer.step()
    assert_same(snapshot(optimizer, params), snapshot(theirs, others))
    with torch.inference_mode():
        theirs.load_state_dict(theirs.state_dict())
        theirs.diagnostics()
    theirs.step()
    assert not any(s.is_inference() for state in theirs.state.values() for s in state.values())
    assert not torch.equal(others[0], params[0])


@every
@each_mode
def test_states_stay_the_tensors_that_they_were(kind, mode):
    p = nn.Parameter(torch.ones(3))
    optimizer = kind([p, nn.Parameter(torch.ones(2))], lr=0.1, **mode)
    held = dict(optimizer.state[p])
    for count in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
        assert held["step"] == count + 1
    for name, value in optimizer.state[p].items():
        assert value is held[name]


DICTS = {
    "none": lambda saved: None,
    "a list": lambda saved: [saved],
    "text": lambda saved: "state",
    "state none": lambda saved: {**saved, "state": None},
    "groups none": lambda saved: {**saved, "param_groups": None},
    "groups text": lambda saved: {**saved, "param_groups": "ab"},
    "a group none": lambda saved: {**saved, "param_groups": [None]},
    "a group a list": lambda saved: {**saved, "param_groups": [[0, 1]]},
    "no groups": lambda saved: {**saved, "param_groups": []},
    "two groups": lambda saved: {**saved, "param_groups": saved["param_groups"] * 2},
    "params none": lambda saved: group_with(saved, params=None),
    "params missing": lambda saved: group_without(saved, "params"),
    "params a number": lambda saved: group_with(saved, params=0),
    "one parameter": lambda saved: group_with(saved, params=[0]),
    "lists for keys": lambda saved: group_with(saved, params=[[0], [1]]),
    "one key twice": lambda saved: group_with(saved, params=[0, 0]),
    "names none": lambda saved: group_with(saved, param_names=[None, 3]),
    "names a number": lambda saved: group_with(saved, param_names=3),
    "a state none": lambda saved: {**saved, "state": {**saved["state"], 0: None}},
    "a state a list": lambda saved: {**saved, "state": {**saved["state"], 0: [1, 2]}},
    "a strange state none": lambda saved: {**saved, "state": {**saved["state"], 9: None}},
    "states a list": lambda saved: {**saved, "state": [*saved["state"].values()]},
    "an unknown state on meta": lambda saved: state_with(saved, torch.ones(2, device="meta")),
    "an unknown state sparse": lambda saved: state_with(saved, torch.ones(2).to_sparse()),
    "an unknown state too large": lambda saved: state_with(saved, 10**400),
    "a state's names": lambda saved: {**saved, "state": {0: {1: 2}, 1: {None: 3}}},
}


def state_with(saved, value):
    return {**saved, "state": {**saved["state"], 0: {**saved["state"][0], "zzz": value}}}


def group_with(saved, **more):
    return {**saved, "param_groups": [{**saved["param_groups"][0], **more}]}


def group_without(saved, name):
    group = {key: value for key, value in saved["param_groups"][0].items() if key != name}
    return {**saved, "param_groups": [group]}


@every
@pytest.mark.parametrize("change", DICTS)
def test_state_dicts_of_other_kinds(kind, change):
    draw = torch.Generator().manual_seed(0)
    params = [(n, nn.Parameter(torch.randn(3, 2, generator=draw))) for n in ("first", "second")]
    optimizer = kind(params, lr=0.01)
    found = DICTS[change](copy.deepcopy(optimizer.state_dict()))
    before = snapshot(optimizer, [p for _, p in params])
    # torch itself counts groups and parameters.
    with pytest.raises(ValueError, match=r"Remedy|parameter group") as caught:
        optimizer.load_state_dict(found)
    assert "\n" not in str(caught.value)
    assert_same(before, snapshot(optimizer, [p for _, p in params]))


@pytest.mark.parametrize("change", DICTS)
def test_checkpoints_of_icefall_of_other_kinds(change):
    params = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]
    optimizer = ScaledAdam(params, lr=0.01)
    found = DICTS[change](copy.deepcopy(optimizer.state_dict()))
    before = snapshot(optimizer, params)
    with pytest.raises(InputError, match="Remedy"):
        optimizer.load_icefall_state_dict(found)
    assert_same(before, snapshot(optimizer, params))


STRANGE = {
    "a whole number past float64": lambda t: 10**400,
    "nested": lambda t: torch.nested.nested_tensor([torch.ones(2)]),
    "quantized": lambda t: torch.quantize_per_tensor(torch.ones(t.shape), 0.1, 0, torch.qint8),
    "complex": lambda t: torch.ones(t.shape, dtype=torch.complex64),
}


@every
@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize")
def test_states_and_options_of_strange_types(kind, change):
    params, optimizer = trained(kind, {"foreach": True})
    before = snapshot(optimizer, params)
    for name, value in optimizer.state_dict()["state"][1].items():
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][1][name] = change(value)
        with pytest.raises(InputError, match="Remedy"):
            optimizer.load_state_dict(saved)
    for name in ("lr", "eps"):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0][name] = change(torch.ones(2))
        with pytest.raises(InputError, match="Remedy"):
            optimizer.load_state_dict(saved)
    assert_same(before, snapshot(optimizer, params))


@pytest.mark.parametrize("delta", [1, "x", [], None], ids=repr)
def test_a_stack_of_icefall_that_is_no_tensor(delta):
    optimizer = ScaledAdam([nn.Parameter(torch.ones(3, 2))])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["delta"] = delta
    # It marks steadygrad's own checkpoints.
    del saved["state"][0]["skipped"]
    with pytest.raises(InputError, match="delta"):
        optimizer.load_icefall_state_dict(saved)


@every
@each_mode
def test_an_empty_parameter_that_gets_elements_is_refused(kind, mode):
    """Its state has none; else it would never be stepped, and nobody told."""
    full, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))
    optimizer = kind([full, empty], lr=0.01, **mode)
    fill([full, empty])
    optimizer.step()
    before = full.detach().clone()
    empty.grad = None
    empty.data = torch.ones(4)
    fill([full, empty])
    with pytest.raises(InputError, match="shape and device of their state"):
        optimizer.step()
    assert torch.equal(full, before)


@every
def test_parameter_names_of_another_length(kind):
    params = [("a", nn.Parameter(torch.ones(3))), ("b", nn.Parameter(torch.ones(3)))]
    optimizer = kind(params, lr=0.01)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["param_names"] = ["a"]
    with pytest.raises(InputError, match="`param_names` for all or none"):
        optimizer.load_state_dict(saved)
