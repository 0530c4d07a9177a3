"""Monotone fits against curves whose answer is known."""

import math

import pytest

from steadygrad.studies.advise.curves import (
    DeclineFit,
    between,
    crossing,
    fit_decline,
    fit_tradeoff,
    isotonic,
)

SAMPLES = [256.0 * i for i in range(1, 9)]


@pytest.mark.parametrize(
    "loss",
    [
        lambda s: 3 - 0.4 * math.log1p(s / 500),
        lambda s: 3 - 1e-4 * s,
        lambda s: 1 + 2 / (1 + s / 1000),
        lambda s: 1 + 2 * math.exp(-s / 900),
    ],
    ids=["logarithm", "line", "hyperbola", "exponential"],
)
def test_a_decline_is_found_and_inverted(loss):
    curve = fit_decline([(s, loss(s)) for s in SAMPLES])
    for samples in (512.0, 1000.0, 1500.0, 1800.0):
        # The shapes lie on a coarse grid; 2% of the samples is a tenth of the tolerance.
        assert curve.samples_at(loss(samples)) == pytest.approx(samples, rel=0.02)
        assert curve.samples_at(curve(samples)) == pytest.approx(samples, rel=1e-9)


def test_noise_averages_out():
    wiggle = [0.004 * (-1) ** i for i in range(8)]
    points = [(s, 3 - 0.4 * math.log1p(s / 500) + w) for s, w in zip(SAMPLES, wiggle, strict=True)]
    curve = fit_decline(points + [(s, 2 * (3 - 0.4 * math.log1p(s / 500)) - y) for s, y in points])
    assert curve.samples_at(3 - 0.4 * math.log1p(3)) == pytest.approx(1500, rel=0.01)


def test_a_loss_that_does_not_fall_is_never_reached():
    assert fit_decline([(s, 2.0) for s in SAMPLES]).fall == pytest.approx(0, abs=1e-12)
    rising = fit_decline([(s, 2 + s / 1000) for s in SAMPLES])
    assert rising.fall < 0
    assert rising.samples_at(1.0) == math.inf


def test_below_the_floor_is_never_reached():
    curve = fit_decline([(s, 1 + 2 / (1 + s / 1000)) for s in SAMPLES])
    assert curve.samples_at(0.5) == math.inf


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([3, 2, 1], [2, 2, 2]),
        ([0, 2, 1, 4], [0, 1.5, 1.5, 4]),
        ([5, 0, 1, 0], [1.5, 1.5, 1.5, 1.5]),
        ([], []),
    ],
)
def test_isotonic_pools_violators(values, expected):
    assert isotonic(values) == pytest.approx(expected)


def test_a_crossing_is_interpolated_on_the_trade_off():
    assert crossing([8.0, 16.0, 32.0], [0.0, 0.1, 0.3], 0.2) == pytest.approx(24.0)
    assert crossing([8.0, 16.0], [0.0, 0.2], 0.2) == math.inf
    assert crossing([8.0, 16.0], [0.3, 0.4], 0.2) == 8.0
    law = [(1 + size / 64) / (1 + 8 / 64) - 1 for size in (8, 16, 32)]
    assert crossing([8.0, 16.0, 32.0], law, 0.2) == pytest.approx(1.2 * 72 - 64)


def test_the_neighbours_of_a_crossing():
    sizes = [8.0, 16.0, 32.0]
    assert between(sizes, [0.0, 0.1, 0.3], 0.2) == (16.0, 32.0)
    assert between(sizes, [0.0, 0.1, 0.2], 0.2) == (32.0, math.inf)
    assert between(sizes, [0.3, 0.3, 0.3], 0.2) == (8.0, 8.0)


def test_one_fit_serves_many_losses():
    fit = DeclineFit(SAMPLES)
    for scale in (200.0, 500.0, 2000.0):
        points = [(s, 3 - 0.4 * math.log1p(s / scale)) for s in SAMPLES]
        assert fit([loss for _, loss in points]) == fit_decline(points)


@pytest.mark.parametrize("critical", [20.0, 130.0, 1000.0])
def test_the_trade_off_gives_its_critical_batch_back(critical):
    sizes = [8 * 2**i for i in range(7)]
    excess = [(1 + b / critical) / (1 + 8 / critical) - 1 for b in sizes]
    # Three refinements of a 25-point grid over some 13 units of the logarithm: 0.1%.
    assert fit_tradeoff(sizes, excess, math.inf) == pytest.approx(critical, rel=2e-3)
    cut = [min(x, 1.0) for x in excess]
    assert fit_tradeoff(sizes, cut, 1.0) == pytest.approx(critical, rel=2e-3)


def test_no_excess_means_no_critical_batch_in_sight():
    assert fit_tradeoff([8, 16, 32], [0.0, 0.0, -0.1], 3.0) == math.inf
