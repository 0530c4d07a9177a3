"""`BatchedOptimizer` on sharded parameters, uneven and empty shards included."""

import pytest
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.distributed.optim_models import difference
from tests.distributed.ranks import on_ranks
from tests.distributed.training import loss_of, make_model, sample, shard
from tests.unit.optim.batched_examples import Momentum

pytestmark = pytest.mark.distributed


def train_on(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, *sample(step, 0, 0)).backward()
        optimizer.step()


def sharded_run(rank, world):
    model, reference = shard(make_model()), make_model()
    optimizer, second = (Momentum(model.parameters()) for _ in range(2))
    train_on(reference, Momentum(reference.parameters()), range(5))
    train_on(model, optimizer, range(3))
    set_optimizer_state_dict(model, second, get_optimizer_state_dict(model, optimizer))
    train_on(model, second, range(3, 5))
    found, velocity = difference(model, reference), second.state[model[0].weight]["velocity"]
    with CommDebugMode() as mode:
        second.step()
    return found, type(velocity) is DTensor, mode.get_total_counts()


def test_sharded_equals_unsharded_without_collectives(tmp_path):
    for difference_found, is_sharded, collectives in on_ranks(2, sharded_run, tmp_path):
        # The gradients' reduction over processes rounds otherwise.
        assert difference_found < 1e-12
        assert is_sharded
        assert collectives == 0
