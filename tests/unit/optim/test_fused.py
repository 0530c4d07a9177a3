"""Compiled loops find every tensor where it lies now, and leave alone what they cannot take."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

from steadygrad.optim import LANS, ScaledAdam, loops
from tests.contracts.problems import assert_rounded_alike, assert_same


def clipped(params, **mode):
    return ScaledAdam(params, clipping_scale=2.0, **mode)


def start():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=draw).requires_grad_() for s in ((6, 5), (7,), ())]


def fill(params, step):
    draw = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw)


def move_weight(params, optimizer, step):
    params[0].data = params[0].detach().clone()


def move_state(params, optimizer, step):
    state = optimizer.state[params[0]]
    state["exp_avg_sq"] = torch.full_like(state["exp_avg_sq"], 0.5)


def move_memory_of_state(params, optimizer, step):
    optimizer.state[params[0]]["exp_avg_sq"].data = torch.full((6, 5), 0.5)


def move_count(params, optimizer, step):
    state = optimizer.state[params[0]]
    state["step"] = state["step"].clone()


def move_all_state(params, optimizer, step):
    state = optimizer.state[params[0]]
    optimizer.state[params[0]] = {**state, "exp_avg_sq": torch.full_like(state["exp_avg_sq"], 0.5)}


def load(params, optimizer, step):
    optimizer.load_state_dict(optimizer.state_dict())


def edit_counts(params, optimizer, step):
    """The first pass's numbers of the step before are no longer those that are needed."""
    for p in params:
        optimizer.state[p]["step"].fill_(0 if step == 2 else 7)


def turn_gradient(params, optimizer, step):
    g = params[0].grad
    params[0].grad = g.t().contiguous().t() if step == 2 else torch._neg_view(-g)


def drop_gradient(params, optimizer, step):
    params[step % 3].grad = None


def exchange_modes(params, optimizer, step):
    group = optimizer.param_groups[0]
    group["fused"], group["foreach"] = group["foreach"], group["fused"]


CHANGES = [
    move_weight,
    move_state,
    move_memory_of_state,
    move_count,
    move_all_state,
    load,
    edit_counts,
    turn_gradient,
    drop_gradient,
    exchange_modes,
]


@pytest.mark.parametrize("make", [LANS, clipped])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_is_noticed(make, change):
    found = []
    for mode in ({"fused": True}, {"foreach": True}):
        params = start()
        optimizer = make(params, **mode)
        for step in range(7):
            fill(params, step)
            if step in (2, 5):
                change(params, optimizer, step)
            optimizer.step()
        found.append(optimizer)
    assert_rounded_alike(*found)


def test_what_is_of_no_use_any_more_is_let_go():
    """Gradients after a step, and states after a load."""
    params = start()
    optimizer = clipped(params, fused=True)
    fill(params, 0)
    gradients = [weakref.ref(p.grad) for p in params]
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert [one() for one in gradients] == [None] * 3
    state = weakref.ref(optimizer.state[params[0]]["exp_avg_sq"])
    load(params, optimizer, 1)
    fill(params, 1)
    optimizer.step()
    gc.collect()
    assert state() is None


@pytest.mark.parametrize("mode", ["fused", "foreach"])
def test_weights_are_free_between_steps(mode):
    p = torch.randn(8, 8).requires_grad_()
    optimizer = LANS([p], **{mode: True})
    p.grad = torch.ones(8, 8)
    optimizer.step()
    kept = weakref.ref(p.untyped_storage())
    p.grad = None
    p.data = torch.empty(0)
    assert kept() is None


def test_a_graph_that_still_needs_the_weights_is_told():
    params = start()
    optimizer = LANS(params, fused=True)
    loss = params[0].square().sum()
    fill(params, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_what_loops_cannot_take_goes_by_calls(monkeypatch):
    monkeypatch.setattr(loops, "_WARNED", set())
    found = []
    for mode in ("fused", "foreach"):
        base = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
        params = [base[:, ::2].detach().requires_grad_(), base[:, 1].clone().requires_grad_()]
        optimizer = clipped(params, **{mode: True})
        for step in range(4):
            fill(params, step)
            is_told = mode == "fused" and step == 0
            with pytest.warns(UserWarning, match="strides") if is_told else nullcontext():
                optimizer.step()
        found.append(optimizer)
    assert_rounded_alike(*found)


@pytest.mark.parametrize("mode", ["fused", "foreach"])
def test_a_frozen_parameter_is_not_looked_at(mode):
    """Its weights may even be no numbers; they stop no step, at size steps neither."""
    params = start()
    params[0].requires_grad_(False)
    params[0][0, 0] = torch.nan
    before = params[0].clone()
    optimizer = ScaledAdam(params, **{mode: True})
    for step in range(5):
        fill(params[1:], step)
        optimizer.step()
    assert optimizer.skipped == 0
    assert_same([params[0].nan_to_num(7.0)], [before.nan_to_num(7.0)])
