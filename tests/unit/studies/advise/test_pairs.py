"""What a batch size or a learning rate costs: by branches, and by pairs of whole trainings."""

import math
import random

import numpy as np
import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.critical import find_critical
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.pairs import Pairs, better
from steadygrad.studies.advise.plan import lengths_of
from steadygrad.studies.folder import Results
from steadygrad.studies.sequential import LOOKS
from tests.unit.studies.advise.events import (
    LENGTH,
    SIZES,
    branches,
    law,
    make_header,
    relabelled,
    scratch,
    seeds,
    slowness,
    within_tolerance,
)


@pytest.mark.parametrize(
    ("critical", "tolerance"),
    [(10.0, 0.2), (120.0, 0.2), (250.0, 0.1), (250.0, 0.4), (600.0, 0.2)],
)
def test_known_truth_without_noise(critical, tolerance):
    found = find_critical(branches(critical), tolerance)
    truth = within_tolerance(critical, tolerance)
    # What is left is that the curve is no parabola; interpolated in logarithms it is 6%.
    assert found.value == pytest.approx(truth, rel=0.015)
    assert found.within <= truth < found.beyond == 2 * found.within
    # Nothing is known between two trained sizes but what the interpolation assumes.
    assert (found.low, found.high) == (found.within, found.beyond)
    # Less than a quarter of the branch's loss is a divergence.
    expected = [slowness(size, critical) - 1 for size in SIZES]
    expected = [overhead if overhead < 3 else math.inf for overhead in expected]
    assert [*found.overhead.values()] == pytest.approx(expected, rel=0.02, abs=1e-3)
    assert found.known
    assert found.safe == found.within


@pytest.mark.parametrize(
    ("critical", "sigma", "shared", "replicates", "least"),
    [
        # 95% nominal: fewer than 54 of 60 has a chance of 3%, at 75% of 99%; the seeds are fixed.
        (64.0, 0.006, 0.0, 60, 54),
        # At a true 93% fewer than 180 of 200 has a chance of 4%, at 85% of 97%.
        pytest.param(250.0, 0.002, 0.006, 200, 180, marks=pytest.mark.slow),
    ],
)
def test_the_interval_of_branches_covers_the_truth(critical, sigma, shared, replicates, least):
    truth, covered = within_tolerance(critical), 0
    for seed in range(replicates):
        made = branches(critical, sigma=sigma, shared=shared, seed=seed)
        found = find_critical(made, 0.2, seed=seed)
        covered += found.low <= truth <= found.high
    assert covered >= least


@pytest.mark.parametrize(("good", "end"), [(1, math.inf), (2, 2.99), (4, 1e30)])
def test_a_diverged_size_is_a_ceiling_and_widens_nothing(good, end):
    """A size that ends above a quarter of the branch has diverged, also with a finite loss."""
    made = branches(1e5, sigma=0.001, diverged=dict.fromkeys(SIZES[good:], end))
    quiet = find_critical([b for b in made if b.batch_size in SIZES[:good]], 0.2)
    found = find_critical(made, 0.2)
    assert found.resolved
    assert found.diverged == found.beyond == found.high == SIZES[good]
    assert found.within == found.value == found.safe == SIZES[good - 1] >= found.low
    assert [*found.overhead.values()][good:] == [math.inf] * (len(SIZES) - good)
    # The variance of what diverged is not pooled with the others'.
    assert quiet is None or found.fall == pytest.approx(quiet.fall, rel=1e-9)


@pytest.mark.parametrize(("end", "diverged"), [(9.0, None), (1e9, None), (math.inf, SIZES[3])])
def test_where_the_loss_is_flat_only_what_is_not_finite_has_diverged(end, diverged):
    """A level loss has no quarter of the branch to end above but by its noise."""
    falling, at = branches(250.0), len(SIZES) + 3
    flat = [relabelled(b, lambda s: 2 + s * 1e-6) for b in falling]
    for made in (flat, falling):
        made[at] = replace(made[at], loss=end)
    found = find_critical(flat, 0.2)
    assert (found.resolved, found.diverged) == (False, diverged)
    # The same end beyond a branch that falls: it has diverged.
    assert find_critical(falling, 0.2).diverged == SIZES[3]


