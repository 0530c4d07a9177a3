"""`BatchedOptimizer` on sharded parameters, uneven and empty shards included."""

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from steadygrad.optim.groups import param_groups
from tests.distributed.optim_models import whole as full
from tests.distributed.ranks import on_ranks
from tests.distributed.training import loss_of, make_model, sample, shard
from tests.unit.optim.batched_examples import Momentum

pytestmark = pytest.mark.distributed


def train_on(model, optimizer, steps):
    for step in steps:
        loss_of(model, *sample(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    return [full(p).tolist() for p in model.parameters()]


def sharded_run(rank, world):
    model = make_model()
    shard(model)
    # Two groups of equal options: the names and the parameters are what counts here.
    optimizer = Momentum(param_groups(model, {"*.bias": {"nesterov": False}}))
    assert optimizer.param_groups[1]["param_names"] == ["0.bias", "2.bias", "3.bias"]
    train_on(model, optimizer, range(3))
    weight = model[0].weight
    kind = type(optimizer.state[weight]["velocity"]) is DTensor
    shape = optimizer.state[weight]["velocity"].shape == weight.shape
    state = dcp.get_optimizer_state_dict(model, optimizer)

    second = Momentum(param_groups(model, {"*.bias": {"nesterov": False}}))
    dcp.set_optimizer_state_dict(model, second, state)
    train_on(model, second, range(3, 5))
    model[0].weight.grad = torch.zeros_like(weight)
    with CommDebugMode() as mode:
        second.step()
    return [whole(model), kind and shape, mode.get_total_counts()]


def test_sharded_equals_unsharded(tmp_path):
    model = make_model()
    optimizer = Momentum(model.parameters())
    train_on(model, optimizer, range(5))
    optimizer.step()
    for got, kind, collectives in on_ranks(2, sharded_run, tmp_path):
        assert kind
        assert collectives == 0
        for one, other in zip(got, whole(model), strict=True):
            # The gradients' reduction over processes rounds otherwise.
            both = (torch.tensor(t, dtype=torch.float64) for t in (one, other))
            torch.testing.assert_close(*both, rtol=1e-12, atol=1e-14)
