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


def stack_of(optimizer, params, name):
    """The rows' common storage, or a failure."""
    rows = [optimizer.state[p][name] for p in params]
    assert len({row.untyped_storage().data_ptr() for row in rows}) == 1
    return rows


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


def test_state_lies_in_one_stack_and_stays_there():
    params = make_params()
    optimizer = Momentum(params)
    same_shape = [p for p in params if p.shape == (3, 4)]
    rows = stack_of(optimizer, same_shape, "velocity")
    assert [row.storage_offset() for row in rows] == [0, 12, 24]
    run(optimizer, params, range(3))
    assert all(optimizer.state[p]["velocity"] is r for p, r in zip(same_shape, rows, strict=True))


@pytest.mark.parametrize("way", ["dict", "file"])
def test_a_loaded_state_is_stacked_once(way):
    params = make_params()
    optimizer = Momentum(params)
    run(optimizer, params, range(2))
    state = optimizer.state_dict()
    optimizer.load_state_dict(through_a_file(state) if way == "file" else state)
    optimizer.step()
    same_shape = [p for p in params if p.shape == (3, 4)]
    rows = stack_of(optimizer, same_shape, "velocity")
    optimizer.step()
    assert all(optimizer.state[p]["velocity"] is r for p, r in zip(same_shape, rows, strict=True))


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


def test_rows_of_two_stacks_are_not_taken_for_one():
    params, others = make_params(), make_params()
    first, second = Momentum(params), Momentum(others)
    first.state[params[1]]["velocity"] = second.state[others[1]]["velocity"].fill_(5)
    set_grads(params, 0)
    first.none_grads = "zero"
    first.step()
    assert torch.equal(first.state[params[1]]["velocity"], 4.5 + params[1].grad)
    stack_of(first, [params[i] for i in (0, 1, 4)], "velocity")


def test_a_deepcopy_keeps_its_stack():
    params = make_params()
    copies, optimizer = copy.deepcopy((params, Momentum(params)))
    same_shape = [p for p in copies if p.shape == (3, 4)]
    rows = stack_of(optimizer, same_shape, "velocity")
    set_grads(copies, 0)
    optimizer.none_grads = "zero"
    optimizer.step()
    assert optimizer.state[same_shape[1]]["velocity"] is rows[1]
    assert torch.equal(rows[1], same_shape[1].grad)


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
    stack_of(optimizer, [fresh, params[0], params[1], params[4]], "velocity")


def test_a_state_that_the_saved_version_lacked_starts_from_init_state():
    class Newer(Momentum):
        def init_state(self, batch):
            return {**super().init_state(batch), "slow": batch.param * 3}

    params = make_params()
    old = Momentum(params)
    run(old, params, range(2))
    newer = Newer(params)
    newer.load_state_dict(old.state_dict())
    with newer.batched_params(newer.param_groups[0]) as batches:
        assert "slow" in batches[0].state
        assert "fast" not in batches[0].state
        assert torch.equal(batches[0].state["slow"][1], params[1] * 3)
    assert torch.equal(newer.state[params[1]]["slow"], params[1] * 3)
    with pytest.raises(KeyError, match="Found 'fast'; known are"):
        batches[0].state["fast"]


def test_state_of_a_part_of_a_batch_without_init_state():
    params = make_params()
    optimizer = Bare(params)
    optimizer.state[params[0]]["m"] = torch.zeros(3, 4)
    with (
        pytest.raises(InputError, match=r"`init_state` to return 'm', which 'params\.1' lacks"),
        optimizer.batched_params(optimizer.param_groups[0]),
    ):
        pass


def test_state_of_two_types_in_a_batch():
    params = make_params()
    optimizer = Bare(params)
    for p in params:
        optimizer.state[p]["m"] = torch.zeros(3, 4)
    optimizer.state[params[1]]["m"] = torch.zeros(3, 4, dtype=torch.float64)
    with (
        pytest.raises(InputError, match="state 'm' to be of one shape, type and device"),
        optimizer.batched_params(optimizer.param_groups[0]),
    ):
        pass


def test_shapes_are_mixed():
    """A guard on the tests above: more than one batch, one of several, scalars, and nothing."""
    assert SHAPES.count((3, 4)) == 3
    assert () in SHAPES
    assert (0,) in SHAPES


def test_a_state_of_another_shape_is_refused():
    params, others = make_params(), [p.detach().reshape(-1).clone() for p in make_params()]
    optimizer, other = Momentum(params), Momentum([p.requires_grad_() for p in others])
    before = {p: optimizer.state[p]["velocity"].clone() for p in params}
    with pytest.raises(InputError, match=r"`velocity` with the parameter's shape"):
        optimizer.load_state_dict(other.state_dict())
    assert all(torch.equal(optimizer.state[p]["velocity"], v) for p, v in before.items())


def test_a_group_added_later_has_its_state_at_once():
    optimizer, late = Momentum(make_params()), torch.ones(4, 2, requires_grad=True)
    optimizer.add_param_group({"params": [late]})
    assert torch.equal(optimizer.state[late]["velocity"], torch.zeros(4, 2))
    # Without `allocate_state` a group waits for its first step, as all others do.
    lazy = Bare([torch.ones(2, requires_grad=True)])
    lazy.add_param_group({"params": [late.detach().clone().requires_grad_()]})
    assert not any(lazy.state.values())
