"""Intervals of runs from scratch, over seeds."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.plan import RUN_ENDS, averaged_end, end_marks, run_marks
from steadygrad.studies.advise.runs import (
    MARGIN,
    Baseline,
    baseline_of,
    checked_runs,
)
from steadygrad.studies.advise.schema import CAP
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import law, make_header, point, scratch

SAMPLES = 4096
PLAN = make_header((1024, SAMPLES)).plan
PLACES = np.array([mark for mark in run_marks(SAMPLES, 8) if mark < 0.92 * SAMPLES] + [4000.0])


def baseline(seeds):
    """The smallest batch with so many seeds that all have the same losses."""
    losses = np.array([law(place) for place in PLACES])
    return Baseline(tuple(range(seeds)), PLACES, np.tile(losses[:, None], seeds))


def difference(overhead):
    """How far above the smallest batch's loss a run ends that needs so many more samples."""
    return law(PLACES[-1] / (1 + overhead)) - law(PLACES[-1])


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_the_interval_covers_the_truth_whatever_the_spread(seeds):
    base, draw, count = baseline(seeds), np.random.default_rng(seeds), 300
    truth, covered, below = 0.3, 0, 0
    for _ in range(count):
        # Small against the mean: an overhead is nearly linear in the loss there.
        found = base.interval(draw.normal(difference(truth), 0.005, seeds), int(PLACES[-1]))
        covered += found[0] <= truth <= found[1]
        below += truth <= found[2]
    # 95 % and 90 % nominal, 1.3 % and 1.7 % the error of 300, and the draws have their own.
    # With a normal's quantiles two seeds cover 70 %, three 81 %, and five 88 %.
    assert 0.92 <= covered / count <= 0.985
    assert 0.85 <= below / count <= 0.95


def test_the_interval_is_as_wide_as_students():
    """Ends at two and at four degrees of freedom, at 97.5 %: 4.303 and 2.776."""
    for seeds, quantile in ((3, 4.303), (5, 2.776)):
        spread = np.linspace(-1, 1, seeds)
        found = baseline(seeds).interval(difference(0.3) + 0.002 * spread, int(PLACES[-1]))
        half = 0.002 * quantile * spread.std(ddof=1) / math.sqrt(seeds)
        ends = [
            baseline(seeds).overhead(difference(0.3) + x, int(PLACES[-1])) for x in (-half, half)
        ]
        # 800 draws know so rare a quantile to about a tenth.
        assert found[1] - found[0] == pytest.approx(ends[1] - ends[0], rel=0.2)


def test_equal_differences_are_sure_and_one_diverged_run_is_no_interval():
    found = baseline(3).interval(np.full(3, difference(0.3)), int(PLACES[-1]))
    assert found == pytest.approx((0.3, 0.3, 0.3), abs=0.005)
    assert found[1] - found[0] < 1e-9
    assert baseline(3).interval(np.array([0.0, math.inf, 0.0]), 4000) == (CAP, CAP, CAP)


def test_what_a_seed_adds_to_all_of_its_losses_is_no_noise():
    seeds = baseline(3)
    shifted = Baseline(seeds.seeds, PLACES, seeds.losses + np.array([-0.2, 0.0, 0.2]))
    differences = np.full(3, difference(0.3))
    given = differences, int(PLACES[-1])
    assert shifted.interval(*given) == pytest.approx(seeds.interval(*given), abs=1e-9)
    noise = np.random.default_rng(0).normal(0, 0.01, seeds.losses.shape)
    noisy = Baseline(seeds.seeds, PLACES, seeds.losses + noise).interval(*given)
    assert noisy[1] - noisy[0] > 0.01


@pytest.mark.parametrize(
    ("tolerance", "within"), [(0.3, True), (0.31, True), (0.29, False), (0.25, False)]
)
def test_within_the_tolerance_and_its_bound_within_the_margin(tolerance, within):
    """Three runs whose overhead is 0.3, without noise and with some."""

    def run(noise):
        runs = [scratch(16, seed, SAMPLES, slower=1.2995) for seed in range(3)]
        spread = (-noise, 0.0, noise)
        runs = [replace(r, loss=r.loss + spread[r.repeat]) for r in runs]
        return checked_runs(baseline(3), Results(runs), PLAN, "constant", tolerance)[0]

    sure, loud = run(0.0), run(0.05)
    assert sure.overhead == pytest.approx(0.3, abs=0.005)
    assert sure.within == (sure.overhead <= tolerance) == within
    assert loud.upper > MARGIN * tolerance
    assert not loud.within


