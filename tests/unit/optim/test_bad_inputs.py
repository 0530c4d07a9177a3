"""Input that a step cannot use is refused before anything moves, or works.

Options that a constructor or a state dict brings are the contracts' affair; here somebody changes
an option, a parameter or a state between two steps.
"""

import copy
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam, skipping
from steadygrad.optim.skipping import SkipMonitor
from tests.contracts.problems import assert_same, snapshot
from tests.covering import covering

KINDS = [LAMB, LANS, ScaledAdam]
MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


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
    for _ in range(2):  # it is not taken for known
        with pytest.raises(InputError, match=match):
            optimizer.step()
    assert_same(before, snapshot(optimizer, params))


EDITED = [
    (LANS, {"lr": float("nan")}),
    (LANS, {"fused": True, "foreach": True}),
    (LANS, {"clip_value": -1.0}),
    (LAMB, {"adapt": 2}),
    (ScaledAdam, {"recipe": "zzz"}),
    *((ScaledAdam, {f"{what}_update_period": n}) for what in ("size", "clipping") for n in (2, 8)),
]


@pytest.mark.parametrize(("kind", "options"), EDITED, ids=str)
def test_options_edited_to_what_cannot_be(kind, options):
    params, optimizer = trained(kind, {})
    good = {name: optimizer.param_groups[0][name] for name in options}
    optimizer.param_groups[0].update(options)
    assert_refused(params, optimizer, next(iter(options)))
    optimizer.param_groups[0].update(good)
    before = params[0].detach().clone()
    optimizer.step()
    assert not torch.equal(params[0], before)


def test_options_edited_in_place():
    params, optimizer = trained(LANS, {})
    group, rate = optimizer.param_groups[0], torch.tensor(0.01)
    group.update(betas=[0.9, 0.99], lr=rate)
    optimizer.step()
    group["betas"][1] = 2.0
    assert_refused(params, optimizer, "betas")
    group["betas"][1] = 0.99
    rate.fill_(torch.nan)
    assert_refused(params, optimizer, "lr")


@pytest.mark.parametrize(("ours", "theirs"), [(LANS, LAMB), (LAMB, LANS)])
def test_lans_and_lamb_do_not_take_each_others_options_and_states(ours, theirs):
    """Their states have the same names, and moments of gradients on different scales."""
    params, optimizer = trained(ours, {})
    before = snapshot(optimizer, params)
    option, value = {LANS: ("adapt", False), LAMB: ("clip_value", 0.1)}[ours]
    with pytest.raises(InputError, match=option):
        optimizer.load_state_dict(theirs(params).state_dict())
    assert_same(before, snapshot(optimizer, params))
    with pytest.raises(InputError, match=option):
        ours([{"params": params, option: value}])
    optimizer.param_groups[0][option] = value
    assert_refused(params, optimizer, option)


def test_numpy_rates_are_saved_as_plain_numbers():
    saved = LANS([nn.Parameter(torch.ones(3))], lr=np.float64(0.1)).state_dict()
    assert type(saved["param_groups"][0]["lr"]) is float
    assert saved["param_groups"][0]["lr"] == 0.1


@each_mode
@pytest.mark.parametrize("place", [0, 1])
def test_a_count_whose_memory_was_exchanged(mode, place):
    """Through `.data`, of whichever parameter."""
    params, optimizer = trained(LANS, mode)
    optimizer.state[params[place]]["step"].data = torch.tensor(7.0)
    optimizer.step()
    assert optimizer.state[params[place]]["step"] == 8
    assert optimizer.state[params[1 - place]]["step"] == 3


def test_parameters_that_no_step_can_write_to():
    optimizer = LANS([nn.Parameter(torch.zeros(1).expand(1, 1))])  # one element is no overlap
    for wrong in (
        torch.zeros(1).expand(5),
        torch.zeros(2, 1).expand(2, 5),
        torch.zeros(4).to(torch.float8_e4m3fn),
    ):
        with pytest.raises(InputError, match="parameters"):
            LANS([nn.Parameter(wrong)])
        with pytest.raises(InputError, match="parameters"):
            optimizer.add_param_group({"params": [nn.Parameter(wrong)]})
    assert len(optimizer.param_groups) == 1


def test_a_group_that_fails_for_any_reason_leaves_nothing_behind(monkeypatch):
    params, optimizer = trained(LANS, {})
    other = nn.Parameter(torch.ones(3))

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(LANS, "_fill_state", fail)
    with pytest.raises(MemoryError):
        optimizer.add_param_group({"params": [other]})
    assert len(optimizer.param_groups) == 1
    assert {*optimizer.state} == {*params}


DATA = {
    "another shape": (lambda p: torch.zeros(6), "shape"),
    "as many elements": (lambda p: torch.zeros(5, 1), "shape"),
    "expanded": (lambda p: torch.zeros(1).expand(5), "share memory"),
    "float8": (lambda p: p.detach().to(torch.float8_e5m2), "float8_e5m2"),
}


