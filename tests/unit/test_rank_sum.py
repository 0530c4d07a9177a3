"""Sums over processes, and what tells that they differ; this one plays several in turn."""

import math

import pytest
import torch

from steadygrad.sharding import RankSum, rank_sum


@pytest.fixture
def all_of(monkeypatch):
    """Calls a sum as each of several processes, and returns what each one finds."""

    def play(calls):
        monkeypatch.setattr(RankSum, "size", property(lambda _: len(calls)))
        sent = []

        def collect(rows, row, group):
            sent.append(row)
            for r in rows:
                r.zero_()

        monkeypatch.setattr(rank_sum.dist, "all_gather", collect)
        for packed, agreed in calls:
            RankSum()(packed, agreed)

        def hand_out(rows, row, group):
            for r, s in zip(rows, sent, strict=True):
                r.copy_(s)

        monkeypatch.setattr(rank_sum.dist, "all_gather", hand_out)
        results = [RankSum()(packed, agreed) for packed, agreed in calls]
        return [(total.tolist(), differs.tolist()) for total, differs in results]

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


OTHERS = {
    "a value": (8.0, 4.0),
    "a bit": (0.1, math.nextafter(0.1, 1.0)),
    "nothing yet": (1.0, 0.0),
    "a sign": (3.0, -3.0),
    "not a number": (math.nan, 1.0),
    "far apart": (2.0**1000, 2.0),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("processes", [2, 3])
def test_numbers_that_differ_are_noticed_by_all_at_their_place(all_of, what, processes):
    one, other = OTHERS[what]
    values = [one, other, one][:processes]
    found = all_of([(numbers(1.0), numbers(5.0, value, 7.0)) for value in values])
    assert found == [([1.0 * processes], [False, True, False])] * processes


def test_one_between_two_others_notices_too(all_of):
    found = all_of([(numbers(1.0), numbers(value)) for value in (1.0, 2.0, 3.0)])
    assert found == [([3.0], [True])] * 3


def test_numbers_that_have_changed_places_differ(all_of):
    found = all_of([(numbers(0.0), numbers(1.0, 2.0)), (numbers(0.0), numbers(2.0, 1.0))])
    assert found == [([0.0], [True, True])] * 2


@pytest.mark.parametrize("pair", [(0.0, -0.0), (math.nan, math.nan), (math.inf, math.inf)])
def test_what_counts_as_one_number(all_of, pair):
    found = all_of([(numbers(1.0), numbers(value)) for value in pair])
    assert found == [([2.0], [False])] * 2
