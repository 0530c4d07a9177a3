"""The interval of paired differences that may be looked at after every pair."""

import math

import numpy as np
import pytest

from steadygrad.studies.ab.sequence import compare, intervals, pairs_needed

NAN = math.nan


def first_verdict(alpha):
    return pairs_needed(1.0, 0.0, alpha)


def weight(differences, mean):
    """The martingale as the paper has it, for one mean: to the logarithm."""
    n, apart = len(differences), np.asarray(differences) - mean
    squares, total = (apart**2).sum(), apart.sum()
    return -math.log(n + 1) / 2 + n / 2 * math.log(squares / (squares - total**2 / (n + 1)))


@pytest.mark.parametrize("alpha", [0.05, 0.005])
def test_the_interval_holds_the_means_that_the_martingale_does_not_refuse(alpha):
    rows = np.random.default_rng(0).normal(1e6, 0.1, (2, 40))
    mean, half = intervals(rows, alpha)
    for n in (first_verdict(alpha), 12, 40):
        assert mean[1, n - 1] == pytest.approx(rows[1, :n].mean(), rel=1e-12)
        for end in (-half[1, n - 1], half[1, n - 1]):
            found = weight(rows[1, :n] - rows[1, :n].mean(), end)
            assert found == pytest.approx(math.log(1 / alpha), rel=1e-4)
    assert not np.isfinite(half[:, : first_verdict(alpha) - 1]).any()


def test_equal_differences_tell_after_five_pairs_and_zeros_late():
    assert [first_verdict(alpha) for alpha in (0.05, 0.025, 0.005)] == [5, 6, 7]
    # The variance is zero from the second pair on.
    a = np.array([[0.5, 0.7, 0.6, 0.9, 0.8, 0.1]] * 3)
    course = compare(a, a + np.array([[0.25], [-0.25], [0.0]]), 0.05)
    assert course.decided.tolist() == [[False] * 4 + [True] * 2] * 2 + [[False] * 6]
    assert not course.negligible.any()
    # Of a metric that takes no value twice, equal pairs show that few seeds could differ.
    many = np.arange(40.0)[None]
    course = compare(many, many, 0.05)
    assert course.negligible.tolist() == course.decided.tolist() == [[False] * 28 + [True] * 12]
    # One whose seed is not used has said everything with its first pair.
    ones = np.ones((1, 90))
    assert not compare(ones, ones, 0.05, smallest=0.5).decided.any()
    assert not compare(ones, ones + 0.1, 0.05).decided.any()
    # B is one run, repeated.
    course = compare(many, 0 * many + 50, 0.05, smallest=1e9)
    assert course.repeated.all()
    assert not course.decided.any()
    # Equal but for the rounding of what is subtracted.
    few = np.array([[0.7, 0.8] * 20])
    assert not compare(few, np.array([[0.6, 0.7] * 20]), 0.05).decided.any()


def test_a_failed_run_is_counted_and_stops_the_comparison_of_the_metric():
    a, b = np.arange(12.0), np.arange(12.0) + 5
    assert compare(a, b, 0.05).decided.argmax() == 4
    a[1] = NAN
    course = compare(a, b, 0.05)
    # A failed alone, in one of twelve: the shares differ by a twelfth, which says nothing.
    assert course.mean[-1] == pytest.approx(-1 / 12)
    assert not course.decided.any()
    b[:] = NAN
    course = compare(np.arange(12.0), b, 0.05)
    assert course.decided.argmax() == 4
    assert course.mean[4] == 1
    assert not compare(b, b, 0.05, smallest=1.0).decided.any()


def test_pairs_needed_are_those_at_which_the_interval_leaves_out_zero():
    n = pairs_needed(-0.3, 1.0, 0.05, 0.0)
    rows = np.where(np.arange(2 * n) % 2, 1.0, -1.0)
    for count, tells in ((n, True), (n - 1, False)):
        own = rows[:count] - rows[:count].mean()
        own = own / own.std(ddof=1) - 0.3
        assert (intervals(own, 0.05)[1][-1] < 0.3) == tells
    assert pairs_needed(0.0, 1.0, 0.05, 0.0) is None


@pytest.mark.parametrize("kind", ["normal", "heavy", "two"])
def test_at_most_one_of_twenty_studies_of_nothing_says_something(kind):
    """The table of ``benchmarks/ab_truth.py`` has 10,000 studies a row."""
    g, shape = np.random.default_rng(0), (4, 1000, 100)
    draw = {
        "normal": lambda: g.normal(size=shape),
        "heavy": lambda: g.standard_t(3, shape),
        "two": lambda: 1.0 * (g.random(shape) < 0.5),
    }[kind]
    a, b = draw(), draw()
    said = np.mean([compare(x, y, 0.05).decided.any(-1) for x, y in zip(a, b, strict=True)])
    # 2.7 % of normal ones, with a standard error of 0.26 %: neither wrong nor idle.
    assert 0.01 < said < 0.04
