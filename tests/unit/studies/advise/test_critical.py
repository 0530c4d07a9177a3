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


@pytest.mark.parametrize("critical", [64.0, 120.0, 250.0, 600.0])
def test_known_truth_without_noise(critical):
    found = find_critical(branches(critical), 0.2)
    truth = within_tolerance(critical)
    # What is left is that the curve is no parabola; interpolated in logarithms it is 6%.
    assert found.value == pytest.approx(truth, rel=0.015)
    assert found.within <= truth < found.beyond
    assert found.beyond == 2 * found.within
    # Nothing is known between two trained sizes but what the interpolation assumes.
    assert (found.low, found.high) == (found.within, found.beyond)
    # Less than a quarter of the branch's loss is a divergence.
    expected = [slowness(size, critical) - 1 for size in SIZES]
    expected = [overhead if overhead < 3 else math.inf for overhead in expected]
    assert [*found.overhead.values()] == pytest.approx(expected, rel=0.02, abs=1e-3)
    assert found.known
    assert found.safe == found.within


def covered(critical: float, sigma: float, shared: float, replicates: int) -> int:
    truth = within_tolerance(critical)
    runs = [
        find_critical(branches(critical, sigma=sigma, shared=shared, seed=seed), 0.2, seed=seed)
        for seed in range(replicates)
    ]
    return sum(run.low <= truth <= run.high for run in runs)


def test_the_interval_covers_the_truth():
    # 95% nominal: fewer than 54 of 60 has a chance of 3%, at 75% of 99%; the seeds are fixed.
    assert covered(64.0, 0.006, 0.0, 60) >= 54


@pytest.mark.slow
@pytest.mark.parametrize(
    ("critical", "sigma", "shared"),
    [(64.0, 0.002, 0.0), (64.0, 0.006, 0.006), (250.0, 0.002, 0.006), (250.0, 0.006, 0.0)],
)
def test_the_interval_covers_the_truth_in_many_replicates(critical, sigma, shared):
    # 95% nominal; at a true 93% fewer than 180 of 200 has a chance of 4%, at 85% of 97%.
    assert covered(critical, sigma, shared, 200) >= 180


def test_noise_in_the_smallest_batchs_curve_widens_the_interval():
    """Noise on the way of the smallest batch's branches, none at any branch's end."""
    noise, sizes = random.Random(0), [8 * 2**i for i in range(5)]
    quiet = branches(600.0, sigma=0.0005, seed=2, sizes=sizes)
    loud = [
        replace(b, curve=(*((s, y + noise.gauss(0, 0.02)) for s, y in b.curve[:-1]), b.curve[-1]))
        for b in quiet
    ]
    assert find_critical(quiet, 0.2).fall > 3 * find_critical(loud, 0.2).fall > 0


@pytest.mark.parametrize("good", [1, 2, 4])
@pytest.mark.parametrize("end", [math.inf, 1e30, 2.99])
def test_a_diverged_size_is_a_ceiling_and_widens_nothing(good, end):
    """A size that ends above a quarter of the branch has diverged, also with a finite loss."""
    diverged = dict.fromkeys(SIZES[good:], end)
    made = branches(1e5, sigma=0.001, diverged=diverged)
    quiet = find_critical([b for b in made if b.batch_size in SIZES[:good]], 0.2)
    found = find_critical(made, 0.2)
    assert found.resolved
    assert found.diverged == found.beyond == SIZES[good]
    assert found.within == found.value == found.safe == SIZES[good - 1]
    assert [*found.overhead.values()][good:] == [math.inf] * (len(SIZES) - good)
    assert SIZES[good - 1] >= found.low
    assert found.high == SIZES[good]
    if quiet is not None:
        # The variance of what diverged is not pooled with the others'.
        assert found.fall == pytest.approx(quiet.fall, rel=1e-9)


def test_what_lies_beyond_the_last_stable_size_ends_where_one_diverged():
    """The best guess is below 32; that 32 is tolerable is not ruled out, and 64 diverged."""
    made = branches(64.0, sigma=0.01, seed=1, diverged=dict.fromkeys(SIZES[3:], math.inf))
    found = find_critical(made, 0.2)
    assert (found.beyond, found.high, found.diverged) == (32, 64, 64)


def test_one_repeat_that_blows_up_is_a_divergence():
    made = branches(1e5, sigma=0.001)
    blown = (SIZES[-1], 1)
    made = [replace(b, loss=1e6) if (b.batch_size, b.repeat) == blown else b for b in made]
    found = find_critical(made, 0.2)
    assert (found.resolved, found.within, found.diverged) == (True, SIZES[-2], SIZES[-1])


