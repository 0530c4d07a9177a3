"""The critical batch size of branches whose truth is known."""

import math
import random

import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.critical import find_critical
from tests.unit.studies.advise.events import (
    LENGTH,
    SIZES,
    branches,
    law,
    relabelled,
    slowness,
    within_tolerance,
)


@pytest.mark.parametrize(
    ("critical", "tolerance"),
    [(10.0, 0.2), (64.0, 0.2), (120.0, 0.2), (250.0, 0.1), (250.0, 0.4), (600.0, 0.2)],
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
        pytest.param(64.0, 0.006, 0.006, 200, 180, marks=pytest.mark.slow),
        pytest.param(250.0, 0.002, 0.006, 200, 180, marks=pytest.mark.slow),
    ],
)
def test_the_interval_covers_the_truth(critical, sigma, shared, replicates, least):
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


def with_end(made, size, end):
    """One of the repeats of a size ends elsewhere."""
    return [replace(b, loss=end) if (b.batch_size, b.repeat) == (size, 1) else b for b in made]


@pytest.mark.parametrize(("end", "diverged"), [(9.0, None), (1e9, None), (math.inf, SIZES[3])])
def test_where_the_loss_is_flat_only_what_is_not_finite_has_diverged(end, diverged):
    """A level loss has no quarter of the branch to end above but by its noise."""
    falling = branches(250.0)
    flat = [relabelled(b, lambda s: 2 + s * 1e-6) for b in falling]
    found = find_critical(with_end(flat, SIZES[3], end), 0.2)
    assert (found.resolved, found.diverged) == (False, diverged)
    # The same ends beyond a branch that falls: both have diverged.
    assert find_critical(with_end(falling, SIZES[3], end), 0.2).diverged == SIZES[3]


def test_what_lies_beyond_the_last_stable_size_ends_where_one_diverged():
    """The best guess is below 32; that 32 is tolerable is not ruled out, and 64 diverged."""
    made = branches(64.0, sigma=0.01, seed=1, diverged=dict.fromkeys(SIZES[3:], math.inf))
    found = find_critical(made, 0.2)
    assert (found.beyond, found.high, found.diverged) == (32, 64, 64)


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


def test_whole_repeats_are_used_and_fewer_than_two_give_nothing():
    made = branches(250.0, sigma=0.002)
    cut = [b for b in made if b.repeat < 2 or b.batch_size <= 16]
    found = find_critical(cut, 0.2)
    assert found == find_critical([b for b in made if b.repeat < 2], 0.2)
    assert found.resolved
    for few in ([], made[:1], made[:3], branches(250.0, repeats=1)):
        assert find_critical(few, 0.2) is None


def test_evaluations_a_little_apart_are_allowed_for():
    """A size whose last losses stand for fewer samples is not called slower for it."""
    early, loss = branches(1e9)[0].curve[-2]  # the smallest batch at 0.9
    made = [
        replace(b, samples=early, loss=loss) if b.batch_size == SIZES[-1] else b
        for b in branches(1e9)
    ]
    # One batch size's efficiency is that of the curve's fit, to a thousandth.
    assert [*find_critical(made, 0.2).overhead.values()][-1] == pytest.approx(0.0, abs=2e-3)
