"""Covering designs: every two values of two axes meet, in far fewer tests than the full product.

A wrong step that one value brings about, or two together, is seen as surely as with the product.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of one index for each axis, in which any two indices of two axes occur together."""
    pairs = combinations(range(len(sizes)), 2)
    open_pairs = dict.fromkeys(
        ((i, a), (j, b)) for i, j in pairs for a, b in product(range(sizes[i]), range(sizes[j]))
    )
    rows = []
    while open_pairs:
        row = dict(next(iter(open_pairs)))
        for axis in (a for a in range(len(sizes)) if a not in row):

            def gain(value: int, axis: int = axis, row: dict[int, int] = row) -> int:
                met = (tuple(sorted((item, (axis, value)))) for item in row.items())
                return sum(pair in open_pairs for pair in met)

            # The start moves on, so that axes do not keep step where there is nothing to gain.
            values = [(value + len(rows)) % sizes[axis] for value in range(sizes[axis])]
            row[axis] = max(values, key=gain)
        for pair in combinations(sorted(row.items()), 2):
            open_pairs.pop(pair, None)
        rows.append(tuple(row[axis] for axis in range(len(sizes))))
    return rows


def covering(**axes: Mapping[str, Any] | Sequence[Any]) -> pytest.MarkDecorator:
    """``parametrize`` over the pairs of axes; an axis is its values, or a table of them by name."""
    named = [
        [*axis.items()] if isinstance(axis, Mapping) else [(str(value), value) for value in axis]
        for axis in axes.values()
    ]
    chosen = [
        [axis[i] for axis, i in zip(named, row, strict=True)]
        for row in sorted(pairwise([len(axis) for axis in named]))
    ]
    params = [
        pytest.param(*(value for _, value in row), id="-".join(name for name, _ in row))
        for row in chosen
    ]
    return pytest.mark.parametrize(tuple(axes), params)
