"""`batched_params`: what a batch holds, what is written back and when, what is refused."""

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from tests.unit.optim.batched_examples import (
    Bare,
    Momentum,
    NoHostSync,
    assert_same,
    make_params,
    set_grads,
)


def test_a_none_gradient_counts_as_zeros():
    params = make_params()
    optimizer = Momentum(params)
    set_grads(params, 0)
    optimizer.step()
    before = params[1].detach().clone()
    set_grads(params, 1, none=(1,))
    with optimizer.batched_params(optimizer.param_groups[0]) as (first, *_):
        assert first.has_grad == (True, False, True)
        assert not first.grad[1].any()
        assert torch.equal(first.grad[2], params[4].grad)
    velocity = optimizer.state[params[1]]["velocity"].clone()
    optimizer.step()
    # Momentum goes on moving it, as the class says.
    assert torch.equal(params[1], before.add(0.9 * velocity, alpha=-0.1))


def test_batches_go_by_shape_type_and_order():
    params = [*make_params(), nn.Parameter(torch.zeros(3, 4))]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    optimizer = Momentum(named)
    with optimizer.batched_params(optimizer.param_groups[0]) as batches:
        shapes = [tuple(b.param.shape) for b in batches]
        names = [b.names for b in batches]
        assert torch.equal(batches[0].param[1], params[1])
        assert batches[0].params[2] is params[4]
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert shapes == [(3, 3, 4), (2, 5), (1,), (1, 0), (1, 2, 3, 2), (1, 1), (1, 3, 4)]
    assert names[0] == ("p0", "p1", "p4")
    assert names[-1] == ("p9",)


def test_parameters_without_names_go_by_their_places():
    optimizer = Momentum(make_params())
    with optimizer.batched_params(optimizer.param_groups[0]) as batches:
        assert batches[1].names == ("params.2", "params.5")


def change_and_raise(batches):
    for batch in batches:
        batch.param.add_(1)
        batch.state["velocity"] = batch.param
        batch.state["new"] = batch.param
    raise RuntimeError("no")


def test_an_exception_writes_neither_parameters_nor_assigned_state():
    params = make_params()
    optimizer = Momentum(params)
    want = [p.detach().clone() for p in params]
    with (
        pytest.raises(RuntimeError, match="no"),
        optimizer.batched_params(optimizer.param_groups[0]) as batches,
    ):
        change_and_raise(batches)
    assert_same(params, want)
    assert all(set(optimizer.state[p]) == {"velocity"} for p in params)
    assert not any(optimizer.state[p]["velocity"].any() for p in params)


def test_assigned_state_is_read_back_and_kept_apart():
    params = make_params()
    optimizer = Momentum(params)
    group = optimizer.param_groups[0]
    with optimizer.batched_params(group) as batches:
        batch = batches[0]
        batch.state["average"] = batch.state["other"] = batch.param  # what is written back
        batch.state["count"] = torch.arange(3)
        assert batch.state["average"] is batch.param
        assert set(batch.state) == {"velocity", "average", "other", "count"}
        batch.param.mul_(2)
    assert torch.equal(optimizer.state[params[4]]["average"], params[4])
    assert optimizer.state[params[4]]["count"].shape == ()
    with optimizer.batched_params(group) as batches:
        batches[0].param.zero_()
        batches[0].state["other"].zero_()
        batches[0].state["count"] = batches[0].state["count"] + 1
    assert optimizer.state[params[4]]["average"].any()
    assert [int(optimizer.state[params[i]]["count"]) for i in (0, 1, 4)] == [1, 2, 3]


def test_an_assigned_parameter_is_written_back():
    params = make_params()
    optimizer = Momentum(params)
    with optimizer.batched_params(optimizer.param_groups[0]) as batches:
        batches[0].param = torch.ones(3, 3, 4)
    assert torch.equal(params[4], torch.ones(3, 4, dtype=torch.float64))


