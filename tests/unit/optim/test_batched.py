"""`BatchedOptimizer`: stacked computation, state for each parameter, what is written back."""

import copy

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim.batched import BatchedOptimizer
from tests.contracts.problems import SHAPES, Watch, assert_same, parameters, reloaded, run, snapshot
from tests.rounding import assert_alike


class Momentum(BatchedOptimizer):
    """SGD with momentum; torch's rule."""

    def __init__(self, params, none_grads="zero", state_dtype=None, at_once=True):
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})
        self.none_grads, self.state_dtype = none_grads, state_dtype
        if at_once:
            self.allocate_state()

    def init_state(self, batch):
        return {"velocity": torch.zeros_like(batch.param, dtype=self.state_dtype)}

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            with self.batched_params(group, none_grads=self.none_grads) as batches:
                for batch in batches:
                    velocity = batch.state["velocity"]
                    velocity.mul_(group["momentum"]).add_(batch.grad)
                    batch.param.add_(velocity, alpha=-group["lr"])
        return loss


def pairs(dtype=torch.float64):
    """Each shape twice; the parameter at place 1 has no gradient now and then."""
    return [*parameters(dtype), *parameters(dtype)]


def started():
    params = pairs()
    optimizer = Momentum(params)
    run(optimizer, params, [0])
    return params, optimizer, optimizer.param_groups[0]


@pytest.mark.parametrize("at_once", [True, False])
def test_equals_torchs_own_to_the_bit(at_once):
    ours, theirs = pairs(), pairs()
    # In the first step one has no gradient, and no state that another one of its shape has.
    run(Momentum(ours, none_grads="skip", at_once=at_once), ours, range(2, 12))
    run(torch.optim.SGD(theirs, lr=0.1, momentum=0.9, foreach=False), theirs, range(2, 12))
    assert not torch.equal(ours[0], pairs()[0])
    assert_same(ours, theirs)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("way", ["file", "deepcopy"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_resumes_to_the_bit(at_once, way, dtype):
    """With state of digits that the parameters' 16 bits cannot hold."""
    options = {"at_once": at_once, "state_dtype": torch.promote_types(dtype, torch.float32)}
    straight, params = pairs(dtype), pairs(dtype)
    run(Momentum(straight, **options), straight, range(10))
    first = Momentum(params, **options)
    run(first, params, range(5))
    kept = snapshot(first, params)
    if way == "deepcopy":
        others, second = copy.deepcopy((params, first))
        # torch copies groups and state only.
        second.none_grads, second.state_dtype = first.none_grads, first.state_dtype
    else:
        others = [nn.Parameter(p.detach().clone()) for p in params]
        second = Momentum(others, **options)
        second.load_state_dict(reloaded(first.state_dict()))
    run(second, others, range(5, 10))
    assert_same(others, straight)
    # What was loaded is a copy.
    assert_same(snapshot(first, params), kept)


def test_a_none_gradient_counts_as_zeros():
    params, optimizer, group = started()
    before, velocity = params[7].detach().clone(), optimizer.state[params[7]]["velocity"].clone()
    params[7].grad = None
    with optimizer.batched_params(group) as (first, *_):
        assert first.has_grad == (True, True, False, True)
        assert not first.grad[2].any()
        assert torch.equal(first.grad[3], params[13].grad)
    optimizer.step()
    # Momentum goes on moving it, as the class says. Where a vector ends a product may be rounded
    # before it is added, and within one not: half of the last digit.
    assert_alike([("p", params[7])], [("p", before.add(0.9 * velocity, alpha=-0.1))], roundings=1)


@pytest.mark.parametrize("is_named", [True, False])
def test_batches_go_by_shape_type_and_order(is_named):
    params = [*pairs(), nn.Parameter(torch.zeros(8, 4))]
    optimizer = Momentum([(f"p{i}", p) for i, p in enumerate(params)] if is_named else params)
    with optimizer.batched_params(optimizer.param_groups[0]) as batches:
        assert torch.equal(batches[0].param[1], params[6])
        assert batches[0].params[2] is params[7]
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    shapes = [tuple(batch.param.shape) for batch in batches]
    assert shapes == [(4, 8, 4), *[(2, *shape) for shape in SHAPES[1:6]], (1, 8, 4)]
    names = ("p0", "p6", "p7", "p13") if is_named else tuple(f"params.{i}" for i in (0, 6, 7, 13))
    assert batches[0].names == names


def change_and_raise(batches):
    for batch in batches:
        batch.param.add_(1)
        batch.state["velocity"] = batch.param
        batch.state["new"] = batch.param
    raise RuntimeError("no")


def shorten(batches):
    batches[0].param.zero_()
    batches[1].param = batches[1].param[0]


WRONG = {
    "an exception": (change_and_raise, RuntimeError, "no"),
    "a shorter parameter": (shorten, InputError, "param"),
    **{
        f"a state {value}": (lambda b, v=value: b[0].state.update(m=v), InputError, "'m'")
        for value in (3, torch.tensor(3.0), torch.zeros(2, 3, 4))
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_what_goes_wrong_writes_neither_parameters_nor_state(case):
    spoil, kind, match = WRONG[case]
    params, optimizer, group = started()
    before = snapshot(optimizer, params)
    with pytest.raises(kind, match=match), optimizer.batched_params(group) as batches:
        spoil(batches)
    assert_same(snapshot(optimizer, params), before)


def test_assigned_state_is_read_back_kept_apart_and_stays_where_it_is():
    params, optimizer, group = started()
    with optimizer.batched_params(group) as batches:
        batch = batches[0]
        batch.param = torch.ones(4, 8, 4, dtype=torch.float64)
        batch.state["average"] = batch.state["other"] = batch.param  # what is written back
        batch.state["count"] = torch.arange(4)
        batch.param.mul_(2)
    own = optimizer.state[params[7]]
    assert (params[7] == 2).all()
    assert (own["average"] == 2).all()
    assert own["count"].shape == ()
    held, kept = own["velocity"], own["velocity"].clone()
    with optimizer.batched_params(group) as batches:
        batch = batches[0]
        batch.param.zero_()
        batch.state["other"].zero_()
        batch.state["count"] = batch.state["count"] + 1
        # Each is read before any is overwritten.
        average, velocity = batch.state["average"], batch.state["velocity"]
        batch.state["velocity"], batch.state["average"] = average, velocity
    assert own["velocity"] is held
    assert (held == 2).all()
    assert torch.equal(own["average"], kept)
    assert [int(optimizer.state[params[i]]["count"]) for i in (0, 6, 7, 13)] == [1, 2, 3, 4]


@pytest.mark.parametrize("none_grads", ["zero", "skip"])
def test_nothing_is_read_from_a_device(none_grads):
    params = pairs()
    optimizer = Momentum(params, none_grads=none_grads)
    with Watch() as watch:
        run(optimizer, params, [2])
        optimizer.load_state_dict(optimizer.state_dict())
        run(optimizer, params, [3])
    assert watch.waits == []
