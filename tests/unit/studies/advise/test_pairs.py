"""Overheads from pairs of trainings whose truth is known."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.pairs import FREEDOM, Pairs, shared_variance
from steadygrad.studies.advise.plan import lengths_of
from steadygrad.studies.sequential import LOOKS
from tests.unit.studies.advise.events import scratch

SAMPLES, TOLERANCE = 4096, 0.2


def power_law(place):
    """A loss with a floor."""
    return 1.5 + 40 * place**-0.5


def curves(seeds, noise=None, losses=power_law):
    """The smallest batch's losses by seed."""
    noise = np.zeros((seeds, 3)) if noise is None else noise
    places = lengths_of(SAMPLES, TOLERANCE)
    return {
        seed: [(n, losses(n) + e) for n, e in zip(places, noise[seed], strict=True)]
        for seed in range(seeds)
    }


def runs(overhead, noise, place=SAMPLES, losses=power_law):
    """Trainings that need so many more samples, one for each error of their losses."""
    loss = losses(place / (1 + overhead))
    return [
        replace(scratch(16, seed), place=float(place), loss=loss + error)
        for seed, error in enumerate(noise)
    ]


def pairs(overhead, noise=(0.0, 0.0, 0.0), *, base=None, tolerance=TOLERANCE, **more):
    return Pairs.of(runs(overhead, noise, **more), base or curves(len(noise)), tolerance)


@pytest.mark.parametrize("truth", [0.0, 0.05, 0.2, 0.35, 0.55])
@pytest.mark.parametrize("place", [SAMPLES, 4000])
def test_a_known_overhead_comes_back(truth, place):
    """Also where a large batch ends the training early: at its own place."""
    found = pairs(truth, place=place)
    # Between the lengths the loss is taken for linear in the logarithm of the samples.
    assert found.overheads == pytest.approx((truth,) * 3, abs=0.011)
    # One that needs fewer samples needs no more.
    assert pairs(-0.1, place=place).overheads == (0.0, 0.0, 0.0)


def test_beyond_three_tolerances_and_diverged_it_is_infinite():
    assert pairs(0.7).overheads == (math.inf, math.inf, math.inf)
    lost = pairs(0.0, (0.0, math.inf, 0.0))
    assert lost.overheads == (math.inf, math.inf, math.inf)
    assert (lost.lost, lost.failed, lost.passed) == (True, True, False)
    assert not pairs(0.7).lost


def test_what_a_seed_adds_to_both_of_its_losses_is_no_noise():
    seeds = np.array([0.1, -0.2, 0.4])
    both = pairs(0.3, seeds, base=curves(3, np.tile(seeds[:, None], 3)))
    assert both.overheads == pytest.approx(pairs(0.3).overheads)
    # The runs may have come in any order, and seeds of which one is missing are left out.
    more = [*runs(0.3, seeds)[::-1], replace(scratch(16, 7), loss=9.0)]
    again = Pairs.of(more, curves(4, np.tile([*seeds, 9.0], (3, 1)).T), TOLERANCE)
    assert [run.repeat for run in again.runs] == [0, 1, 2]
    assert again.overheads == both.overheads


@pytest.mark.parametrize("truth", [0.1, 0.3])
def test_the_interval_covers_the_truth(truth):
    draw, count, covered, reached = np.random.default_rng(1), 300, 0, 0
    for _ in range(count):
        noise = draw.normal(0, 0.01, 6)
        low, high = pairs(truth, noise, base=curves(6, draw.normal(0, 0.01, (6, 3)))).overheads[1:]
        covered += low <= truth <= high
        reached += low > 0 or high < 0.6
    # 0.8 % miss in normal differences, and the interpolation is off by a little.
    assert covered >= 0.97 * count
    assert reached > 0.9 * count


@pytest.mark.parametrize(("count", "kept"), [(2, None), (3, 3), (5, 4), (7, 6), (8, 8), (70, 64)])
def test_pairs_between_two_looks_wait(count, kept):
    found = pairs(0.3, [0.0] * count)
    assert (found and len(found)) == kept


@pytest.mark.parametrize(
    ("truth", "spread", "passed", "failed"),
    [
        (0.18, 0.0, True, False),
        (0.18, 0.02, False, False),  # its interval ends beyond the margin
        (0.15, 0.003, True, False),
        (0.15, 0.006, False, False),  # at 0.28
        (0.3, 0.02, False, False),
        (0.3, 0.0, False, True),
        (0.22, 0.0, False, True),
        (0.21, 0.001, False, False),
    ],
)
def test_within_the_tolerance_beyond_it_or_neither(truth, spread, passed, failed):
    found = pairs(truth, (-spread, 0.0, spread))
    assert (found.passed, found.failed) == (passed, failed)


@pytest.mark.parametrize("tolerance", [0.05, 0.1, 0.2, 0.3, 0.7])
def test_the_tolerance_itself_is_tolerable(tolerance):
    """And an interval that ends at the margin ends within it."""
    base = {seed: [(n, -math.log(n)) for n in lengths_of(SAMPLES, tolerance)] for seed in range(3)}
    at = [pairs(t * tolerance, base=base, tolerance=tolerance, losses=lambda s: -math.log(s) - 1e-9)
          for t in (1.0, 1.25)]  # fmt: skip
    assert [found.overheads[0] for found in at] == [tolerance, 1.25 * tolerance]
    assert [(found.passed, found.failed) for found in at] == [(True, False), (False, True)]


def test_pairs_that_a_decision_needs():
    assert pairs(0.1).needed == pairs(0.3).needed == 3
    noise = np.array([-0.03, 0.0, 0.03])
    at = {truth: pairs(truth, noise).needed for truth in (0.05, 0.15, 0.19, 0.21, 0.24, 0.35)}
    assert set(at.values()) <= {*LOOKS}
    # The closer to the tolerance, or to the margin where it passes, the more.
    assert at[0.05] <= at[0.15] <= at[0.19] < at[0.21]
    assert LOOKS[-1] == at[0.21] >= at[0.24] > at[0.35] > 3
    assert pairs(0.15, 2 * noise).needed > at[0.15]


def test_the_shared_variance_is_the_middle_one_of_sizes_that_are_known():
    spreads = (0.001, 0.002, 0.05)
    sizes = [pairs(0.1, (-spread, 0.0, spread)) for spread in spreads]
    far = [pairs(0.9, (-0.4, 0.0, 0.4)), pairs(0.0, (0.0, math.inf, 0.0))]
    found = shared_variance([*sizes, *far])
    assert (found.variance, found.freedom) == (pytest.approx(0.002**2), FREEDOM)
    assert shared_variance(far).freedom == shared_variance([]).freedom == 0