@pytest.mark.parametrize(
    ("critical", "sigma", "seed"),
    # In the second the best guess is that all sizes are within, and 12 is not ruled out.
    [(64.0, 0.03, 5), (1500.0, 0.05, 18)],
)
def test_a_wide_interval_is_not_known_and_the_safe_end_is_advised(critical, sigma, seed):
    found = find_critical(branches(critical, sigma=sigma, seed=seed), 0.2)
    assert found.resolved
    assert math.isinf(found.beyond) == math.isinf(found.high) == (critical == 1500)
    assert min(found.high, SIZES[-1]) > 4 * found.low
    assert not found.known
    assert found.safe == max(size for size in SIZES if size <= max(found.low, SIZES[0]))


# A metric of few samples may be the same number all along; weights that never move have no error,
# and whatever the average of equal losses rounds to.
@pytest.mark.parametrize("drift", [0.0, 1e-10, 1e-16, -1e-6])
def test_a_loss_that_does_not_fall_gives_no_number(drift):
    draw = random.Random(0)
    for loss in (2.0, 0.1, 1 / 3, *(draw.uniform(0.01, 9.0) for _ in range(17))):
        still = [relabelled(b, lambda s: loss * (1 - drift * s)) for b in branches(250.0)]  # noqa: B023
        found = find_critical(still, 0.2)
        assert not found.resolved
        assert math.isnan(found.value)
        assert (found.low, found.high, found.safe) == (0.0, math.inf, SIZES[0])
        assert found.fall < 0 if drift < 0 else found.fall == 0
    small = [relabelled(b, lambda s: 2.0 + 1e-4 * law(s)) for b in branches(250.0)]
    assert find_critical(small, 0.2).resolved


def test_the_falls_error_is_at_least_that_over_repeats():
    """Repeats that start at different losses, and whose curves are smooth else."""
    made = []
    for b in branches(250.0):
        (place, first), *rest = b.curve
        start = (place, first + 0.2 * (b.repeat - 1) * bool(rest))
        made.append(replace(b, curve=(start, *rest)))
    found = find_critical(made, 0.2)
    fall = law(LENGTH / 4) - law(LENGTH)
    # The standard deviation of the starts is 0.2; the curve through the means is the same.
    assert found.fall == pytest.approx(fall / (0.2 / math.sqrt(3)), rel=0.01)
    assert not found.resolved


def test_evaluations_a_little_apart_are_allowed_for():
    """A size whose last losses stand for fewer samples is not called slower for it."""
    early, loss = branches(1e9)[0].curve[-2]  # the smallest batch at 0.9
    made = [
        replace(b, samples=early, loss=loss) if b.batch_size == SIZES[-1] else b
        for b in branches(1e9)
    ]
    # One batch size's efficiency is that of the curve's fit, to a thousandth.
    assert [*find_critical(made, 0.2).overhead.values()][-1] == pytest.approx(0.0, abs=2e-3)


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
    overhead, noise=(0.0, 0.0, 0.0), *, base=None, tolerance=0.2, place=LENGTH, losses=power_law
):
    """Trainings that need so many more samples, one for each error of their losses, in pairs."""
    loss = losses(place / (1 + overhead))
    runs = [
        replace(scratch(16, seed), place=float(place), loss=loss + error)
        for seed, error in enumerate(noise)
    ]
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
    far, lost = pairs(0.7, place=place), pairs(0.0, (0.0, math.inf, 0.0))
    assert far.overheads == lost.overheads == (math.inf,) * 3
    assert (far.lost, lost.lost, lost.failed, lost.passed) == (False, True, True, False)


@pytest.mark.parametrize("truth", [0.1, 0.3])
def test_the_interval_of_pairs_covers_the_truth(truth):
    draw, count, covered, reached = np.random.default_rng(1), 300, 0, 0
    for _ in range(count):
        noise = draw.normal(0, 0.01, 6)
        low, high = pairs(truth, noise, base=curves(draw.normal(0, 0.01, (6, 3)))).overheads[1:]
        covered += low <= truth <= high
        reached += low > 0 or high < 0.6
    # 0.8 % miss in normal differences, and the interpolation is off by a little.
    assert covered >= 0.97 * count
    assert reached > 0.9 * count


