"""How long trials take side by side."""

import logging

import pytest

from steadygrad._checks import InputError
from steadygrad.studies.executors import cuda_devices, dask_workers
from steadygrad.studies.trials import makespan, tails
from tests.unit.studies.test_coordinator import trial


def diamond():
    """0 begins 1 and 2; 3 needs both."""
    return [trial(0, cost=2), trial(1, 0, cost=5), trial(2, 0, cost=3), trial(3, 1, 2, cost=4)]


def test_the_longest_chain_from_each_trial():
    found = tails(diamond())
    assert found == {("point", 0): 11, ("point", 1): 9, ("point", 2): 7, ("point", 3): 4}


@pytest.mark.parametrize(("workers", "expected"), [(1, 14), (2, 11), (9, 11)])
def test_a_diamond(workers, expected):
    assert makespan(diamond(), workers) == expected


def test_independent_trials_share_the_workers():
    """5, 4, 3, 3, 3: the longest first is 5 + 3 beside 4 + 3 + 3."""
    trials = [trial(n, cost=cost) for n, cost in enumerate((3, 3, 4, 5, 3))]
    assert [makespan(trials, workers) for workers in (1, 2, 3, 5)] == [18, 10, 7, 5]


def test_the_long_chain_is_begun_first():
    """A chain of 6 + 6 beside six trials of 2, which come first in the order."""
    trials = [*(trial(n, cost=2) for n in range(6)), trial(6, cost=6), trial(7, 6, cost=6)]
    assert makespan(trials, 2) == 12


def test_a_worker_waits_where_nothing_is_ready():
    """0 (10) alone, then 1, 2, 3 of 4 each on two workers."""
    trials = [trial(0, cost=10), *(trial(n, 0, cost=4) for n in (1, 2, 3))]
    assert makespan(trials, 2) == 18


def test_a_thousand_seeds_are_planned_at_once():
    """Not in minutes: the time of a plan is asked for some hundred times."""
    trials = [trial(0), *(trial(n, 0, cost=1 + n % 7) for n in range(1, 20_000))]
    work = sum(each.cost for each in trials[1:])
    assert makespan(trials, 1) == trials[0].cost + work
    assert makespan(trials, 20_000) == trials[0].cost + 7


def test_trials_without_cost_take_no_time():
    assert makespan([trial(0, cost=0), trial(1, 0, cost=3), trial(2, 1, cost=0)], 2) == 3
    assert makespan([], 2) == 0


def test_a_scheduler_that_is_not_there_is_said_with_the_remedy(monkeypatch):
    distributed = pytest.importorskip("distributed")

    def refuse(*arguments, **options):
        raise OSError("no answer")

    monkeypatch.setattr(distributed, "Client", refuse)
    with pytest.raises(InputError, match=r"answer at 'nowhere:1'.*Remedy: start one with `dask"):
        dask_workers("nowhere:1")


@pytest.mark.parametrize("address", ["nowhere", "tcp://nowhere", "nowhere:", "a b:1"])
def test_an_address_without_a_port_makes_no_client(address, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(distributed, "Client", lambda *args, **options: pytest.fail("made"))
    with pytest.raises(InputError, match=f"should be HOST:PORT. Found '{address}'. Remedy: "):
        dask_workers(address)
    # A scheduler that is lost later is one line, and not a logged traceback as well.
    for name in ("distributed", "distributed.client", "distributed.core"):
        assert not logging.getLogger(name).isEnabledFor(logging.ERROR)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["0", "1"]),
        ("", ["0", "1"]),
        ("4,5", ["4", "5"]),
        ("GPU-8932f937, MIG-1f2c", ["GPU-8932f937", "MIG-1f2c"]),
        ("3,-1,5", ["3"]),
    ],
)
def test_workers_share_the_devices_that_the_launcher_gave(given, expected, monkeypatch):
    """CUDA counts the devices of the list, and those before the first -1 only."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(expected))
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert cuda_devices() == expected
