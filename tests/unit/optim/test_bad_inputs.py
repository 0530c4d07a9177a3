"""Input that a step cannot use is refused before anything moves, or works.

Options that a constructor or a state dict brings are the contracts' affair; here somebody changes
an option, a parameter or a state between two steps.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam, checks, skipping
from steadygrad.optim.skipping import SkipMonitor
from tests.contracts.problems import assert_same, give_gradients, run, snapshot
from tests.contracts.table import MODES
from tests.covering import covering

KINDS = [LAMB, LANS, ScaledAdam]


def trained(kind, mode, **options):
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((4, 3), (5,))]
    optimizer = kind(params, lr=0.01, **mode, **options)
    run(optimizer, params, range(2))
    give_gradients(params, 2, none=False)
    return params, optimizer


def assert_refused(params, optimizer, match, error=InputError):
    before = snapshot(optimizer, params)
    for _ in range(2):  # it is not taken for known
        with pytest.raises(error, match=match):
            optimizer.step()
    assert_same(before, snapshot(optimizer, params))


def assert_goes_on(params, optimizer):
    before = params[0].detach().clone()
    optimizer.step()
    assert not torch.equal(params[0], before)
    assert {float(optimizer.state[p]["step"]) for p in params} == {3}


EDITED = [
    (LANS, {"lr": float("nan")}),
    (LANS, {"fused": True, "foreach": True}),
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
    assert_goes_on(params, optimizer)


@pytest.mark.parametrize(
    ("ours", "theirs", "option", "value"),
    [(LANS, LAMB, "adapt", False), (LAMB, LANS, "clip_value", 0.1)],
)
def test_lans_and_lamb_do_not_take_each_others_options_and_states(ours, theirs, option, value):
    """Their states have the same names, and moments of gradients on different scales."""
    params, optimizer = trained(ours, {})
    before = snapshot(optimizer, params)
    with pytest.raises(InputError, match=option):
        optimizer.load_state_dict(theirs(params).state_dict())
    assert_same(before, snapshot(optimizer, params))
    optimizer.param_groups[0][option] = value
    assert_refused(params, optimizer, option)


# While a CUDA graph records: a rate on the host would be baked in, also one of one element.
NOT_READY = {
    "lr": ({}, {"lr": torch.tensor(0.01)}),
    "lr of one element": ({"lr": torch.tensor([0.01])}, {}),
    "capturable": ({}, {"capturable": False}),
}


@pytest.mark.parametrize("case", NOT_READY)
def test_a_step_that_is_not_ready_for_a_graph(case, monkeypatch):
    params, now = [nn.Parameter(torch.ones(3)) for _ in range(2)], [False]
    for module in (checks, skipping):
        monkeypatch.setattr(module, "is_capturing", lambda: now[0])
    groups = [{"params": [p], **o} for p, o in zip(params, NOT_READY[case], strict=True)]
    optimizer = LANS(groups, capturable=True)
    run(optimizer, params, range(2))
    now[0] = True
    assert_refused(params, optimizer, case.split()[0], RuntimeError)
    # A plain number is meant to hold, once all groups say so.
    for group in optimizer.param_groups:
        group.update(lr=0.01, capturable=True)
    assert_goes_on(params, optimizer)


def test_numpy_rates_are_saved_as_plain_numbers():
    saved = LANS([nn.Parameter(torch.ones(3))], lr=np.float64(0.1)).state_dict()
    assert type(saved["param_groups"][0]["lr"]) is float
    assert saved["param_groups"][0]["lr"] == 0.1


# What is exchanged, for what, and the piece of the message.
DATA = {
    "shape of a parameter": ("parameter", lambda t: torch.zeros(6), "shape"),
    "axes of a parameter": ("parameter", lambda t: torch.zeros(5, 1), "shape"),
    "expanded": ("parameter", lambda t: torch.zeros(1).expand(5), "share memory"),
    "float8": ("parameter", lambda t: t.to(torch.float8_e5m2), "float8_e5m2"),
    "shape of a gradient": ("gradient", lambda t: torch.arange(3.0), "shapes"),
    "rows of a state": ("state", lambda t: t[:2].clone(), "shape"),
}


def assert_data_refused(kind, mode, what, make, found):
    """Of the last parameter, so that another could have moved before it is looked at."""
    params, optimizer = trained(kind, mode)
    last, state = params[1], optimizer.state[params[1]]["exp_avg_sq"]
    tensor = {"parameter": last, "gradient": last.grad, "state": state}[what]
    first, kept = params[0].detach().clone(), tensor.detach().clone()
    if what == "parameter":
        last.grad = None
    tensor.data = make(tensor.detach())
    if what == "parameter" and found != "float8_e5m2":
        last.grad = torch.ones_like(last)
    with pytest.raises(InputError, match=found):
        optimizer.step()
    assert torch.equal(params[0], first)
    assert optimizer.state[params[0]]["step"] == 2
    last.grad, tensor.data = None, kept
    give_gradients(params, 3)
    assert_goes_on(params, optimizer)


@covering(kind=KINDS, mode=MODES, change=DATA)
def test_data_exchanged_for_what_does_not_fit(kind, mode, change):
    assert_data_refused(kind, mode, *change)


def freed(tensor):
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


@pytest.mark.parametrize("what", ["gradient", "parameter", "state"])
def test_freed_memory_is_no_zero_to_kernels(what):
    """Multi-tensor calls are torch's own, which read freed memory."""
    assert_data_refused(LANS, MODES["fused"], what, freed, "memory")


def test_an_empty_parameter_that_gets_elements_is_refused():
    """Its state has none; else it would never be stepped, and nobody told."""
    full, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))
    optimizer = LANS([full, empty], lr=0.01)
    run(optimizer, [full, empty], [0])
    empty.grad = None
    empty.data = torch.ones(4)
    give_gradients([full, empty], 1)
    assert_refused([full], optimizer, "shape and device of their state")


@covering(mode=MODES, dtype=[torch.float32, torch.bfloat16])
def test_autograd_is_told_of_the_parameters_that_moved_alone(mode, dtype):
    used, other = nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = LANS([used, other], lr=0.1, **mode)
    for _ in range(2):
        used.grad = torch.ones(3, dtype=dtype)
        other.grad = None
        loss, graph = (other**2).sum(), (used**2).sum()
        optimizer.step()
        loss.backward()
        with pytest.raises(RuntimeError, match="inplace"):
            graph.backward()


@pytest.mark.parametrize(
    ("counts", "ready", "found"),
    [
        ((500, 500, 500), True, 0),
        ((500, 600, 600), True, 1),
        ((0, 99, 198, 297), True, 0),
        ((0, 100, 200, 300), True, 2),
        ((0, 100, 200, 300), False, 0),
    ],
)
def test_an_accelerators_count_is_looked_at_an_interval_later(counts, ready, found, monkeypatch):
    """Steps that were skipped before a resume are none in a row; a copy may not be there yet."""
    event, monitor = SimpleNamespace(query=lambda: ready), SkipMonitor("LANS")
    copied = lambda count: SimpleNamespace(numbers=count.clone(), event=event)
    monkeypatch.setattr(skipping, "HostCopy", copied)
    skips = [monitor._skips_of_an_interval(torch.tensor(float(count))) for count in counts]
    assert sum(count >= 100 for count in skips) == found
