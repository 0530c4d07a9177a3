"""Verdicts on pairs, and doubts about them."""

import numpy as np

from steadygrad.studies.ab.findings import judge


def judged(a, b, smallest=0.0):
    return judge(a, b, 0.05, smallest)


def test_equal_differences_tell_after_four_pairs_and_zeros_late():
    # The variance is zero from the second pair on.
    a = np.array([[0.5, 0.7, 0.6, 0.9, 0.8, 0.1]] * 3)
    found = judged(a, a + np.array([[0.25], [-0.25], [0.0]]))
    assert found.decided.tolist() == [[False] * 3 + [True] * 3] * 2 + [[False] * 6]
    assert not found.negligible.any()
    # Of a metric that takes no value twice, equal pairs show that few seeds could differ.
    many = np.arange(40.0)[None]
    found = judged(many, many)
    assert found.negligible.tolist() == found.decided.tolist() == [[False] * 28 + [True] * 12]
    # One whose seed is not used has said everything with its first pair.
    ones = np.ones((1, 90))
    assert not judged(ones, ones, smallest=0.5).decided.any()
    assert not judged(ones, ones + 0.1).decided.any()
    # B is one run, repeated.
    found = judged(many, 0 * many + 50, smallest=1e9)
    assert found.repeated[1].all()
    assert not found.decided.any()
    # Equal but for the rounding of what is subtracted.
    few = np.array([[0.7, 0.8] * 20])
    assert not judged(few, np.array([[0.6, 0.7] * 20])).decided.any()


def test_a_comparison_of_failed_runs_is_decided_but_never_negligible():
    a, failed = np.arange(12.0), np.full(12, np.nan)
    assert judged(a, failed).decided.argmax() == 3
    assert not judged(np.where(a == 1, np.nan, a), a + 5).decided[1:].any()
    assert not judged(failed, failed, smallest=1.0).decided.any()


def test_at_most_one_of_twenty_studies_of_nothing_says_something():
    """The table of ``benchmarks/ab_truth.py`` has other distributions."""
    a, b = np.random.default_rng(0).integers(2, size=(2, 2000, 100)).astype(float)
    # 2.1 % with a standard error of 0.3 %: neither wrong nor idle.
    assert 0.01 < judged(a, b).decided.any(-1).mean() < 0.035


def test_a_seed_that_does_not_reach_b_decides_nothing():
    a, once = np.random.default_rng(0).normal(size=(2, 200, 40))
    assert not judged(a, np.repeat(once[:, :1], 40, 1)).decided.any()
