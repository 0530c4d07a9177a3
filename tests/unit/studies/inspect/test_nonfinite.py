"""Whether a step is not finite at any scale."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steadygrad.studies.deadline import Deadline
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.inspect import scalers
from steadygrad.studies.inspect.scalers import nonfinite_at_any_scale
from steadygrad.studies.order import generators_kept
from steadygrad.studies.trainer import Trainer
from tests.unit.studies.fp16_task import Explode
from tests.unit.studies.tiny_task import make_task


class Moody(nn.Module):
    """Infinite where a mask that is drawn says so; batches leave their traces."""

    def __init__(self, factor: float, lucky: float):
        super().__init__()
        self.norm, self.factor, self.lucky = nn.BatchNorm1d(16), factor, lucky

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        hot = torch.rand(len(x), 1) > self.lucky
        return Explode.apply(z * self.factor, hot)


def make_trainer(factor=1.0, lucky=2.0, **options):
    def model():
        layers = nn.Linear(8, 16), Moody(factor, lucky), nn.Linear(16, 1)
        return nn.Sequential(*layers)

    context = DistributedContext(Deadline())
    task = make_task(make_model=model)
    trainer = Trainer(
        task, seed=0, dtype="float16", context=context, scaling=scalers.given_scales, **options
    )
    trainer.seed_everything("train")
    return trainer


INDICES = torch.arange(4)


def probed(trainer):
    before = generators_kept(trainer.context.device).close
    trainer.step(INDICES)
    return trainer.scaler.culprits(), nonfinite_at_any_scale(trainer, INDICES, before)


def test_what_is_only_large_is_finite_then():
    culprits, found = probed(make_trainer(factor=2.0**6))
    assert culprits
    assert found == []


@pytest.mark.parametrize("micro_batch_size", [4, 2])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_infinite_stays_so(seed, micro_batch_size):
    """With the same random numbers: half of the steps are spared."""
    trainer = make_trainer(lucky=0.84, micro_batch_size=micro_batch_size)
    trainer.scaler.update(1.0)
    torch.manual_seed(seed)
    culprits, found = probed(trainer)
    assert found == culprits
    torch.manual_seed(seed)
    draws = torch.cat([torch.rand(micro_batch_size, 1) for _ in range(4 // micro_batch_size)])
    assert culprits == (["1"] if (draws > 0.84).any() else [])


def test_it_leaves_no_trace():
    """A batch may be augmented by any generator; one that is repeated is the same batch."""
    trainer, seen = make_trainer(lucky=-1.0), []
    batch = trainer.task.train.batch

    def augmented(indices):
        seen.append((random.random(), np.random.random()))
        return batch(indices)

    trainer.task.train.batch = augmented
    before = generators_kept(trainer.context.device).close
    trainer.step(INDICES)
    kept, host = copy.deepcopy(trainer.state(4)), torch.get_rng_state()
    python, array = random.getstate(), np.random.get_state()[1].tolist()
    assert nonfinite_at_any_scale(trainer, INDICES, before) == ["1"]
    first, second = seen
    assert first == second
    now = trainer.state(4)
    assert now.scaler == kept.scaler
    assert torch.equal(torch.get_rng_state(), host)
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == array
    assert kept.model.keys() == now.model.keys()
    assert all(torch.equal(kept.model[name], now.model[name]) for name in kept.model)
    assert all(p.grad is None for p in trainer.model.parameters())
