"""Defects that readers found, each with a test that was red before it was mended."""

import copy
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam, skipping
from steadygrad.optim.skipping import SkipMonitor

KINDS = [LAMB, LANS, ScaledAdam]
MODES = ["fused", "foreach"]
every = pytest.mark.parametrize("kind", KINDS)


def stepped(kind, mode="foreach"):
    p = nn.Parameter(torch.ones(3))
    optimizer = kind([p], lr=0.1, **{mode: True})
    p.grad = torch.ones(3)
    optimizer.step()
    return p, optimizer


@every
@pytest.mark.parametrize("mode", MODES)
def test_a_state_past_the_range_of_its_type_is_refused(kind, mode):
    _p, optimizer = stepped(kind, mode)
    saved = optimizer.state_dict()
    for name, value in saved["state"][0].items():
        if name == "model_norm_threshold":
            continue  # infinite before there is one
        damaged = copy.deepcopy(saved)
        damaged["state"][0][name] = torch.full_like(value, 1e300, dtype=torch.float64)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(InputError, match=name):
            optimizer.load_state_dict(damaged)
        assert optimizer.state_dict()["state"][0].keys() == before["state"][0].keys()
        for key, kept in before["state"][0].items():
            assert torch.equal(optimizer.state_dict()["state"][0][key], kept)


@every
def test_a_group_that_fails_for_any_reason_leaves_nothing_behind(kind, monkeypatch):
    _p, optimizer = stepped(kind)
    other = nn.Parameter(torch.ones(3))
    with pytest.raises(InputError, match="eps"):
        optimizer.add_param_group({"params": [other], "eps": -0.1})

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(kind, "_fill_state", fail)
    with pytest.raises(MemoryError):
        optimizer.add_param_group({"params": [other]})
    assert len(optimizer.param_groups) == 1
    assert other not in optimizer.state


@every
@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_of_another_shape_is_refused_before_anything_moves(kind, mode):
    p = nn.Parameter(torch.ones(4, 5))
    optimizer = kind([p], lr=0.1, **{mode: True})
    p.grad = torch.ones(4, 5)
    optimizer.step()
    before, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
    p.grad.data = torch.arange(5.0)
    with pytest.raises(InputError, match="shapes"):
        optimizer.step()
    assert torch.equal(p, before)
    for name, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, state[0][name])


@pytest.mark.parametrize("kind", [LAMB, LANS])
@pytest.mark.parametrize("mode", [*MODES, "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_took_no_part_is_as_it_was_for_autograd(kind, mode, dtype):
    used, other = nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(3, dtype=dtype))
    options = {"foreach": False} if mode == "single" else {mode: True}
    optimizer = kind([used, other], lr=0.1, **options)
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
    copied = lambda count: SimpleNamespace(numbers=count.clone(), event=event)  # noqa: E731
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


@every
@pytest.mark.parametrize("limit", [0, -1, None])
def test_no_limit_is_no_warning(kind, limit):
    p, optimizer = stepped(kind)
    optimizer.warn_after_skips = limit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            p.grad = torch.full((3,), torch.nan)
            optimizer.step()
    assert optimizer.skipped == 3


@pytest.mark.parametrize(("ours", "theirs"), [(LANS, LAMB), (LAMB, LANS)])
def test_lans_and_lamb_do_not_load_each_others_states(ours, theirs):
    """Their states have the same names, and moments of gradients on different scales."""
    p = torch.ones(3).requires_grad_()
    optimizer = ours([p])
    with pytest.raises(InputError, match="another optimizer"):
        optimizer.load_state_dict(theirs([p]).state_dict())
    option = {LANS: {"adapt": False}, LAMB: {"clip_value": 0.1}}[ours]
    with pytest.raises(InputError, match=f"`{next(iter(option))}`"):
        ours([{"params": [p], **option}])
    optimizer.param_groups[0].update(option)
    p.grad = torch.ones(3)
    with pytest.raises(InputError, match=f"`{next(iter(option))}`"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3))


def test_names_that_are_exchanged_between_groups_are_refused():
    first, second = (torch.ones(3).requires_grad_() for _ in range(2))
    a, b = {"params": [("a", first)]}, {"params": [("b", second)]}
    saved = LANS([a, b]).state_dict()
    with pytest.raises(InputError, match="'b'"):
        LANS([{"params": [("b", second)]}, {"params": [("a", first)]}]).load_state_dict(saved)
