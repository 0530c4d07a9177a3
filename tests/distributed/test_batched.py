"""`BatchedOptimizer` on sharded parameters, uneven and empty shards included."""

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from steadygrad.optim.groups import param_groups
from tests.distributed.ranks import on_ranks
from tests.unit.optim.batched_examples import Momentum

pytestmark = pytest.mark.distributed


def make_model():
    torch.manual_seed(0)
    # Over 2 processes 3 rows are uneven, and the last bias of 1 leaves one of them with nothing.
    return nn.Sequential(
        nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
    ).double()


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    tensors = (p.detach() for p in model.parameters())
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return [t.tolist() for t in full]


def sharded_run(rank, world):
    model = make_model()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh)
    # Two groups of equal options: the names and the parameters are what counts here.
    optimizer = Momentum(param_groups(model, {"*.bias": {"nesterov": False}}))
    assert optimizer.param_groups[1]["param_names"] == [f"{i}.bias" for i in range(4)]
    train(model, optimizer, range(3))
    weight = model[0].weight
    kind = type(optimizer.state[weight]["velocity"]) is DTensor
    shape = optimizer.state[weight]["velocity"].shape == weight.shape
    state = dcp.get_optimizer_state_dict(model, optimizer)

    second = Momentum(param_groups(model, {"*.bias": {"nesterov": False}}))
    dcp.set_optimizer_state_dict(model, second, state)
    train(model, second, range(3, 5))
    model[0].weight.grad = torch.zeros_like(weight)
    with CommDebugMode() as mode:
        second.step()
    return [whole(model), kind and shape, mode.get_total_counts()]


def test_sharded_equals_unsharded(tmp_path):
    model = make_model()
    optimizer = Momentum(model.parameters())
    train(model, optimizer, range(5))
    optimizer.step()
    for got, kind, collectives in on_ranks(2, sharded_run, tmp_path):
        assert kind
        assert collectives == 0
        for one, other in zip(got, whole(model), strict=True):
            # The gradients' reduction over processes rounds otherwise.
            both = (torch.tensor(t, dtype=torch.float64) for t in (one, other))
            torch.testing.assert_close(*both, rtol=1e-12, atol=1e-14)
