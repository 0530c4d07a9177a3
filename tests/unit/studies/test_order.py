"""Data orders."""

import subprocess
import sys

import pytest
import torch

from steadygrad.studies.order import Order, branch_order, main_order, seed_for


def test_seeds_are_the_same_everywhere():
    """Not Python's own hash, which differs from process to process."""
    assert seed_for(0, "branch", 1, 2) == 9194378708319914590
    code = "from steadygrad.studies.order import seed_for; print(seed_for(3, 'a'))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == seed_for(3, "a")


def test_seeds_of_different_units_differ():
    names = [(s, kind, i) for s in range(3) for kind in ("a", "b") for i in range(3)]
    assert len({seed_for(*name) for name in names}) == len(names)
    assert seed_for(1, 23) != seed_for(12, 3)


def test_every_epoch_holds_every_sample_once():
    order = main_order(10, 0)
    first, second = order.take(0, 10), order.take(10, 10)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_a_batch_size_does_not_change_the_order(size):
    order = Order(10, 0, "x", head=torch.tensor([4, 2, 9]))
    parts = [order.take(start, min(size, 40 - start)) for start in range(0, 40, size)]
    assert torch.equal(torch.cat(parts), Order(10, 0, "x", torch.tensor([4, 2, 9])).take(0, 40))


def test_a_branch_starts_with_what_the_trajectory_has_not_seen():
    seen = main_order(100, 5).take(0, 130)[100:]  # 30 into the second epoch
    branch = branch_order(100, 5, seen=130, stream="branch-0")
    unseen = branch.take(0, 70)
    assert set(unseen.tolist()) == set(range(100)) - set(seen.tolist())
    assert sorted(branch.take(70, 100).tolist()) == list(range(100))


def test_branches_have_their_own_orders():
    takes = [branch_order(100, 0, seen=20, stream=name).take(0, 80).tolist() for name in "aab"]
    assert takes[0] == takes[1] != takes[2]
    assert sorted(takes[0]) == sorted(takes[2])
