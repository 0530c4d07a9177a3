"""One study in this process, on worker processes and on a Dask cluster: one record.

Programs, workers and schedulers are really killed, at random moments too.
``STEADYGRAD_KILLS=20 pytest -m slow tests/unit/studies/test_processes.py`` kills each study 20
times. Starting a process that reads torch in takes seconds.
"""

import json
import os
import random
import re
import signal
import sys
import time
from contextlib import suppress

import pytest

from steadygrad.studies.folder import read_run
from steadygrad.studies.run import StudyFailed, resume
from tests.unit.cli.quick import STUDIES, program, run_program
from tests.unit.studies.framework import (
    FILES,
    Watcher,
    begin,
    children,
    copy,
    go_on,
    left,
    lines,
    python,
    recorded,
    summary,
    timeless,
    tiny,
    wait_for,
)
from tests.unit.studies.results import refused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
    # A cluster's library warns of what is its own.
    pytest.mark.filterwarnings("default"),
]
KILLS = int(os.environ.get("STEADYGRAD_KILLS", "2"))


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


# A cluster


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
        with refused("--dask", "--resume", kind=StudyFailed) as failed:
            resume(cut, given, monitor=watcher)
    assert failed.value.outcome.folder == cut
    kept = lines(cut)
    assert 1 <= len(kept) < 25
    assert {*kept} < {*lines(whole)}
    assert read_run(cut).summary["status"] == "failed"
    go_on(cut, workers=1)
    assert lines(cut) == lines(whole)
    assert summary(cut) == summary(whole)


# The program, at random moments


def group_is_gone(number):
    with suppress(ProcessLookupError):
        os.killpg(number, 0)
        return False
    return True


def ended(folder, moment, number, *arguments, alone=False):
    """Starts the program, and signals it at so many results or seconds, whichever are first there.

    Returns the process, which has ended; its workers may not have.
    """
    results, seconds, more = moment
    process = program(*arguments, module="steadygrad", start_new_session=True)
    end = time.monotonic() + seconds
    while recorded(folder) < results and time.monotonic() < end and process.poll() is None:
        time.sleep(0.002)
    time.sleep(more)
    with suppress(ProcessLookupError):
        process.send_signal(number) if alone else os.killpg(process.pid, number)
    _, err = process.communicate()
    assert "Traceback" not in err
    return process


def finish(name, folder, workers):
    # On a busy machine the recorded budget may be over before.
    arguments = ["--resume", str(folder), "--workers", str(workers), "--budget", "1h"]
    code, _, err = run_program(name, *arguments, module="steadygrad")
    assert code == 0, err
    # No result was unreadable, nor came again with other numbers.
    assert not re.search("cannot be read|differ", err), err


@pytest.fixture(scope="module", params=STUDIES)
def study(request, tmp_path_factory):
    """A study's name, a run of it that was stopped early on, and the same run at its end."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    fixed = ["--device", "cpu", "--threads", "1", "--workers", "2", "--out", str(folder)]
    arguments = [request.param, tiny(), *STUDIES[request.param], *fixed]
    if request.param == "advise":
        # Ctrl-C reaches the whole group of processes.
        process = ended(folder, (1, 100.0, 0.0), signal.SIGINT, *arguments)
        assert process.returncode == 130
        wait_for(lambda: group_is_gone(process.pid), 20)
        assert read_run(folder).summary["status"] == "interrupted"
        assert not (folder / "stop").exists()
    else:
        ended(folder, (1, 100.0, 0.0), signal.SIGKILL, *arguments)
    whole = copy(folder, folder.with_name("whole"))
    finish(request.param, whole, 1)
    return request.param, folder, whole


def contents(folder):
    """The bytes of all that a complete run consists of, but for the times of its results."""
    files = (path for path in folder.iterdir() if path.is_file())
    return timeless(folder) | {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_moments_and_resumed_to_the_same_bytes(study, workers, tmp_path):
    """Each time the whole group of processes, or the coordinator without its workers."""
    name, stopped, complete = study
    folder, groups = copy(stopped, tmp_path / "run"), []
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for to_come in range(KILLS, 0, -1):
        now = recorded(folder)
        most = max(1, 2 * (recorded(complete) - now) // to_come)
        # Half of them perhaps while it starts; then in mid-trial.
        seconds = moments.choice([100.0, 6.0 * moments.random()])
        moment = now + moments.randint(1, most), seconds, 0.1 * moments.random()
        arguments = [name, "--resume", str(folder), "--workers", str(workers)]
        alone = moments.random() < 0.5
        process = ended(folder, moment, signal.SIGKILL, *arguments, alone=alone)
        assert process.returncode in (-signal.SIGKILL, 0)
        groups.append(process.pid)
        print(f"{moment}: {now} to {recorded(folder)} of {recorded(complete)} results")
    finish(name, folder, workers)
    assert contents(folder) == contents(complete)
    assert not (folder / "checkpoints").exists()
    for group in groups:
        wait_for(lambda group=group: group_is_gone(group), 20)
