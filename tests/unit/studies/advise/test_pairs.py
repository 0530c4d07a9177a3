"""What a batch size costs, by pairs of whole trainings."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.analysis import Pairs
from steadygrad.studies.advise.plan import lengths_of
from tests.unit.studies.advise.events import LENGTH, training


def power_law(place):
    """A loss with a floor."""
    return 1.5 + 40 * place**-0.5


def curves(noise):
    """The smallest batch's losses by seed, with the errors at its lengths."""
    places = lengths_of(LENGTH, 0.2)
    return {
        seed: [(n, power_law(n) + error) for n, error in zip(places, errors, strict=True)]
        for seed, errors in enumerate(noise)
    }


def pairs(
    overhead,
    noise=(0.0, 0.0, 0.0, 0.0),
    *,
    base=None,
    tolerance=0.2,
    place=LENGTH,
    losses=power_law,
):
    """Trainings that need so many more samples, one for each error of their losses, in pairs."""
    loss = losses(place / (1 + overhead))
    runs = {
        seed: replace(training(16, seed), curve=((float(place), loss + error),), loss=loss + error)
        for seed, error in enumerate(noise)
    }
    return Pairs.of(runs, base or curves(np.zeros((len(noise), 3))), tolerance)


@pytest.mark.parametrize("truth", [0.0, 0.05, 0.2, 0.35, 0.55])
@pytest.mark.parametrize("place", [LENGTH, 4000])
def test_a_known_overhead_comes_back(truth, place):
    """Also where a large batch ends the training early: at its own place."""
    found = pairs(truth, place=place)
    # Between the lengths the loss is taken for linear in the logarithm of the samples.
    assert found.overheads == pytest.approx((truth,) * 3, abs=0.011)
    # One that needs fewer samples needs no more.
    assert pairs(-0.1, place=place).overheads == (0.0, 0.0, 0.0)
    # Beyond three tolerances nothing is known, nor where a run diverged.
    far, lost = pairs(0.7, place=place), pairs(0.0, (0.0, math.inf, 0.0, 0.0))
    assert far.overheads == lost.overheads == (math.inf,) * 3
    assert (lost.failed, lost.passed) == (True, False)


@pytest.mark.parametrize("truth", [0.1, 0.3])
def test_the_interval_of_pairs_covers_the_truth(truth):
    draw, count, covered, reached = np.random.default_rng(1), 300, 0, 0
    for _ in range(count):
        noise = draw.normal(0, 0.01, 6)
        low, high = pairs(truth, noise, base=curves(draw.normal(0, 0.01, (6, 3)))).overheads[1:]
        covered += low <= truth <= high
        reached += low > 0 or high < 0.6
    # Fewer than 5 % miss in normal differences, and the interpolation is off by a little.
    assert covered >= 0.95 * count
    assert reached > 0.9 * count


@pytest.mark.parametrize("tolerance", [0.05, 0.1, 0.2, 0.3, 0.7])
def test_the_tolerance_itself_is_tolerable(tolerance):
    """And an interval that ends at the margin ends within it."""
    base = {seed: [(n, -math.log(n)) for n in lengths_of(LENGTH, tolerance)] for seed in range(4)}
    known = {"base": base, "tolerance": tolerance, "losses": lambda s: -math.log(s) - 1e-9}
    at = [pairs(times * tolerance, **known) for times in (1.0, 1.25)]
    assert [found.overheads[0] for found in at] == [tolerance, 1.25 * tolerance]
    assert [(found.passed, found.failed) for found in at] == [(True, False), (False, True)]
