"""What a step leaves: counts of exponents, scales that move, and whose fault an overflow is."""

import copy
import random

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from steadygrad.scale import MeasuredExponents
from steadygrad.scale.equations import exponent_histogram
from steadygrad.studies.course import generators_kept
from steadygrad.studies.inspect import trials
from steadygrad.studies.inspect.analysis import counts_of, lost, shares_of
from steadygrad.studies.inspect.trials import ExponentHistograms, _histogram
from tests.reference.layerwise import fates
from tests.unit.studies.fp16_task import Explode
from tests.unit.studies.framework import generators, make_trainer
from tests.unit.studies.inspect.runs import counts, phase
from tests.unit.studies.tiny_task import make_task

# Counts


def counted(*steps, plain=False):
    """The counts of some steps of a layer ``a``: its gradients, its scale, and who overflowed."""
    histograms = ExponentHistograms(["", "a"])
    for values, scale, *culprits in steps:
        rows = torch.stack([exponent_histogram(torch.tensor(row)) for row in ([], values)])
        histograms.add(MeasuredExponents(rows, rows, torch.tensor([1.0, scale])), *culprits or [[]])
    part = histograms.part(plain=plain, steps=1, loss=None, scales={})
    return msgspec.structs.asdict(part)


def test_a_skipped_step():
    found = counted(([0.0, 1.0, 4.0], 8.0), ([2.0, torch.inf, torch.nan], 8.0, ["a"]))
    assert found["skipped"] == 1
    # Its finite gradients are not those of the batch; what was not finite is counted.
    assert found["weights"] == found["activations"] == {"a": counts(0, 1, 0, 1, zero=1, over=2)}
    assert found["largest"]["weights"] == {"a": 2.0 - 3.0}


def test_overflows_and_the_least_scale_at_which_they_happened():
    steps = [([torch.inf], scale, ["a"]) for scale in (16.0, 8.0, 32.0)]
    # One that no scale prevents says nothing of scales.
    found = counted(*steps, ([torch.inf], 2.0, ["", "a"], ["a"]))
    assert (found["overflows"], found["at_any_scale"]) == ({"": 1, "a": 4}, {"a": 1})
    assert found["overflowed_at"] == {"": 0.0, "a": 3.0}
    assert found["skipped"] == 4


def test_what_gradients_would_be_without_scales():
    """Step by step: scales move within a part."""
    steps = ([0.0, 8.0, 2.0], 8.0), ([0.0, 64.0, 2.0**-148], 64.0)
    # 8/8, 64/64; 2/8; what is beyond float32 stays at its end.
    expected = {"a": counts(-149, 1, *[0] * 146, 1, 0, 2, zero=2)}
    plain = counted(*steps, plain=True)["plain"]
    assert plain == {"activations": expected, "weights": expected}
    assert counted(*steps)["plain"] == {"activations": {}, "weights": {}}


@pytest.mark.parametrize("log2", [-45, -30, -15, -5, 0, 1])
def test_what_a_scale_makes_zero_or_subnormal(log2):
    """As torch counts it for float16."""
    values = [0.0, 1.0, 2.0**-10, 2.0**-14, 2.0**15, torch.inf]
    held = _histogram(exponent_histogram(torch.tensor(values)).double())
    zero, flushed, subnormal, overflow = fates(values, 2.0**log2, torch.float16)
    (all_counted,) = counts_of(phase("before", {"a": held}, {})[0].parts).values()
    # Of the second half of eight parts, with six values each.
    assert lost(all_counted, log2) == pytest.approx(4 * 6 * (flushed + subnormal))
    scaled = replace(held, low=held.low + log2)
    (found,) = shares_of(phase("before", {"a": scaled}, {})[0].parts).values()
    expected = (zero + flushed, subnormal, overflow)
    assert (found.zero, found.subnormal, found.overflow) == pytest.approx(expected)


# Scales


def test_the_loss_scale_has_a_floor():
    net = nn.Linear(2, 1)
    scaler = trials.given_scales(net, 2 * trials.LEAST_SCALE)
    for _ in range(3):
        before = scaler.state_dict()
        trials.follow_one_scale(scaler, [""], before, [], [])
    assert scaler.get_scale() == trials.LEAST_SCALE


def test_an_overflow_that_no_scale_prevents_moves_none():
    """Nor does its step count for growth; another's overflow in the same step does."""
    scaler = trials.given_scales(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), 2.0**8)
    before = scaler.state_dict()
    scaler.update(2.0**7)
    trials.follow_one_scale(scaler, ["1"], before, [], ["1"])
    assert scaler.state_dict()["layers"] == before["layers"]
    trials.follow_one_scale(scaler, ["0", "1"], before, [], ["1"])
    assert scaler.get_scales() == {"": 2.0**7, "0": 1.0, "1": 1.0}


# Whether a step is not finite at any scale


class Moody(nn.Module):
    """Infinite where a mask that is drawn says so; batches leave their traces."""

    def __init__(self, factor, lucky):
        super().__init__()
        self.norm, self.factor, self.lucky = nn.BatchNorm1d(16), factor, lucky

    def forward(self, x):
        z = self.norm(x)
        hot = torch.rand(len(x), 1) > self.lucky
        return Explode.apply(z * self.factor, hot)


def moody(factor=1.0, lucky=2.0, **options):
    def model():
        return nn.Sequential(nn.Linear(8, 16), Moody(factor, lucky), nn.Linear(16, 1))

    task, scaling = make_task(make_model=model), trials.given_scales
    trainer = make_trainer(task, dtype="float16", scaling=scaling, **options)
    trainer.seed_everything("train")
    return trainer


def probe(trainer):
    """Takes a step, and gives its culprits and a way to probe it."""
    indices, before = torch.arange(4), generators_kept(trainer.context.device).close
    trainer.step(indices)
    again = trials.nonfinite_at_any_scale
    return trainer.scaler.culprits(), lambda: again(trainer, indices, before)


def test_what_is_only_large_is_finite_then():
    culprits, probed = probe(moody(factor=2.0**6))
    assert culprits
    assert probed() == []


@pytest.mark.parametrize("micro_batch_size", [4, 2])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_infinite_stays_so(seed, micro_batch_size):
    """With the same random numbers: half of the steps are spared."""
    trainer = moody(lucky=0.84, micro_batch_size=micro_batch_size)
    trainer.scaler.update(1.0)
    torch.manual_seed(seed)
    culprits, probed = probe(trainer)
    assert probed() == culprits
    torch.manual_seed(seed)
    draws = torch.cat([torch.rand(micro_batch_size, 1) for _ in range(4 // micro_batch_size)])
    assert culprits == (["1"] if (draws > 0.84).any() else [])


def test_a_probe_leaves_no_trace():
    """A batch may be augmented by any generator; one that is repeated is the same batch."""
    trainer, seen = moody(lucky=-1.0), []
    batch = trainer.task.train.batch

    def augmented(indices):
        seen.append((random.random(), np.random.random()))
        return batch(indices)

    trainer.task.train.batch = augmented
    _, probed = probe(trainer)
    kept, scales = copy.deepcopy(trainer.model.state_dict()), trainer.scaler.state_dict()
    drawn = generators()
    assert probed() == ["1"]
    first, second = seen
    assert first == second
    assert generators() == drawn
    now = trainer.model.state_dict()
    assert trainer.scaler.state_dict() == scales
    assert kept.keys() == now.keys()
    assert all(torch.equal(kept[name], now[name]) for name in kept)
    assert all(p.grad is None for p in trainer.model.parameters())
