"""Whether a step is not finite at any scale."""

import copy

import pytest
import torch
from torch import Tensor, nn

from steadygrad.studies.engine import Engine
from steadygrad.studies.inspect import Stop, scalers
from steadygrad.studies.inspect.probe import chance, never_finite
from steadygrad.studies.ranks import Ranks
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


def engine_of(factor=1.0, lucky=2.0):
    def model():
        layers = nn.Linear(8, 16), Moody(factor, lucky), nn.Linear(16, 1)
        return nn.Sequential(*layers)

    task = make_task(make_model=model)
    engine = Engine(task, seed=0, dtype="float16", ranks=Ranks(Stop()), scaling=scalers.one_scale)
    engine.seed_everything("train")
    return engine


INDICES = torch.arange(4)


def probed(engine):
    before = chance(engine)
    engine.step(INDICES)
    return engine.scaler.culprits(), never_finite(engine, INDICES, before)


def test_what_is_only_large_is_finite_then():
    culprits, found = probed(engine_of(factor=2.0**6))
    assert culprits
    assert found == []


@pytest.mark.parametrize("seed", range(8))
def test_what_is_infinite_stays_so(seed):
    """With the same random numbers: half of the steps are spared."""
    engine = engine_of(lucky=0.84)
    engine.scaler.update(1.0)
    torch.manual_seed(seed)
    culprits, found = probed(engine)
    assert found == culprits
    torch.manual_seed(seed)
    assert culprits == (["1"] if (torch.rand(4, 1) > 0.84).any() else [])


def test_it_leaves_no_trace():
    engine = engine_of(lucky=-1.0)
    engine.step(INDICES)
    kept, random = copy.deepcopy(engine.state(4)), torch.get_rng_state()
    assert never_finite(engine, INDICES, chance(engine)) == ["1"]
    now = engine.state(4)
    assert now.scaler == kept.scaler
    assert torch.equal(torch.get_rng_state(), random)
    assert kept.model.keys() == now.model.keys()
    assert all(torch.equal(kept.model[name], now.model[name]) for name in kept.model)
    assert all(p.grad is None for p in engine.model.parameters())
