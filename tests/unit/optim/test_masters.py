"""A master keeps its digits until somebody else writes to the weight."""

import pytest
import torch

from steadygrad.optim.passes import sync_masters
from steadygrad.optim.state import MASTER, ensure_master

WANTED = {"master_weights": None}
narrow = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def pair(dtype):
    master = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    return master.to(dtype).requires_grad_(), {MASTER: master}


@pytest.mark.parametrize(
    ("dtype", "wish", "expected"),
    [
        (torch.float16, None, True),
        (torch.bfloat16, True, True),
        (torch.bfloat16, False, False),
        (torch.float32, True, False),
        (torch.float64, None, False),
    ],
)
def test_who_has_a_master(dtype, wish, expected):
    state = {}
    ensure_master(torch.zeros(2, dtype=dtype), state, {"master_weights": wish})
    assert (MASTER in state) is expected


def synced(parameter, state):
    sync_masters([parameter.detach()], [state[MASTER]])
    return state[MASTER]


@narrow
def test_an_untouched_master_keeps_every_bit(dtype):
    parameter, state = pair(dtype)
    expected = state[MASTER].clone()
    assert synced(parameter, state) is state[MASTER]
    assert torch.equal(state[MASTER], expected)
    assert (state[MASTER] != parameter.detach().float()).any()


def in_place(parameter, value):
    with torch.no_grad():
        parameter.copy_(value)


def through_data(parameter, value):
    parameter.data.copy_(value)


def exchanged(parameter, value):
    parameter.data = value.to(parameter.dtype)


@narrow
@pytest.mark.parametrize("write", [in_place, through_data, exchanged])
def test_a_written_weight_is_followed_and_others_keep_their_bits(dtype, write):
    parameter, state = pair(dtype)
    master, value = state[MASTER].clone(), parameter.detach().clone()
    value[2] = 7.0
    value[3] = -7.0
    value[0, 0] = 0.0
    write(parameter, value)
    followed = synced(parameter, state)
    expected = master.clone()
    expected[2] = 7.0
    expected[3] = -7.0
    expected[0, 0] = 0.0
    assert torch.equal(followed, expected)


@narrow
def test_a_swap_out_and_back_in_loses_nothing(dtype):
    parameter, state = pair(dtype)
    master, weights = state[MASTER].clone(), parameter.detach().clone()
    parameter.data.zero_()
    parameter.data.copy_(weights)
    assert torch.equal(synced(parameter, state), master)


def test_a_weight_that_is_not_finite_is_followed_too():
    parameter, state = pair(torch.float16)
    parameter.data[0, 0], parameter.data[1, 1] = torch.nan, torch.inf
    followed = synced(parameter, state)
    assert followed[0, 0].isnan()
    assert followed[1, 1].isinf()
    assert followed.isfinite().sum() == followed.numel() - 2


@narrow
def test_a_master_comes_and_goes_with_the_models_type(dtype):
    parameter, state = pair(dtype)
    master = state[MASTER]
    ensure_master(parameter, state, WANTED)
    assert state[MASTER] is master
    parameter.data = parameter.data.float()
    ensure_master(parameter, state, WANTED)
    assert MASTER not in state
    parameter.data = parameter.data.to(dtype)
    ensure_master(parameter, state, WANTED)
    assert torch.equal(state[MASTER], parameter.detach().float())