def test_seed_0_of_the_smallest_batch_is_the_main_trajectory():
    other = scratch(8, 1, SAMPLES)
    trajectory = point(1, SAMPLES, losses=lambda s: law(s) + 0.1)
    found = baseline_of(PLAN, Results([trajectory, other]), 1)
    assert found.seeds == (0, 1)
    assert found.losses[:, 0] - found.losses[:, 1] == pytest.approx([0.1] * len(found.places))
    # A run of seed 0 itself, where the rate decays, takes its place.
    decayed = scratch(8, 0, SAMPLES)
    again = baseline_of(PLAN, Results([trajectory, other, decayed]), 1)
    assert again.losses[:, 0].tolist() == [loss for _, loss in decayed.curve]
    assert baseline_of(PLAN, Results([trajectory]), 1) is None


def test_the_end_of_a_curve_is_the_mean_of_its_last_evaluations():
    curve = point(0, SAMPLES).curve
    ends = end_marks(SAMPLES, 8)
    found = averaged_end(curve)
    assert found[:-1] == curve[:-RUN_ENDS]
    assert found[-1] == (sum(ends) / 5, pytest.approx(sum(map(law, ends)) / 5))


def test_whole_batch_sizes_alone_are_checked():
    runs = [scratch(size, seed, SAMPLES) for size in (24, 16) for seed in range(3)]
    others = [scratch(8, 1, SAMPLES), scratch(8, 0, SAMPLES, rate=2.0), scratch(32, 0, SAMPLES)]
    grown = scratch(64, 0, SAMPLES, purpose="schedule", stages=[(0, 16), (1024, 64)])
    found = Results([*runs, *others, grown])
    sizes = [run.batch_size for run in checked_runs(baseline(3), found, PLAN, "constant", 0.2)]
    assert sizes == [16, 24]
    assert checked_runs(baseline(3), found, PLAN, "schedule", 0.2) == []


def test_seeds_that_agree_by_chance_take_part_of_the_other_sizes_spread():
    """Of 0 and 0.01^2 the agreeing size has a quarter of the latter; the other one keeps it."""
    base, spread = baseline(3), (-0.01, 0.0, 0.01)
    ends = {24: spread, 16: (0.0, 0.0, 0.0)}
    runs = [
        replace(run, loss=run.loss + ends[size][seed])
        for size in ends
        for seed in range(3)
        for run in [scratch(size, seed, SAMPLES)]
    ]
    agreeing, other = checked_runs(base, Results(runs), PLAN, "constant", 0.2)
    differences, samples = np.full(3, runs[-1].loss - base.losses[-1, 0]), runs[0].samples
    half = 0.01 * math.sqrt(0.25 / 3) * 4.303
    low, high = (base.overhead(differences + x, samples) for x in (-half, half))
    # 800 draws know so rare a quantile to about a tenth.
    assert agreeing.high - agreeing.low == pytest.approx(high - low, rel=0.2)
    alone = base.interval(differences + np.array(spread), samples)
    assert (other.low, other.high) == pytest.approx(alone[:2], rel=1e-9)


def test_the_end_of_a_curve_counts_most_where_no_shape_fits():
    """A fast and a slow fall: fitted evenly, the overhead of 30 % comes out below 26 %."""
    places = PLACES.astype(float)

    def fall(samples):
        return 2 * np.exp(-samples / 600) + np.exp(-samples / 8000)

    base = Baseline((0, 1), places, np.tile(fall(places)[:, None], 2))
    behind = np.full(2, fall(places[-1] / 1.3) - fall(places[-1]))
    assert base.overhead(behind, int(places[-1])) == pytest.approx(0.3, abs=0.02)


def test_a_larger_loss_is_no_gain_where_the_curve_is_flat():
    flat = Baseline((0, 1), PLACES, np.ones((len(PLACES), 2)))
    rising = Baseline((0, 1), PLACES, np.tile(PLACES[:, None] / 1e5, 2))
    for base in (flat, rising):
        assert base.overhead(np.full(2, 0.01), int(PLACES[-1])) == 0.0
        assert base.overhead(np.full(2, -0.01), int(PLACES[-1])) == pytest.approx(1 / 1.5 - 1)