def test_a_gain_of_larger_batches_is_no_credit():
    """All sizes above the third are as good as it, and better than the smallest."""
    made = []
    for b in branches(1e9):
        loss = b.loss - 0.05 * min(2, SIZES.index(b.batch_size))
        made.append(replace(b, loss=loss, curve=(*b.curve[:-1], (LENGTH, loss))))
    found = find_critical(made, 0.2)
    assert [*found.overhead.values()] == pytest.approx([0.0] * len(SIZES), abs=1e-6)
    # The next size is measured against the best, not against the smallest.
    worse = [replace(b, loss=b.loss + 0.08) if b.batch_size == SIZES[-1] else b for b in made]
    again = find_critical(worse, 0.2)
    smallest = next(b.loss for b in made if b.batch_size == SIZES[0])
    last = next(b.loss for b in worse if b.batch_size == SIZES[-1])
    assert last < smallest
    assert [*again.overhead.values()][-1] > 0.2
    assert again.within == SIZES[-2]


def test_every_size_within_the_tolerance():
    found = find_critical(branches(1e5), 0.2)
    assert (found.value, found.within) == (SIZES[-1], SIZES[-1])
    assert math.isinf(found.high)
    assert math.isinf(found.beyond)
    assert found.known


@pytest.mark.parametrize(
    ("critical", "more", "within", "beyond"),
    # The tolerable size is 8.6 first, and then 89.6.
    [(10.0, (), 8, 16), (400.0, (), 64, 128), (400.0, (96,), 64, 96)],
)
def test_the_bracket_is_between_the_sizes_that_were_tried(critical, more, within, beyond):
    made = branches(critical) + branches(critical, sizes=[SIZES[0], *more])
    found = find_critical(made, 0.2)
    assert within < within_tolerance(critical) < beyond
    assert (found.within, found.beyond) == (found.low, found.high) == (within, beyond)
    assert within < found.value < beyond


def test_a_wide_interval_is_not_known_and_the_safe_end_is_advised():
    found = find_critical(branches(64.0, sigma=0.03, seed=5), 0.2)
    assert found.resolved
    assert found.high > 4 * found.low
    assert not found.known
    assert found.safe <= max(found.low, SIZES[0])
    assert found.safe in SIZES


def test_without_an_upper_end_it_may_not_be_known_either():
    """The best guess is that all sizes are within; the truth is 310, and 12 not ruled out."""
    made = branches(1500.0, sigma=0.05, seed=18)
    assert within_tolerance(1500.0) == pytest.approx(309.6)
    found = find_critical(made, 0.2)
    assert (found.within, found.beyond, found.high) == (SIZES[-1], math.inf, math.inf)
    assert found.resolved
    assert 4 * found.low < SIZES[-1]
    assert not found.known
    assert found.safe == SIZES[0]


# A metric of few samples may be the same number all along.
@pytest.mark.parametrize(("loss", "slope"), [(2.0, 1e-6), (2.0, 0), (2.3, 0), (0.1, 0), (1 / 3, 0)])
def test_a_loss_that_does_not_fall_gives_no_number(loss, slope):
    found = find_critical([relabelled(b, lambda s: loss + slope * s) for b in branches(250.0)], 0.2)
    assert not found.resolved
    assert math.isnan(found.value)
    assert (found.low, found.high, found.safe) == (0.0, math.inf, SIZES[0])


@pytest.mark.parametrize("drift", [0.0, 1e-10, 1e-16])
def test_a_fall_within_rounding_is_none(drift):
    """Weights that never move: no error, and whatever the average of equal losses rounds to."""
    draw = random.Random(0)
    for loss in [draw.uniform(0.01, 9.0) for _ in range(20)]:
        still = [relabelled(b, lambda s: loss * (1 - drift * s)) for b in branches(250.0)]  # noqa: B023
        found = find_critical(still, 0.2)
        assert (found.fall, found.resolved) == (0.0, False)


def test_a_small_fall_without_noise_is_one():
    made = []
    for b in branches(250.0):
        curve = tuple((s, 2.0 + 1e-4 * y) for s, y in b.curve)
        made.append(replace(b, loss=curve[-1][1], curve=curve))
    assert find_critical(made, 0.2).resolved


