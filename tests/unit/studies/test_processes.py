"""One study in this process, on worker processes and on a Dask cluster: one record.

Programs, workers and schedulers are really killed, at random moments too.
``STEADYGRAD_KILLS=20 pytest -m slow tests/unit/studies/test_processes.py`` kills each study 20
times. Starting a process that reads torch in takes seconds.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest

from steadygrad.studies.distributed import Deadline
from steadygrad.studies.folder import read_run
from steadygrad.studies.run import resume
from tests.refusals import refused
from tests.unit.cli.quick import STUDIES, program, run_program
from tests.unit.studies.framework import (
    FILES,
    ROOT,
    Watcher,
    begin,
    checked,
    copy,
    environment,
    go_on,
    left,
    lines,
    recorded,
    summary,
    timeless,
    tiny,
    wait_for,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="kills groups of processes"),
    # A cluster's library warns of what is its own.
    pytest.mark.filterwarnings("default"),
]
KILLS = int(os.environ.get("STEADYGRAD_KILLS", "2"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Planned for two workers, and stopped at once; its numbers are those of ``whole``."""
    folder = tmp_path_factory.mktemp("base") / "run"
    begin(folder, "paced", workers=2)
    return folder


# A cluster


@contextmanager
def dask(script, *arguments):
    pytest.importorskip("distributed", reason="of the extra dask")
    command = [sys.executable, "-m", f"distributed.cli.dask_{script}", "--no-dashboard", *arguments]
    process = subprocess.Popen(command, env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def workers_of(address):
    from distributed import Client

    with Client(address, set_as_default=False) as client:
        return len(client.scheduler_info()["workers"])


def test_a_dask_cluster_that_loses_a_worker_and_then_its_scheduler(base, whole, tmp_path):
    file, options = tmp_path / "scheduler.json", ["--nthreads", "1", "--no-nanny"]
    listen = ["--host", "127.0.0.1", "--port", "0", "--no-show", "--scheduler-file", str(file)]
    with dask("scheduler", *listen) as process:
        wait_for(lambda: file.exists() and file.read_text().endswith("}"))
        address = json.loads(file.read_text())["address"]
        given = {"dask": address.removeprefix("tcp://")}
        with dask("worker", address, *options) as one, dask("worker", address, *options):
            wait_for(lambda: workers_of(address) == 2)
            folder = copy(base, tmp_path / "run")
            outcome = resume(folder, given, deadline=Deadline(), monitor=Watcher(1500, one.kill))
            assert outcome.summary.status == "complete"
            assert one.wait() == -signal.SIGKILL
            assert lines(folder) == lines(whole)
            assert summary(folder) == summary(whole)
            assert left(folder) == FILES

            cut = copy(base, tmp_path / "cut")
            with refused("--dask", "--resume"):
                checked(
                    resume(cut, given, deadline=Deadline(), monitor=Watcher(1500, process.kill))
                )
    kept = lines(cut)
    assert 1 <= len(kept) < len(lines(whole))
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


def ended(folder, results, seconds, number, *arguments, alone=False):
    """The exit code of the program, signalled at so many results or seconds, whichever are first.

    Soon after its group of processes is gone as well.
    """
    process = program(*arguments, module="steadygrad", start_new_session=True)
    end = time.monotonic() + seconds
    while recorded(folder) < results and time.monotonic() < end and process.poll() is None:
        time.sleep(0.002)
    with suppress(ProcessLookupError):
        process.send_signal(number) if alone else os.killpg(process.pid, number)
    _, err = process.communicate()
    assert "Traceback" not in err
    wait_for(lambda: group_is_gone(process.pid), 20)
    return process.returncode


def finish(name, folder, workers):
    """The bytes of the run at its end, but for the times of its results."""
    # On a busy machine the recorded budget may be over before.
    arguments = ["--resume", str(folder), "--workers", str(workers), "--budget", "1h"]
    code, _, err = run_program(name, *arguments, module="steadygrad")
    assert code == 0, err
    # No result was unreadable, nor came again with other numbers.
    assert "cannot be read" not in err
    assert "differ" not in err
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    if name == "compare":
        # Its times are the seconds of the trainings that were run; all else is the same.
        assert files.pop("report.html").rstrip().endswith(b"</html>")
        rows = read_run(folder).summary["findings"]
        files["summary.json"] = [{**row, "time_ratio": None} for row in rows]
    return timeless(folder) | files


@pytest.mark.parametrize("name", STUDIES)
def test_killed_at_random_moments_and_resumed_to_the_same_bytes(name, tmp_path):
    """Each time the whole group of processes, or the coordinator without its workers."""
    folder, seed = tmp_path / "run", random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    fixed = ["--device", "cpu", "--threads", "1", "--workers", "2", "--out", str(folder)]
    begun = [name, tiny(), *STUDIES[name], *fixed]
    if name == "advise":
        # Ctrl-C reaches the whole group of processes.
        assert ended(folder, 1, 100.0, signal.SIGINT, *begun) == 130
        assert read_run(folder).summary["status"] == "interrupted"
        assert not (folder / "stop").exists()
    else:
        ended(folder, 1, 100.0, signal.SIGKILL, *begun)
    complete = finish(name, copy(folder, tmp_path / "whole"), 1)
    for _ in range(KILLS):
        # Half of them perhaps while it starts.
        results = recorded(folder) + moments.randint(1, 5)
        seconds, alone = moments.choice([100.0, 6.0 * moments.random()]), moments.random() < 0.5
        again = [name, "--resume", str(folder), "--workers", "2"]
        code = ended(folder, results, seconds, signal.SIGKILL, *again, alone=alone)
        assert code in (-signal.SIGKILL, 0)
        print(f"{results} or {seconds}: {recorded(folder)} results")
    assert finish(name, folder, 2) == complete
