"""The prediction against a posterior over a grid, and in worlds that are made by its own model."""

import math

import numpy as np
import pytest

from steadygrad.studies.advise import growth
from steadygrad.studies.advise.growth import BEND, RESIDUAL, TUNED
from steadygrad.studies.advise.schema import WIDTH, Critical

N = 1_000_000


def rung(samples, size, error):
    """A critical size with the deviation of its logarithm."""
    ends = (size * math.exp(side * WIDTH * error) for side in (-1, 1))
    return Critical(
        samples=samples, batch_size=size, **dict(zip(("low", "high"), ends, strict=True))
    )


THREE = [rung(10_000, 100, 0.1), rung(40_000, 180, 0.2), rung(160_000, 250, 0.05)]


def over_a_grid(rungs, prior):
    """Mean and deviation of log B at N, of a posterior over levels and slopes."""
    level, slope = np.meshgrid(np.linspace(0, 14, 2801), np.linspace(-1.2, 1.8, 1201))
    log = -((slope - prior[0]) ** 2) / (2 * prior[1] ** 2)
    for one in rungs:
        variance = one.error**2 + RESIDUAL**2
        at = level + slope * math.log(one.samples / N)
        log -= (math.log(one.batch_size) - at) ** 2 / (2 * variance)
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    mean = (weight * level).sum()
    return mean, math.sqrt((weight * (level - mean) ** 2).sum())


@pytest.mark.parametrize("prior", [TUNED, (0.1, 0.25)])
@pytest.mark.parametrize("rungs", [THREE[:1], THREE[:2], THREE])
def test_it_is_the_posterior(rungs, prior, monkeypatch):
    monkeypatch.setattr(growth, "TUNED", prior)
    found = growth.predict(rungs, N)
    assert found.agree
    mean, deviation = over_a_grid(rungs, prior)
    # The grid is 0.005 wide.
    assert math.log(found.predicted.batch_size) == pytest.approx(mean, abs=1e-3)
    bend = BEND * math.log(N / rungs[-1].samples)
    half = 1.96 * math.hypot(deviation, RESIDUAL, bend)
    assert math.log(found.predicted.high / found.predicted.batch_size) == pytest.approx(
        half, rel=1e-3
    )
    assert math.log(found.predicted.batch_size / found.predicted.low) == pytest.approx(
        half, rel=1e-3
    )


def test_at_its_own_length_a_rung_stays():
    found = growth.predict([rung(N, 300, 0.1)], N)
    assert found.predicted.batch_size == pytest.approx(300)
    assert found.slope == pytest.approx(TUNED[0])


def test_a_stand_in_is_less_sure():
    own, other = growth.predict(THREE, N), growth.predict(THREE, N, stand_in=0.3)
    assert other.predicted.batch_size == own.predicted.batch_size
    assert other.predicted.high > own.predicted.high
    assert other.predicted.low < own.predicted.low


def test_lengths_that_disagree_widen_the_interval():
    zigzag = [THREE[0], rung(40_000, 900, 0.05), THREE[2]]
    calm, wild = growth.predict(THREE, N), growth.predict(zigzag, N)
    assert calm.agree
    assert not wild.agree
    assert wild.predicted.error > 1.5 * calm.predicted.error


def test_a_lower_end_counts_where_it_lies_above_the_line():
    own = growth.predict(THREE, N)
    line = own.predicted.batch_size * (80_000 / N) ** own.slope

    def with_end(size):
        end = Critical(samples=80_000, batch_size=size, low=size, high=math.inf)
        return growth.predict([*THREE[:2], end, THREE[2]], N)

    below, above = with_end(0.9 * line), with_end(2.0 * line)
    assert (below.predicted, below.slope) == (own.predicted, own.slope)
    assert above.predicted.batch_size > 1.1 * own.predicted.batch_size
    assert above.predicted.low > own.predicted.low
    assert above.predicted.high == math.inf


def test_of_lower_ends_alone_the_strongest_one_counts():
    ends = [
        Critical(samples=n, batch_size=s, low=s, high=math.inf)
        for n, s in ((10_000, 100), (160_000, 120))
    ]
    found = growth.predict(ends, N)
    assert found.predicted.batch_size == pytest.approx(100 * 100 ** TUNED[0])
    assert found.predicted.high == math.inf
    assert found.slope == pytest.approx(TUNED[0])


def test_of_worlds_by_its_model_95_percent_are_covered():
    draw, inside = np.random.default_rng(0), 0
    for _ in range(2000):
        slope = draw.normal(*TUNED)
        noise = draw.normal(0, RESIDUAL, 4)
        noise[3] += draw.normal(0, BEND) * math.log(N / 160_000)
        sizes = [5 + slope * math.log(each / N) for each in (10_000, 40_000, 160_000, N)] + noise
        rungs = [
            rung(samples, math.exp(size + draw.normal(0, 0.1)), 0.1)
            for samples, size in zip((10_000, 40_000, 160_000), sizes[:3], strict=True)
        ]
        found = growth.predict(rungs, N)
        inside += found.predicted.low <= math.exp(sizes[3]) <= found.predicted.high
    # Three standard errors are 0.015; the widened intervals of lengths that disagree add to 95 %.
    assert 0.94 < inside / 2000 < 0.985
