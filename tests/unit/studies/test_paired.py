"""The test of paired differences that may be looked at after every pair."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from steadygrad.studies import paired
from steadygrad.studies.paired import MOST, NOTHING, Prior, compare, interval, intervals, next_look
from tests.unit.studies.results import make_training


def weight(differences, mean, prior):
    """The logarithm of the mixture at one mean, as the paper has it: literally."""
    n, g, apart = len(differences), paired.EFFECT_VARIANCE, np.asarray(differences) - mean
    squares = (apart**2).sum() + prior.freedom * prior.variance
    share = g * apart.sum() ** 2 / ((1 + g * n) * squares)
    return -math.log(1 + g * n) / 2 - (n + prior.freedom) / 2 * math.log1p(-share)


def upper_end(differences, alpha, prior):
    """The largest mean that is not refused, by bisection."""
    low = float(np.mean(differences))
    high = top = low + 1e6
    for _ in range(100):
        middle = (low + high) / 2
        refused = weight(differences, middle, prior) >= math.log(1 / alpha)
        low, high = (low, middle) if refused else (middle, high)
    return low if high < top else math.inf


@pytest.mark.parametrize("prior", [NOTHING, Prior(0.5, 2.0)])
@pytest.mark.parametrize(("alpha", "first"), [(0.05, 4), (0.025, 5), (0.005, 6)])
def test_the_interval_has_the_means_that_the_definition_does_not_refuse(alpha, first, prior):
    row = np.random.default_rng(0).normal(0.3, 0.7, 40)
    for n in (2, 3, first - 1, first, 12, 40):
        mean, low, high = interval(row[:n], alpha, prior)
        assert mean - low == pytest.approx(high - mean)
        assert high == pytest.approx(upper_end(row[:n], alpha, prior), rel=1e-9)
    # Without another variance fewer are too few.
    assert prior.freedom or math.isinf(interval(row[: first - 1], alpha)[2])
    assert paired.pairs_needed(1.0, 0.0, alpha) == first


def test_intervals_are_those_of_each_number_of_pairs_wherever_the_differences_lie():
    rows = np.random.default_rng(0).normal(size=(2, 20))
    mean, half = intervals(rows, 0.05)
    for n in range(2, 21):
        expected, low, high = interval(rows[:, :n])
        assert mean[:, n - 1] == pytest.approx(expected)
        assert half[:, n - 1] == pytest.approx((high - low) / 2)
    far, wide = intervals(1e6 + 0.01 * rows, 0.05)
    assert far == pytest.approx(1e6 + 0.01 * mean, rel=1e-14)
    assert wide == pytest.approx(0.01 * half, rel=1e-6)
    # A common variance of half a difference's, after ten pairs: six variances of the mean.
    choice = rows[0, :10].var(ddof=1) / 2
    assert intervals(rows[:1], 0.05, choice)[1][0, 9] == pytest.approx(half[0, 9] * math.sqrt(6))


def test_looks():
    looks = [4]
    while look := next_look(looks[-1]):
        looks.append(look)
    assert looks == [4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 33, 41, 51, 63, MOST]
    assert [paired.looked(n) for n in (0, 2, 3, 9, 10, 63, 1000)] == [0, 0, 0, 8, 10, 63, 64]
    assert [next_look(n, 12) for n in (0, 8, 10, 11, 12)] == [4, 10, 12, 12, 0]


@pytest.mark.parametrize("freedom", [0, 2])
def test_the_intervals_of_all_looks_hold_together_in_19_of_20_studies(freedom):
    """Those of looks after every pair, and other distributions: ``benchmarks/ab_truth.py``."""
    g, studies = np.random.default_rng(0), 20_000
    pairs, left = g.normal(5.0, 1.0, (studies, MOST)), np.zeros(studies, bool)
    # A variance from elsewhere that is estimated itself.
    prior = Prior(g.chisquare(2, studies) / 2, freedom)
    look = 0
    while look := next_look(look):
        _, low, high = interval(pairs[:, :look], prior=prior)
        left |= (low > 5) | (high < 5)
    # 2.2 % with a standard error of 0.1 %: neither wrong nor idle.
    assert 0.015 < left.mean() < 0.03


def test_a_failed_run_is_counted_and_stops_the_comparison_of_the_metric():
    a, b = np.arange(12.0), np.arange(12.0) + 5
    course = compare(a, b, 0.05)
    assert (course.mean.tolist(), course.failed.any()) == ([5] * 12, False)
    assert np.isinf(course.half).tolist() == [True] * 3 + [False] * 9
    # Equal but for the rounding of what is subtracted.
    assert compare(0.1 * a, 0.1 * a + 0.3, 0.05).half[-1] == 0
    a[1] = np.nan
    course = compare(a, b, 0.05)
    assert course.failed.tolist() == [False] + [True] * 11
    assert course.mean[[0, -1]] == pytest.approx([5, -1 / 12])
    assert course.half[-1] > 1 / 12
    assert compare(np.arange(12.0), np.nan * b, 0.05).mean.tolist() == [1] * 12


def test_what_is_told_of_all_pairs_is_of_those_before_the_first_gap():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 0.1, 12), rng.normal(0.5, 0.1, 12)
    rows = [[make_training(x, seed=seed) for seed, x in enumerate(row)] for row in (a, b)]
    found = paired.losses_of(*({run.seed: run for run in row if run.seed != 10} for row in rows))
    assert found.tolist() == [[*a[:10]], [*b[:10]]]
    told, course = paired.tell(*found), compare(*found, 0.05)
    assert (told.mean, told.high - told.low) == pytest.approx(
        (course.mean[-1], 2 * course.half[-1])
    )
    assert (told.variance, told.lost) == (pytest.approx((b - a)[:10].var(ddof=1)), (0, 0))
    assert told.is_told
    assert told.high < 0
    rows[1][3] = make_training(math.inf, seed=3)
    found = paired.losses_of(*({run.seed: run for run in row} for row in rows))
    told = paired.tell(*found)
    # The share of failed runs, one of twelve.
    assert (told.mean, told.variance) == pytest.approx((1 / 12, 1 / 12))
    assert (told.lost, told.is_told) == ((0, 1), False)


@pytest.mark.parametrize(("pairs", "most", "final", "verdict", "needed"), [
    (3, 64, 99, None, 4),
    (4, 64, 99, 4, 5),
    (9, 64, 99, 8, 10),
    (9, 9, 99, 9, 9),
    (12, 9, 99, 9, 9),
    (60, 64, 8, 8, 8),
])  # fmt: skip
def test_a_study_asks_for_the_pairs_of_the_next_look(pairs, most, final, verdict, needed):
    def judge(n):
        return SimpleNamespace(pairs=n, is_final=n >= final)

    found, wanted = paired.judged(pairs, judge, most)
    assert (found and found.pairs, wanted) == (verdict, needed)


def test_pairs_needed_are_those_at_which_the_interval_tells():
    n = paired.pairs_needed(-0.3, 2.0, 0.05)
    found = paired.half_width(np.array([n - 1.0, n]), 2.0, 0.05)
    assert found[0] >= 0.3 > found[1]
    # Or lies within the smallest difference that matters.
    assert paired.pairs_needed(0.0, 2.0, 0.05, 0.3) == n
    # A variance from elsewhere spares pairs where there are few.
    assert paired.pairs_needed(3.0, 1.0, 0.05, prior=Prior(1.0, 4.0)) < paired.pairs_needed(
        3.0, 1.0, 0.05
    )
    assert paired.pairs_needed(0.0, 1.0, 0.05) is None
