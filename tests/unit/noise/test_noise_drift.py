"""Estimates of a noise scale that drifts: which steps a value is of, and the newest one."""

import json

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from steadygrad.noise.estimate import empty_ring, estimate_from, push, skipped_in
from tests.unit.noise.test_drift import course_of, histories
from tests.unit.noise.training_loop import run

STEPS = 240


def mean_age(decay, n):
    age = torch.arange(n, dtype=torch.float64)
    return (decay**age @ age / (decay**age).sum()).item()


def trained(growth, **options):
    """|G| = 1 and a noise scale that ends at 160, having grown 16-fold or not at all."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(64, 1, bias=False).double()
    noise = NoiseScale(model, decay=0.99, **options)
    for i in range(STEPS):
        scale = 160 * growth ** (i / (STEPS - 1) - 1)

        def sample(n, scale=scale):
            z = torch.randn(n, 64, generator=generator, dtype=torch.float64)
            return 1 / 8 + z * (scale / 64) ** 0.5

        run(noise, model, sample, 1, [8] * 8)
    return noise


def test_while_it_grows_the_estimate_is_of_the_newest_measurements():
    noise = trained(16.0)
    got = noise.estimate()
    assert got.drifting
    assert got.measurements <= STEPS / 8  # a quarter of a half: the whole is known to drift
    assert got.age.item() == pytest.approx(mean_age(0.99, got.measurements.item()), rel=1e-12)
    assert got.low < 160 < got.high

    whole = NoiseScale(nn.Linear(64, 1, bias=False).double(), decay=0.99, drift=False)
    whole.load_state_dict(noise.state_dict())  # of the same format, with or without drift
    old = whole.estimate()
    assert (old.drifting.item(), old.measurements.item()) == (False, STEPS)
    assert old.age.item() == pytest.approx(mean_age(0.99, STEPS), rel=1e-12)
    assert old.value < 100  # the average's, 77 measurements ago on average


def test_while_it_stays_the_estimate_is_of_the_whole_history():
    got = trained(1.0).estimate()
    assert (got.drifting.item(), got.measurements.item()) == (False, STEPS)
    assert got.age.item() == pytest.approx(mean_age(0.99, STEPS), rel=1e-12)
    assert got.low < 160 < got.high


def estimated(growths, **options):
    """From 250 measurements, with a group for each course of the noise scale."""
    ring, pushed = empty_ring(688, len(growths), torch.device("cpu"))
    series = [histories(course_of(g, 250, 100), 2.0, 1, seed=5) for g in growths]
    noise, signal = (torch.cat(rows).flip(-1) for rows in zip(*series, strict=True))
    for t in range(250):
        push(ring, pushed, (signal[:, t], noise[:, t]))
    return estimate_from(ring, pushed, 0.99, 0.95, groups=growths, **options)


def test_each_group_is_judged_by_itself():
    got = estimated(["none", "exponential"]).by_group
    assert [g.drifting.item() for g in got.values()] == [False, True]
    assert [g.measurements.item() < 250 for g in got.values()] == [False, True]
    assert got["exponential"].age < got["none"].age
    assert all(g.low < 128 < g.high for g in got.values())


def test_plain_numbers():
    numbers = estimated(["exponential"]).as_dict()
    assert numbers["drifting"] is True
    assert isinstance(numbers["age"], float)
    assert json.loads(json.dumps(numbers)) == numbers


def test_nothing_waits_for_the_device():
    """On a device without memory any read of a value raises."""
    kept = empty_ring(64, 2, torch.device("meta"))
    for _ in range(40):
        push(*kept, torch.zeros(2, 2, device="meta").unbind())
    for drift in (True, False):
        facts = {"altered": skipped_in(*kept), "unlike": skipped_in(*kept) > 0}
        got = estimate_from(*kept, 0.99, 0.95, groups=["a", "b"], drift=drift, **facts)
        for each in (got, *got.by_group.values()):
            numbers = [x for x in vars(each).values() if isinstance(x, torch.Tensor)]
            assert {(x.device.type, x.shape) for x in numbers} == {("meta", ())}
            assert len(numbers) == 14


def test_no_measurement_yet():
    got = NoiseScale(nn.Linear(2, 2)).estimate()
    assert not got.drifting
    assert got.measurements == 0
    assert got.age.isnan()


def test_drift_is_a_switch():
    with pytest.raises(InputError, match="drift"):
        NoiseScale(nn.Linear(2, 2), drift="yes")
