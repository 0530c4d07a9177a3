"""What tells that processes differ, among several that this one plays in turn."""

import itertools
import math
import zlib

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.sharding import RankSum, rank_sum


@pytest.fixture
def all_of(monkeypatch):
    """Calls a sum as each of several processes, and returns what each one found."""

    def play(calls):
        monkeypatch.setattr(RankSum, "size", property(lambda _: len(calls)))
        sent = []
        monkeypatch.setattr(rank_sum.dist, "all_reduce", lambda t, group: sent.append(t.clone()))
        for packed, common, alike in calls:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "any", lambda t: torch.tensor(False))
                RankSum()(packed, common, alike)
        total = torch.stack(sent).sum(0)
        monkeypatch.setattr(rank_sum.dist, "all_reduce", lambda t, group: t.copy_(total))
        found = []
        for packed, common, alike in calls:
            ranks = RankSum()
            try:
                found.append((ranks(packed, common, alike).tolist(), bool(ranks.differs)))
            except InputError as error:
                found.append((str(error), bool(ranks.differs)))
        return found

    return play


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def in_line():
    """Three texts of which the mean of the outer ones' marks is the middle one's."""
    marks = {zlib.crc32(str(i).encode()) % rank_sum.SMALL: str(i) for i in range(3000)}
    for low, middle in itertools.combinations(sorted(marks), 2):
        if 2 * middle - low in marks:
            return [marks[m] for m in (low, middle, 2 * middle - low)]
    raise AssertionError


def test_sums_of_processes_that_agree(all_of):
    state = numbers(0.1, 2.0**16, 0.0)
    found = all_of([(numbers(1.0 * r, 2.0), "same", state.clone()) for r in range(3)])
    assert found == [([3.0, 6.0], False)] * 3
    assert all_of([(numbers(1.0), "", numbers())] * 2) == [([2.0], False)] * 2


def test_one_between_two_others_notices_too(all_of):
    """Its own mark is their mean: only the squares tell."""
    for message, differs in all_of([(numbers(1.0), text, numbers(1.0)) for text in in_line()]):
        assert differs
        assert "same options on every process" in message


OTHERS = {
    "a value": (numbers(8.0), numbers(4.0)),
    "a bit": (numbers(0.1), numbers(math.nextafter(0.1, 1.0))),
    "nothing yet": (numbers(*[1.0] * 16), numbers(*[0.0] * 16)),
    "nothing yet of one": (numbers(1.0), numbers(0.0)),
    "places": (numbers(1.0, 2.0), numbers(2.0, 1.0)),
    "a sign": (numbers(3.0), numbers(-3.0)),
    "not a number": (numbers(math.nan), numbers(1.0)),
    "far apart": (numbers(2.0**1000), numbers(2.0)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_numbers_that_differ_are_noticed(all_of, what):
    one, other = OTHERS[what]
    for alike in ((one, other), (one, one, other)):
        for message, differs in all_of([(numbers(1.0), "same", x) for x in alike]):
            assert differs
            assert "same state and loss scale" in message
            assert "Remedy" in message


def test_both_zeros_are_one_number(all_of):
    found = all_of([(numbers(1.0), "", numbers(0.0)), (numbers(1.0), "", numbers(-0.0))])
    assert found == [([2.0], False)] * 2


def test_marks_of_many_states_are_spread_out():
    """A collision hides a difference: of a thousand, some half a pair is expected."""
    marks = [rank_sum._mark(numbers(float(i), 1.0)).item() for i in range(1000)]
    assert len(set(marks)) >= 995
    assert all(0 <= m < rank_sum.SMALL and m == int(m) for m in marks)
