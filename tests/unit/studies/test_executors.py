"""How long trials take side by side, and the executors that run them."""

import logging
import sys

import pytest

from steadygrad.studies import work
from steadygrad.studies.deadline import Deadline
from steadygrad.studies.executors import cuda_devices, dask_workers, made_workers
from steadygrad.studies.folder import read_run
from steadygrad.studies.run import StudyFailed
from steadygrad.studies.trials import makespan
from tests.unit.studies.framework import FILES, begin, go_on, left, part, timeless
from tests.unit.studies.results import refused
from tests.unit.studies.test_coordinator import trial


def test_what_a_task_prints_in_a_worker_is_no_output(tmp_path, monkeypatch, capsys):
    """A thread's, or an executor's whose processes inherit standard output."""
    (tmp_path / "header.json").touch()
    monkeypatch.setattr(work, "_worker", lambda *arguments: None)
    monkeypatch.setattr(work, "work_on", lambda job, place: print("noise"))
    work.run_job(str(tmp_path), {}, "{}")
    assert capsys.readouterr() == ("", "noise\n")


def test_a_worker_stops_once_the_file_is_there(tmp_path):
    deadline = Deadline(stop=tmp_path / "stop")
    assert deadline.flags == [0.0, 0.0, 0.0]
    (tmp_path / "stop").touch()
    assert deadline.flags == [0.0, 0.0, 1.0]


SIDE_BY_SIDE = {
    # 0 begins 1 and 2; 3 needs both.
    "a diamond": (
        [trial(0, cost=2), trial(1, 0, cost=5), trial(2, 0, cost=3), trial(3, 1, 2, cost=4)],
        {1: 14, 2: 11, 9: 11},
    ),
    # The longest first is 5 + 3 beside 4 + 3 + 3.
    "independent": (
        [trial(n, cost=cost) for n, cost in enumerate((3, 3, 4, 5, 3))],
        {1: 18, 2: 10, 3: 7, 5: 5},
    ),
    # A chain of 6 + 6 beside six trials of 2, which come first in the order.
    "a long chain": (
        [*(trial(n, cost=2) for n in range(6)), trial(6, cost=6), trial(7, 6, cost=6)],
        {2: 12},
    ),
    # 0 alone, then 1, 2, 3 on two workers.
    "nothing ready": ([trial(0, cost=10), *(trial(n, 0, cost=4) for n in (1, 2, 3))], {2: 18}),
    "no cost": ([trial(0, cost=0), trial(1, 0, cost=3), trial(2, 1, cost=0)], {2: 3}),
    "no trials": ([], {2: 0}),
}


@pytest.mark.parametrize("case", SIDE_BY_SIDE)
def test_how_long_trials_take_side_by_side(case):
    trials, expected = SIDE_BY_SIDE[case]
    assert {workers: makespan(trials, workers) for workers in expected} == expected


def test_a_thousand_seeds_are_planned_at_once():
    """Not in minutes: the time of a plan is asked for some hundred times."""
    trials = [trial(0), *(trial(n, 0, cost=1 + n % 7) for n in range(1, 20_000))]
    assert makespan(trials, 1) == sum(each.cost for each in trials)
    assert makespan(trials, 20_000) == trials[0].cost + 7


@pytest.mark.parametrize("address", ["nowhere", "tcp://nowhere", "nowhere:", "a b:1", "nowhere:1"])
def test_a_scheduler_that_is_not_there(address, monkeypatch):
    distributed, asked = pytest.importorskip("distributed"), []

    def refuse(*arguments, **options):
        asked.append(arguments)
        raise OSError("no answer")

    monkeypatch.setattr(distributed, "Client", refuse)
    with refused("--dask", f"'{address}'"):
        dask_workers(address)
    # Without a port there is nobody to ask.
    assert bool(asked) == (address == "nowhere:1")
    # A scheduler that is lost later is one line, and not a logged traceback as well.
    for name in ("distributed", "distributed.client", "distributed.core"):
        assert not logging.getLogger(name).isEnabledFor(logging.ERROR)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["0", "1"]),
        ("", ["0", "1"]),
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


# Executors of the user's own

POOLS = """
from concurrent.futures import Future, ThreadPoolExecutor


class Own:
    \"\"\"It says nothing of its workers.\"\"\"

    def submit(self, function, *arguments):
        future = Future()
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        pass


class Dies(Own):
    def submit(self, function, *arguments):
        raise OSError("no node\\nis left")


def threads():
    return ThreadPoolExecutor(3)


def nothing():
    return None


def raising():
    raise OSError("no cluster")
"""


@pytest.fixture
def pools(tmp_path, monkeypatch):
    """A file with executors, which is a module as well."""
    (tmp_path / "pools_of_mine.py").write_text(POOLS)
    monkeypatch.syspath_prepend(tmp_path)
    yield f"{tmp_path}/pools_of_mine.py"
    sys.modules.pop("pools_of_mine", None)


@pytest.mark.parametrize(
    ("spec", "workers", "count"), [("{file}:threads", 0, 3), ("pools_of_mine:Own", 2, 2)]
)
def test_an_executor_of_ones_own(pools, spec, workers, count):
    made = made_workers(spec.format(file=pools), workers)
    assert made.count() == count
    assert made.submit(abs, -1).result() == 1
    made.close()


def test_a_run_goes_on_with_or_without_an_executor(whole, pools, tmp_path):
    folder = tmp_path / "run"
    begin(folder, at=400)
    part(folder, 2000, executor=f"{pools}:threads")
    part(folder, 4000, workers=2, executor="pools_of_mine:Own")
    assert read_run(folder).header.settings.executor == ""
    _, watcher = go_on(folder)
    assert watcher.lines == []
    assert timeless(folder) == timeless(whole)
    assert left(folder) == FILES


def test_an_executor_that_is_lost_twice_keeps_the_run(pools, tmp_path):
    with refused("OSError: no node", kind=StudyFailed):
        begin(tmp_path / "run", at=None, workers=1, executor=f"{pools}:Dies")
    assert read_run(tmp_path / "run").summary["status"] == "failed"


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("{file}:nothing", "NoneType"),
        ("{file}:raising", "OSError: no cluster"),
        ("{file}:absent", "absent"),
        ("{file}.py:threads", "pools_of_mine.py.py"),
        ("{file}:Own", "--workers"),
        ("pools_of_mine:absent", "absent"),
        ("no.such.module:threads", "no"),
        ("threads", "threads"),
        (":threads", "threads"),
        ("pools_of_mine:", "pools_of_mine"),
        ("json:dumps", "TypeError"),
    ],
)
def test_what_makes_no_executor_is_refused(pools, spec, part):
    with refused(part):
        made_workers(spec.format(file=pools), 0)


def test_two_ways_to_run_trials_are_refused(pools, tmp_path):
    with refused("--dask", "--executor"):
        begin(tmp_path / "run", dask="nowhere:1", executor=f"{pools}:threads")
    assert not (tmp_path / "run").exists()
