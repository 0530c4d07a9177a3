"""Sums over processes, and what tells that they differ; this one plays several in turn."""

import math

import pytest
import torch

from steadygrad import distributed
from steadygrad._checks import InputError
from steadygrad.distributed import RankSum, World, process_world


@pytest.fixture
def all_of(monkeypatch):
    """Calls a sum as each of several processes, and returns what each one finds."""

    def play(calls):
        sent, found = [], []

        def collect(rows, row, group):
            sent.append(row)
            for own, other in zip(rows, sent, strict=False):
                own.copy_(other)

        monkeypatch.setattr(distributed, "process_world", lambda _: World(size=len(calls)))
        monkeypatch.setattr(distributed.dist, "all_gather", collect)
        for packed, agreed in [*calls, *calls]:
            found.append(RankSum()(packed, agreed))
        # Only in the second round all have sent theirs.
        return [(total.tolist(), differs.tolist()) for total, differs in found[len(calls) :]]

    return play


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_sums_of_processes_that_agree(all_of):
    found = all_of([(numbers(1.0 * r, 2.0), numbers(0.1, 2.0**16, 0.0)) for r in range(3)])
    assert found == [([3.0, 6.0], [False] * 3)] * 3
    assert all_of([(numbers(1.0), numbers())] * 2) == [([2.0], [])] * 2


def test_alone_the_sum_is_the_number_itself():
    total, differs = RankSum(None)(numbers(3.0), numbers(1.0, math.nan))
    assert (total.tolist(), differs.tolist()) == ([3.0], [False, False])


@pytest.mark.parametrize(
    "values",
    [
        (8.0, 4.0),
        (8.0, 8.0, 4.0),
        # One between two others notices, too.
        (1.0, 2.0, 3.0),
        (0.1, math.nextafter(0.1, 1.0)),
        (3.0, -3.0),
        (math.nan, 1.0),
        (2.0**1000, 2.0),
    ],
    ids=str,
)
def test_numbers_that_differ_are_noticed_by_all_at_their_place(all_of, values):
    found = all_of([(numbers(1.0), numbers(5.0, value, 7.0)) for value in values])
    assert found == [([1.0 * len(values)], [False, True, False])] * len(values)


@pytest.mark.parametrize("pair", [(0.0, -0.0), (math.nan, math.nan), (math.inf, math.inf)])
def test_what_counts_as_one_number(all_of, pair):
    found = all_of([(numbers(1.0), numbers(value)) for value in pair])
    assert found == [([2.0], [False])] * 2


def test_a_group_that_is_none_is_refused():
    for wrong in ("half", 3):
        with pytest.raises(InputError, match="process_group"):
            process_world(wrong)
        with pytest.raises(InputError, match="process_group"):
            RankSum(wrong)
    assert process_world("all") == process_world(None) == World()