@pytest.mark.parametrize(("end", "diverged"), [(9.0, None), (1e9, None), (math.inf, SIZES[3])])
def test_where_the_loss_is_flat_only_what_is_not_finite_has_diverged(end, diverged):
    """A level loss has no quarter of the branch to end above but by its noise."""

    def with_end(made):
        last = (SIZES[3], 1)
        return [replace(b, loss=end) if (b.batch_size, b.repeat) == last else b for b in made]

    falling = branches(250.0)
    flat = find_critical(with_end([relabelled(b, lambda s: 2 + s * 1e-6) for b in falling]), 0.2)
    assert (flat.resolved, flat.diverged) == (False, diverged)
    # The same ends beyond a branch that falls: both have diverged.
    assert find_critical(with_end(falling), 0.2).diverged == SIZES[3]


def test_the_falls_error_is_at_least_that_over_repeats():
    """Repeats that start at different losses, and whose curves are smooth else."""
    made = []
    for b in branches(250.0):
        (place, first), *rest = b.curve
        start = (place, first + 0.2 * (b.repeat - 1) * bool(rest))
        made.append(replace(b, curve=(start, *rest)))
    found, smooth = find_critical(made, 0.2), find_critical(branches(250.0), 0.2)
    assert smooth.fall > 1e3
    fall = law(LENGTH / 4) - law(LENGTH)
    # The standard deviation of the starts is 0.2; the curve through the means is the same.
    assert found.fall == pytest.approx(fall / (0.2 / math.sqrt(3)), rel=0.01)
    assert found.fall < 3
    assert not found.resolved


def test_a_loss_that_only_wavers_measures_nothing():
    """A fall within the noise is none: most seeds must say so."""
    unknown = 0
    for seed in range(40):
        draw = random.Random(seed)
        flat = [relabelled(b, lambda s: 2 + draw.gauss(0, 0.002)) for b in branches(250.0)]  # noqa: B023
        unknown += not find_critical(flat, 0.2, seed=seed).resolved
    # Three standard errors on one side, over the best of many curves: a few slip through.
    assert unknown >= 36


def test_a_repeats_common_noise_does_not_matter():
    quiet = find_critical(branches(250.0, sigma=0.002, seed=1), 0.2)
    loud = find_critical(branches(250.0, sigma=0.002, shared=0.05, seed=1), 0.2)
    # The smooth curve is bent a little by its own last point.
    assert loud.value == pytest.approx(quiet.value, rel=0.35)
    assert loud.high / loud.low < 4


def test_each_sizes_variance_is_its_own_in_part():
    """One noisy size must not hide that the others are quiet."""
    noise = random.Random(3)
    made = [
        replace(b, loss=b.loss + noise.gauss(0, 0.05)) if b.batch_size == SIZES[-1] else b
        for b in branches(64.0, sigma=0.0005, seed=3)
    ]
    found = find_critical(made, 0.2)
    assert found.known
    assert found.low <= within_tolerance(64.0) <= found.high


def test_the_same_branches_give_the_same_interval():
    made = branches(64.0, sigma=0.01)
    assert find_critical(made, 0.2, seed=7) == find_critical(made, 0.2, seed=7)
    first, second = (find_critical(made, 0.2, seed=seed) for seed in (7, 8))
    assert (first.low, first.high) != (second.low, second.high)


def test_a_wider_tolerance_takes_a_larger_batch():
    values = [find_critical(branches(250.0), tolerance).value for tolerance in (0.1, 0.2, 0.4)]
    assert values == sorted(values)
    assert values[2] > 2 * values[0]


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_too_few_branches_give_nothing(kept):
    assert find_critical(branches(250.0)[:kept], 0.2) is None
    assert find_critical(branches(250.0, repeats=1), 0.2) is None


def test_a_study_cut_short_uses_whole_repeats():
    made = branches(250.0, sigma=0.002)
    cut = [b for b in made if b.repeat < 2 or b.batch_size <= 16]
    assert find_critical(cut, 0.2) == find_critical([b for b in made if b.repeat < 2], 0.2)


def test_evaluations_a_little_apart_are_allowed_for():
    """A size whose last losses stand for fewer samples is not called slower for it."""
    early = branches(1e9)[0].curve[-2]  # the smallest batch at 0.9
    assert early[0] == round(0.9 * LENGTH)
    made = [
        replace(b, samples=early[0], loss=early[1]) if b.batch_size == SIZES[-1] else b
        for b in branches(1e9)
    ]
    found = find_critical(made, 0.2)
    # One batch size's efficiency is that of the curve's fit, to a thousandth.
    assert [*found.overhead.values()][-1] == pytest.approx(0.0, abs=2e-3)
