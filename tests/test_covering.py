"""Every two values meet, in about as many rows as the two longest axes ask for."""

from itertools import combinations

import pytest

from tests.covering import pairwise


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((14, 7, 3), 98), ((14, 4, 3), 56), ((7, 4, 2, 3), 30), ((2, 3), 6)],
    ids=str,
)
def test_every_two_values_meet(sizes, most):
    rows = pairwise(sizes)
    for (i, first), (j, second) in combinations(enumerate(sizes), 2):
        assert len({(row[i], row[j]) for row in rows}) == first * second
    assert len(rows) == len(set(rows)) <= most
    assert all(0 <= a < size for row in rows for a, size in zip(row, sizes, strict=True))
