"""Paired differences, looked at again and again."""

import math

import numpy as np
import pytest

from steadygrad.studies.sequential import LEVEL, LOOKS, NOTHING, Prior, interval, looked, next_look


def test_looks():
    assert [looked(n) for n in (0, 2, 3, 5, 6, 63, 1000)] == [0, 0, 3, 4, 6, 48, 64]
    assert [next_look(n) for n in (0, 2, 3, 5, 63, 64)] == [3, 3, 4, 6, 64, 0]
    assert [next_look(n, 12) for n in (7, 8, 11, 12)] == [8, 12, 12, 0]


def test_an_interval_is_students():
    # Of 4 pairs, at 0.9922: Student's quantile with 3 degrees of freedom, from tables 5.841 at 0.99
    # and 7.453 at 0.995.
    assert 5.841 < NOTHING.limit(4) < 7.453
    rows = np.array([[1.0, 2.0, 3.0, 6.0], [0.0, 0.0, 0.0, 0.0]])
    mean, low, high = interval(rows)
    half = NOTHING.limit(4) * math.sqrt(14 / 3 / 4)
    assert mean.tolist() == [3, 0]
    assert low.tolist() == pytest.approx([3 - half, 0])
    assert high.tolist() == pytest.approx([3 + half, 0])


@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1.0), (50.0, 0.01)])
def test_all_ten_intervals_hold_together_in_19_of_20_studies(mean, scale):
    count = 20_000
    pairs = np.random.default_rng(0).normal(mean, scale, (count, LOOKS[-1]))
    left, last = np.zeros(count, bool), 0.0
    for look in LOOKS:
        _, low, high = interval(pairs[:, :look])
        outside = (low > mean) | (high < mean)
        # A single look leaves it as often as its level says.
        assert outside.mean() == pytest.approx(LEVEL, abs=3 * math.sqrt(LEVEL / count))
        left |= outside
        assert left.mean() > last
        last = left.mean()
    error = math.sqrt(0.05 * 0.95 / count)
    assert 0.05 - 3 * error <= left.mean() <= 0.05 + 3 * error


def test_a_known_variance_takes_part_by_its_degrees_of_freedom():
    rows, known = np.array([[-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), Prior(4.0, 4.0)
    assert known.spread(rows).tolist() == pytest.approx([math.sqrt(3), math.sqrt(16 / 6)])
    # Student's with 2 + 4 degrees of freedom.
    assert known.limit(3) == NOTHING.limit(7) < NOTHING.limit(3)
    assert interval(rows, known)[2] == pytest.approx(known.limit(3) * known.spread(rows) / 3**0.5)
    # Where it is a variance of other normal differences, an interval keeps its level.
    draw, count = np.random.default_rng(1), 20_000
    missed = 0
    for others in draw.normal(size=(count, 8)):
        _, low, high = interval(others[:3], Prior(float(others[3:].var(ddof=1)), 4.0))
        missed += not low <= 0 <= high
    assert missed / count == pytest.approx(LEVEL, abs=3 * math.sqrt(LEVEL / count))