@pytest.mark.parametrize("tolerance", [0.05, 0.1, 0.2, 0.3, 0.7])
def test_the_tolerance_itself_is_tolerable(tolerance):
    """And an interval that ends at the margin ends within it."""
    base = {seed: [(n, -math.log(n)) for n in lengths_of(LENGTH, tolerance)] for seed in range(3)}
    known = {"base": base, "tolerance": tolerance, "losses": lambda s: -math.log(s) - 1e-9}
    at = [pairs(times * tolerance, **known) for times in (1.0, 1.25)]
    assert [found.overheads[0] for found in at] == [tolerance, 1.25 * tolerance]
    assert [(found.passed, found.failed) for found in at] == [(True, False), (False, True)]


@pytest.mark.parametrize(("loss", "found"), [(0.95, (True, True)), (0.8, (True, False))])
def test_a_better_rate_has_to_be_worth_the_last_of_the_tolerated_samples(loss, found):
    curves = {seed: [(100, 1.9), (200, 1.1), (300, 1.0)] for seed in range(3)}
    own, tried = (seeds(8, losses=lambda place, loss=x: loss) for x in (1.0, loss))
    verdict = better(tried, own, curves)
    assert (verdict.sure, verdict.never) == found


def test_pairs_that_a_decision_needs():
    assert pairs(0.1).needed == pairs(0.3).needed == 3
    noise = np.array([-0.03, 0.0, 0.03])
    at = {truth: pairs(truth, noise).needed for truth in (0.05, 0.15, 0.19, 0.21, 0.24, 0.35)}
    assert set(at.values()) <= {*LOOKS}
    # The closer to the tolerance, or to the margin where it passes, the more.
    assert at[0.05] <= at[0.15] <= at[0.19] < at[0.21]
    assert LOOKS[-1] == at[0.21] >= at[0.24] > at[0.35] > 3
    assert pairs(0.15, 2 * noise).needed > at[0.15]


LOST = seeds(8, rate=2.0, noise=math.inf)


@pytest.mark.parametrize(
    ("half", "twice", "spread", "verdict"),
    [
        (1.5, 0.6, 0.0, "low"),
        (0.6, 1.5, 0.0, "high"),
        (1.5, 1.5, 0.0, "fits"),
        # Better by less than the tolerated samples are worth, but not surely better.
        (1.5, 0.97, 0.003, "fits"),
        (1.5, 0.6, 0.05, ""),
        (30.0, 1.0, 0.05, ""),  # half of it is not better, for sure
        # Where both are better, nothing is known of the best.
        (0.6, 0.6, 0.0, ""),
        (1.5, None, 0.0, "fits"),
        (0.6, None, 0.0, "high"),
    ],
)
def test_half_and_twice_the_rate(half, twice, spread, verdict):
    runs = [*seeds(8), *seeds(8, rate=0.5, slower=half, spread=spread)]
    runs += seeds(8, rate=2.0, slower=twice, spread=spread) if twice else LOST
    # Half of a verdict, and those of a size that is not advised, are none.
    runs += [*seeds(12, slower=1.1), *seeds(16, slower=1.5)]
    runs += [*seeds(12, rate=0.5, slower=1.6), *seeds(16, rate=0.5), *seeds(16, rate=2.0)]
    (found,) = summarize(make_header((LENGTH,)), Results(runs), "budget").rates
    assert found.verdict == verdict
    assert [other.lr for other in found.others] == [0.0005, 0.002]
    assert (found.batch_size, found.lr, found.samples) == (8, 0.001, LENGTH)
    best = {"low": 0.002, "high": 0.0005}.get(verdict)
    assert (found.better and found.better.lr) == best
    assert math.isinf(found.others[1].mean) == (twice is None)
    both = [*runs, *seeds(12, rate=2.0, slower=0.7)]
    rates = summarize(make_header((LENGTH,)), Results(both), "budget").rates
    assert [(rate.batch_size, rate.verdict) for rate in rates] == [(8, verdict), (12, "low")]