@covering(kind=KINDS, mode=MODES, change=DATA)
def test_data_exchanged_for_what_does_not_fit(kind, mode, change):
    """Of the last parameter, so that another could have moved before it is found."""
    params, optimizer = trained(kind, mode)
    (first, last), (make, found) = params, change
    states, weight = copy.deepcopy(optimizer.state_dict()["state"]), first.detach().clone()
    last.grad, kept = None, last.detach().clone()
    last.data = make(last)
    last.grad = None if found == "float8_e5m2" else torch.ones_like(last)
    with pytest.raises(InputError, match=found):
        optimizer.step()
    assert torch.equal(first, weight)
    for i, state in optimizer.state_dict()["state"].items():
        assert_same(state.values(), states[i].values())
    last.grad, last.data = None, kept.clone()
    fill(params)
    optimizer.step()
    assert not torch.equal(last, kept)


@each_mode
def test_a_gradient_of_another_shape(mode):
    params, optimizer = trained(LANS, mode)
    params[0].grad.data = torch.arange(3.0)
    assert_refused(params, optimizer, "shapes")


@each_mode
def test_a_state_on_another_device(mode):
    """As a model's that was moved after its optimizer was built."""
    params, optimizer = trained(LANS, mode)
    state, weight = optimizer.state[params[1]], params[0].detach().clone()
    kept, state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg_sq"].to("meta")
    with pytest.raises(InputError, match="device"):
        optimizer.step()
    assert torch.equal(params[0], weight)
    state["exp_avg_sq"] = kept
    optimizer.step()
    assert not torch.equal(params[0], weight)


@pytest.mark.parametrize("freed", ["gradient", "parameter", "state"])
def test_freed_memory_is_no_zero_to_kernels(freed):
    """Multi-tensor calls are torch's own, which read freed memory."""
    params, optimizer = trained(LANS, {"fused": True})
    state = optimizer.state[params[1]]["exp_avg"]
    tensor = {"gradient": params[1].grad, "parameter": params[1].data, "state": state}[freed]
    before, kept = params[0].detach().clone(), tensor.clone()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="memory"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert optimizer.state[params[0]]["step"] == 2
    tensor.untyped_storage().resize_(20)
    tensor.copy_(kept)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 3


def test_an_empty_parameter_that_gets_elements_is_refused():
    """Its state has none; else it would never be stepped, and nobody told."""
    full, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))
    optimizer = LANS([full, empty], lr=0.01)
    fill([full, empty])
    optimizer.step()
    empty.grad = None
    empty.data = torch.ones(4)
    fill([full, empty])
    assert_refused([full], optimizer, "shape and device of their state")


@covering(kind=[LANS, ScaledAdam], mode=MODES)
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
    optimizer.step()
    optimizer.step()
    assert_same(snapshot(optimizer, params), snapshot(theirs, others))
    with torch.inference_mode():
        theirs.load_state_dict(theirs.state_dict())
        theirs.diagnostics()
    theirs.step()
    assert not any(s.is_inference() for state in theirs.state.values() for s in state.values())


@each_mode
def test_states_stay_the_tensors_that_they_were(mode):
    params, optimizer = trained(ScaledAdam, mode)
    held = dict(optimizer.state[params[0]])
    optimizer.step()
    assert held["step"] == 3
    assert all(value is held[name] for name, value in optimizer.state[params[0]].items())


@covering(mode=MODES, dtype=[torch.float32, torch.bfloat16])
def test_a_parameter_that_took_no_part_is_as_it_was_for_autograd(mode, dtype):
    used, other = nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = LANS([used, other], lr=0.1, **mode)
    for _ in range(2):
        used.grad = torch.ones(3, dtype=dtype)
        kept, loss = other._version, (other**2).sum()
        optimizer.step()
        assert other._version == kept
        assert used._version > 0
        loss.backward()
        other.grad = None


def looked(*counts, ready=True):
    """Warnings of a monitor that looks at these counts, one interval after the other."""
    monitor, event = SkipMonitor("LANS"), SimpleNamespace(query=lambda: ready)
    copied = lambda count: SimpleNamespace(numbers=count.clone(), event=event)
    with patch.object(skipping, "HostCopy", copied), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for count in counts:
            monitor._look(torch.tensor(float(count)), 100)
    return len(found)


def test_steps_that_were_skipped_before_a_resume_are_no_skips_in_a_row():
    assert looked(500, 500, 500, 500) == 0
    assert looked(500, 600, 600) == 1
    assert looked(0, 99, 198, 297) == 0
    assert looked(0, 100, 200, 300) == 2
    assert looked(0, 100, 200, 300, ready=False) == 0


@pytest.mark.parametrize("limit", [0, -1, None])
def test_no_limit_is_no_warning(limit):
    params, optimizer = trained(LANS, {})
    optimizer.warn_after_skips = limit
    for _ in range(3):
        params[0].grad.fill_(torch.nan)
        optimizer.step()
    assert optimizer.skipped == 3
