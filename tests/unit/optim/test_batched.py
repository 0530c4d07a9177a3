"""`BatchedOptimizer`: stacked computation, state for each parameter."""

import copy
import io

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from tests.unit.optim.batched_examples import (
    SHAPES,
    Adam,
    Bare,
    Momentum,
    assert_same,
    make_params,
    set_grads,
)

TORCH = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, foreach=False),
}
OURS = {
    "momentum": lambda params: Momentum(params, none_grads="skip"),
    "adam": Adam,
}
# Parameter 1 never has a gradient, 4 and 5 have none now and then: batches change.
NONE = [(1,), (1, 4), (1,), (1, 4, 5), (1, 5), (1,), (1,), (1, 4), (1,), (1,)]


def run(optimizer, params, steps):
    for step in steps:
        set_grads(params, step, NONE[step])
        optimizer.step()


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_equals_torchs_own_to_the_bit(name, dtype):
    ours, theirs = make_params(dtype), make_params(dtype)
    run(OURS[name](ours), ours, range(10))
    run(TORCH[name](theirs), theirs, range(10))
    assert not torch.equal(ours[0], make_params(dtype)[0])
    assert_same(ours, theirs)


@pytest.mark.parametrize("way", ["dict", "file", "deepcopy"])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_resumes_to_the_bit(name, way):
    straight = make_params()
    run(OURS[name](straight), straight, range(10))

    params = make_params()
    first = OURS[name](params)
    run(first, params, range(5))
    if way == "deepcopy":
        params, second = copy.deepcopy((params, first))
    else:
        state = first.state_dict()
        params = [nn.Parameter(p.detach().clone()) for p in params]
        second = OURS[name](params)
        second.load_state_dict(through_a_file(state) if way == "file" else state)
    if name == "momentum":
        second.none_grads = "skip"  # torch keeps groups and state only
    run(second, params, range(5, 10))
    assert_same(params, straight)


def test_a_loaded_state_is_a_copy():
    params = make_params()
    first = Momentum(params)
    run(first, params, range(2))
    before = first.state[params[0]]["velocity"].clone()
    others = make_params()
    second = Momentum(others)
    second.load_state_dict(first.state_dict())
    run(second, others, range(2, 5))
    assert torch.equal(first.state[params[0]]["velocity"], before)


def test_assigned_state_stays_where_it_is():
    params = make_params()
    optimizer = Adam(params)
    run(optimizer, params, [0])
    rows = [optimizer.state[params[i]]["mean"] for i in (0, 4)]
    values = [row.clone() for row in rows]
    run(optimizer, params, [0])
    assert optimizer.state[params[0]]["mean"] is rows[0]
    assert optimizer.state[params[4]]["mean"] is rows[1]
    assert not torch.equal(rows[0], values[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_keeps_its_own_type_through_a_load(dtype):
    params = make_params(dtype)
    optimizer = Momentum(params, state_dtype=torch.float32)
    set_grads(params, 0)
    optimizer.step()
    for p in params:
        optimizer.state[p]["velocity"].mul_(1 + 2**-13)  # digits that 16 bits cannot hold
    want = [optimizer.state[p]["velocity"].clone() for p in params]
    assert not torch.equal(want[0], want[0].to(dtype).float())
    others = make_params(dtype)
    loaded = Momentum(others, state_dtype=torch.float32)
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    got = [loaded.state[p]["velocity"] for p in others]
    assert all(row.dtype == torch.float32 for row in got)
    assert_same(got, want)


def test_hooks_of_load_state_dict_see_tensors_and_have_their_say():
    params = make_params()
    optimizer = Momentum(params)
    seen = []

    def double(_, state_dict):
        state_dict["state"] = copy.deepcopy(state_dict["state"])
        for values in state_dict["state"].values():
            values["velocity"] += 2

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[params[0]]["velocity"].clone())
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(seen[0], torch.full((3, 4), 2.0, dtype=torch.float64))


def test_new_members_of_a_batch_start_from_init_state():
    params = make_params()
    optimizer = Momentum(params)
    run(optimizer, params, range(2))
    kept = optimizer.state[params[0]]["velocity"].clone()
    fresh = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    optimizer.param_groups[0]["params"].insert(0, fresh)
    del optimizer.state[params[1]]
    with optimizer.batched_params(optimizer.param_groups[0]) as batches:
        velocity = batches[0].state["velocity"]
        assert torch.equal(velocity[1], kept)
        assert not velocity[0].any()
        assert not velocity[2].any()


def test_shapes_are_mixed():
    """A guard on the tests above: more than one batch, one of several, scalars, and nothing."""
    assert SHAPES.count((3, 4)) == 3
    assert () in SHAPES
    assert (0,) in SHAPES


def test_a_group_added_later_has_its_state_at_once():
    optimizer, late = Momentum(make_params()), torch.ones(4, 2, requires_grad=True)
    optimizer.add_param_group({"params": [late]})
    assert torch.equal(optimizer.state[late]["velocity"], torch.zeros(4, 2))
    # Without `allocate_state` a group waits for its first step, as all others do.
    lazy = Bare([torch.ones(2, requires_grad=True)])
    lazy.add_param_group({"params": [late.detach().clone().requires_grad_()]})
    assert not any(lazy.state.values())


def test_a_misspelt_option_is_refused():
    with pytest.raises(InputError, match=r"'momentun'.*'momentum'"):
        Momentum([{"params": make_params(), "momentun": 0.5}])


@pytest.mark.parametrize("value", ["0", None, [0.0], torch.eye(2).to_sparse()], ids=str)
def test_a_state_that_is_no_tensor_is_refused_and_changes_nothing(value):
    params = make_params()
    optimizer = Momentum(params)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["more"] = value
    run(optimizer, params, range(2))
    before = optimizer.state[params[0]]["velocity"].clone()
    with pytest.raises(InputError, match="`more` that is a number, or a dense tensor"):
        optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[params[0]]["velocity"], before)
    assert "more" not in optimizer.state[params[0]]
