"""One study in this process, on worker processes and on a Dask cluster: one record.

Workers and coordinators are really killed. Starting a process that reads torch in takes seconds.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from steadygrad.studies.folder import read_run
from steadygrad.studies.run import StudyFailed, resume
from tests.unit.studies.framework import (
    FILES,
    Watcher,
    alive,
    begin,
    children,
    copy,
    go_on,
    launched,
    left,
    lines,
    python,
    recorded,
    summary,
    wait_for,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
    # A cluster's library warns of what is its own.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Planned for two workers, and stopped at once."""
    folder = tmp_path_factory.mktemp("base") / "run"
    begin(folder, "paced", workers=2)
    return folder


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """Run in this process."""
    folder = copy(base, tmp_path_factory.mktemp("whole") / "run")
    outcome, _ = go_on(folder, workers=1)
    assert outcome.summary.status == "complete"
    return folder


def test_a_worker_that_is_killed_in_mid_trial(base, whole, tmp_path):
    folder, killed = copy(base, tmp_path / "run"), []

    def kill():
        killed.append(children(os.getpid())[0])
        os.kill(killed[0], signal.SIGKILL)

    watcher = Watcher(2000, kill)
    outcome = resume(folder, {"workers": 2}, monitor=watcher)
    assert outcome.summary.status == "complete"
    assert len(killed) == 1
    assert [line.split(" (")[0] for line in watcher.lines] == ["workers were lost"]
    assert lines(folder) == lines(whole)
    assert summary(folder) == summary(whole)
    assert left(folder) == FILES
    wait_for(lambda: not children(os.getpid()))


def test_a_coordinator_that_is_interrupted_then_killed(base, whole, tmp_path):
    folder = copy(base, tmp_path / "run")
    planned = recorded(folder)
    with launched(folder, workers=2) as process:
        wait_for(lambda: recorded(folder) > planned)
        workers = children(process.pid)
        # Ctrl-C reaches the whole group of processes.
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        wait_for(lambda: not any(map(alive, workers)), 20)
    run = read_run(folder)
    assert run.summary["status"] == "interrupted"
    assert {*lines(folder)} < {*lines(whole)}
    assert not (folder / "stop").exists()
    before = recorded(folder)
    with launched(folder, workers=2) as process:
        wait_for(lambda: recorded(folder) > before)
        workers = children(process.pid)
        assert len(workers) == 2
        process.kill()
        # They look once a second.
        wait_for(lambda: not any(map(alive, workers)), 20)
    outcome, watcher = go_on(folder, workers=1)
    assert outcome.summary.status == "complete"
    assert lines(folder) == lines(whole)
    assert summary(folder) == summary(whole)
    assert watcher.lines == []


def test_workers_that_die_twice_leave_a_partial_summary(base, tmp_path):
    """Each dies of its own trial, as when memory is short."""
    folder = copy(base, tmp_path / "run")
    pids, watcher = set(), Watcher()
    over = threading.Event()

    def kill_all():
        while not over.wait(0.05):
            for pid in children(os.getpid()):
                pids.add(pid)
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_all)
    thread.start()
    try:
        with pytest.raises(StudyFailed, match="fewer --workers"):
            resume(folder, {"workers": 2}, monitor=watcher)
    finally:
        over.set()
        thread.join()
    assert len(pids) >= 2
    assert len(watcher.lines) == 1
    assert read_run(folder).summary["status"] == "failed"


@pytest.fixture
def scheduler(tmp_path):
    pytest.importorskip("distributed")
    file = tmp_path / "scheduler.json"
    arguments = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show"]
    script = "distributed.cli.dask_scheduler"
    with python("-m", script, *arguments, "--scheduler-file", str(file)) as process:
        wait_for(lambda: file.exists() and file.read_text().endswith("}"))
        yield process, json.loads(file.read_text())["address"]


def dask_worker(address, name):
    arguments = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--name", name]
    return python("-m", "distributed.cli.dask_worker", address, *arguments)


def workers_of(address):
    from distributed import Client

    with Client(address, set_as_default=False) as client:
        return len(client.scheduler_info()["workers"])


def test_a_dask_cluster_that_loses_a_worker_and_then_its_scheduler(
    base, whole, tmp_path, scheduler
):
    process, address = scheduler
    folder = copy(base, tmp_path / "run")
    with dask_worker(address, "one") as one, dask_worker(address, "two"):
        wait_for(lambda: workers_of(address) == 2)
        watcher = Watcher(1500, one.kill)
        given = {"dask": address.removeprefix("tcp://")}
        outcome = resume(folder, given, monitor=watcher)
        assert outcome.summary.status == "complete"
        assert one.wait() == -signal.SIGKILL
        assert lines(folder) == lines(whole)
        assert summary(folder) == summary(whole)
        assert left(folder) == FILES

        cut = copy(base, tmp_path / "cut")
        watcher = Watcher(1500, process.kill)
        with pytest.raises(StudyFailed, match=r"--dask should be.*--resume") as failed:
            resume(cut, given, monitor=watcher)
    assert failed.value.outcome.folder == Path(cut)
    kept = lines(cut)
    assert 1 <= len(kept) < 25
    assert {*kept} < {*lines(whole)}
    assert read_run(cut).summary["status"] == "failed"
    go_on(cut, workers=1)
    assert lines(cut) == lines(whole)
    assert summary(cut) == summary(whole)