def test_layouts_survive():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(2, 3, 4, 4, generator=generator)
    params = [
        nn.Parameter(data.to(memory_format=torch.channels_last)),
        nn.Parameter(data.clone()),
        nn.Parameter(torch.randn(4, 4, 3, 2, generator=generator).permute(3, 2, 0, 1)),
    ]
    strides = [p.stride() for p in params]
    for p in params:
        p.grad = p.detach() * 2
    want = [p.detach() - 0.1 * p.grad for p in params]
    Momentum(params).step()
    assert [p.stride() for p in params] == strides
    assert_same(params, want)


def test_groups_have_their_own_options_and_may_come_later():
    params = make_params()
    optimizer = Momentum(params[:3])
    optimizer.add_param_group({"params": (p for p in params[3:]), "lr": 0.5})
    set_grads(params, 0)
    want = [
        p.detach().add(p.grad, alpha=-lr)
        for p, lr in zip(params, [0.1] * 3 + [0.5] * 6, strict=True)
    ]
    optimizer.step()
    assert_same(params, want)
    assert all(optimizer.state[p]["velocity"].shape == p.shape for p in params)


@pytest.mark.parametrize("value", [3, torch.tensor(3.0), torch.zeros(2, 3, 4)])
def test_assigned_state_has_a_row_for_each_member(value):
    optimizer = Bare(make_params())
    with (
        pytest.raises(InputError, match=r"state\['m'\]"),
        optimizer.batched_params(optimizer.param_groups[0]) as batches,
    ):
        batches[0].state["m"] = value


def spoil(batches):
    batches[0].param.zero_()
    batches[1].param = batches[1].param[0]


def test_a_parameter_of_another_shape_is_not_written_back():
    params = make_params()
    optimizer = Bare(params)
    want = [p.detach().clone() for p in params]
    with (
        pytest.raises(InputError, match=r"`param`.*\(2, 5\)"),
        optimizer.batched_params(optimizer.param_groups[0]) as batches,
    ):
        spoil(batches)
    assert_same(params, want)


def test_complex_and_sparse_are_refused():
    with pytest.raises(InputError, match=r"complex64.* in parameter 'params.0'.*view_as_real"):
        Bare([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])
    with pytest.raises(InputError, match=r"sparse_coo.* in parameter 'w'.*to_dense"):
        Bare([("w", torch.eye(2).to_sparse().requires_grad_())])
    optimizer = Bare([("e", nn.Parameter(torch.zeros(2, 2)))])
    optimizer.param_groups[0]["params"][0].grad = torch.eye(2).to_sparse()
    with (
        pytest.raises(InputError, match=r"dense gradients\. Found torch\.sparse_coo for 'e'"),
        optimizer.batched_params(optimizer.param_groups[0]),
    ):
        pass
    with pytest.raises(InputError, match="complex"):
        optimizer.add_param_group({"params": [("c", torch.zeros(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


def test_a_bad_word_for_none_gradients():
    optimizer = Bare(make_params())
    with (
        pytest.raises(InputError, match="`none_grads` should be one of 'zero', 'skip'"),
        optimizer.batched_params(optimizer.param_groups[0], none_grads="zeros"),
    ):
        pass


@pytest.mark.parametrize("none_grads", ["zero", "skip"])
def test_nothing_is_read_from_a_device(none_grads):
    params = make_params()
    optimizer = Momentum(params, none_grads=none_grads)
    set_grads(params, 0, none=(1,))
    with NoHostSync():
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()


def test_states_may_be_assigned_to_one_another():
    """`previous = current` and exchanges: each is read before any is overwritten."""
    params = make_params()
    optimizer = Momentum(params)
    group = optimizer.param_groups[0]
    for step in range(3):
        with optimizer.batched_params(group) as batches:
            for batch in batches:
                if step == 0:
                    batch.state["current"] = torch.ones_like(batch.param)
                    batch.state["previous"] = torch.zeros_like(batch.param)
                else:
                    batch.state["previous"] = batch.state["current"]
                    batch.state["current"] = batch.state["current"][:] + 1
    states = [optimizer.state[p] for p in params]
    assert all((s["previous"] == 2).all() and (s["current"] == 3).all() for s in states)
    with optimizer.batched_params(group) as batches:
        for batch in batches:
            first, second = batch.state["previous"], batch.state["current"]
            batch.state["previous"], batch.state["current"] = second, first
    assert all((s["previous"] == 3).all() and (s["current"] == 2).all() for s in states)
