"""`SplitBatchNoiseScale.estimate`: its interval against known truth, and the buffers behind it."""

import copy
import math

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.noise import SplitBatchNoiseScale
from steadygrad.noise.intervals import ratio_of_averages
from tests.unit.noise.test_split_batch import gradients, weights

BATCH, DIM = 16, 32
EVERY_NUMBER = (
    *("value", "low", "high", "grad_sq_norm", "noise_trace", "effective"),
    *("resolved", "measurements", "drifting", "age"),
)


def batches(count, noise_scale, generator, signal=1.0):
    """Per-sample gradients from N(G, Σ) with |G| = ``signal`` and tr(Σ) = ``noise_scale``."""
    z = torch.randn(count, BATCH, DIM, generator=generator, dtype=torch.float64)
    return signal / DIM**0.5 + z * (noise_scale / DIM) ** 0.5


def fed(estimator, data, w):
    for x in data:
        estimator(x @ w, w)
    return estimator


def replicates(count, noise_scale, mode, signal=1.0):
    generator = torch.Generator().manual_seed(0)
    w = weights(DIM)
    for _ in range(count):
        estimator = SplitBatchNoiseScale(mode, 0.25, update_rate=0.02, generator=generator)
        yield fed(estimator, batches(60, noise_scale, generator, signal), w).estimate()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["alternative", "paper"])
def test_interval_covers_in_95_of_100(mode):
    """Three standard errors of a share of 95 % in 250 replicates are 4.1 points."""
    truth = 2.0 * BATCH
    covered = [float(e.low) <= truth <= float(e.high) for e in replicates(250, truth, mode)]
    assert sum(covered) / len(covered) == pytest.approx(0.95, abs=0.041)


@pytest.mark.slow
def test_without_a_signal_nothing_is_resolved():
    """The two-sided interval errs in 2.5 % to this side: 4 of 60 are three standard errors."""
    got = list(replicates(60, 32.0, "alternative", signal=0.0))
    assert sum(bool(e.resolved) for e in got) <= 4
    assert all(math.isinf(e.high) for e in got if not e.resolved)


def test_the_interval_is_that_of_the_batches_own_estimates():
    """Straight from the two equations of each batch, with the weights of the averages."""
    w, generator = weights(DIM), torch.Generator().manual_seed(4)
    estimator = SplitBatchNoiseScale(update_rate=0.1, generator=generator, level=0.8)
    signal, noise, last = [], [], None
    for x in batches(30, 16.0, torch.Generator().manual_seed(1)):
        order = torch.randperm(BATCH, generator=generator.clone_state())
        a, b = (x[half].mean(0) for half in (order[8:], order[:8]))
        signal.append(a.dot(b))
        noise.append((a - b).square().sum() * 4)
        last = estimator(x @ w, w)
    age = torch.arange(29, -1, -1, dtype=torch.float64)
    expected = ratio_of_averages(torch.stack(noise), torch.stack(signal), 0.9**age, level=0.8)
    got = estimator.estimate()
    # 1e-10: the same float64 sums, with the weights in another order.
    for name in ("value", "low", "high", "effective"):
        number = getattr(expected, name).item()
        assert getattr(got, name).item() == pytest.approx(number, rel=1e-10)
    assert got.value.item() == pytest.approx(last.item(), rel=1e-10)
    assert got.measurements.item() == 30


def test_batches_that_drift_give_the_newest_value():
    torch.manual_seed(0)  # the estimator splits batches at random
    w, generator = weights(DIM), torch.Generator().manual_seed(0)
    size = 1 + torch.linspace(0, 2 * math.pi, 150, dtype=torch.float64).sin().view(-1, 1, 1) / 2
    # The signal drifts and the noise does not; at the end both are what they were at first.
    data = batches(150, 4.0, generator) + (size - 1) / DIM**0.5
    drifting = fed(SplitBatchNoiseScale(update_rate=0.01), data, w).estimate()
    assert drifting.drifting
    assert drifting.low < 4 < drifting.high
    assert 8 <= drifting.measurements <= 37  # a quarter of a half at most, of one window at least
    shuffled = data[torch.randperm(150, generator=generator)]
    mixed = fed(SplitBatchNoiseScale(update_rate=0.01), shuffled, w).estimate()
    assert not mixed.drifting
    assert mixed.measurements == 150
    age = torch.arange(150, dtype=torch.float64)
    # 1e-12: the same sum.
    assert mixed.age.item() == pytest.approx(
        (0.99**age @ age / (0.99**age).sum()).item(), rel=1e-12
    )


def test_nothing_waits_for_the_device():
    """On a device without memory any read of a value raises."""
    estimator = SplitBatchNoiseScale().to("meta")
    w = torch.zeros(6, device="meta", requires_grad=True)
    for fill_grad in (False, True):
        estimator(torch.zeros(8, 6, device="meta") @ w, w, fill_grad=fill_grad)
    got = estimator.estimate()
    assert {getattr(got, name).device.type for name in EVERY_NUMBER} == {"meta"}


def test_a_batch_left_out_leaves_no_gap():
    w, data = weights(), [gradients(8, seed=i) for i in range(6)]
    bad = data[0] * torch.nan
    plain = SplitBatchNoiseScale(generator=torch.Generator().manual_seed(0))
    broken = SplitBatchNoiseScale(generator=torch.Generator().manual_seed(0))
    fed(plain, data[:3], w)
    fed(broken, data[:3], w)
    fed(broken, [bad], w)
    torch.randperm(8, generator=plain.generator)  # the split of the batch that is not there
    fed(plain, data[3:], w)
    fed(broken, data[3:], w)
    left_out = {"skipped": 1, "selected": pytest.approx(1 / 7)}
    assert broken.estimate().as_dict() == {**plain.estimate().as_dict(), **left_out}
    assert (broken.skipped.item(), broken.estimate().measurements.item()) == (1, 6)


def test_two_batches_say_nothing():
    w = weights()
    estimator = fed(SplitBatchNoiseScale(), [gradients(8, seed=i) for i in range(2)], w)
    got = estimator.estimate()
    assert (got.low.item(), got.high.item(), got.resolved.item()) == (0.0, math.inf, False)
    assert SplitBatchNoiseScale().estimate().measurements.item() == 0
    # Only the newest batch counts: it alone has no interval.
    newest = fed(SplitBatchNoiseScale(update_rate=1.0), [gradients(8, seed=i) for i in range(9)], w)
    assert not newest.estimate().resolved


def test_the_interval_resumes_to_the_bit():
    w, generator = weights(), torch.Generator().manual_seed(0)
    # 6 rows for 12 batches: the ring goes round.
    first = SplitBatchNoiseScale(update_rate=0.7, generator=generator)
    fed(first, [gradients(9, seed=i) for i in range(8)], w)
    second = SplitBatchNoiseScale(update_rate=0.7, generator=generator.clone_state())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for estimator in (first, second):
        fed(estimator, [gradients(9, seed=i) for i in range(8, 12)], w)
    assert second.estimate().as_dict() == first.estimate().as_dict()
    assert first.estimate().measurements.item() == len(first.ring) < 12


def test_bad_arguments():
    with pytest.raises(InputError, match=r"`level`.*\(0, 1\)"):
        SplitBatchNoiseScale(level=1.0)
