"""A study that was stopped or killed, against one that was not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from steadygrad._checks import InputError
from steadygrad.record import dumps
from steadygrad.studies.inspect import Stop, resume
from tests.unit.studies.helpers import Watcher, study, timeless, tiny
from tests.unit.studies.inspect.runs import look, spec


def without_ends(folder):
    header, events = timeless(folder)
    return header, [event for event in events if '"end"' not in event]


@pytest.mark.parametrize("share", [0.03, 0.45, 0.6, 0.8])
def test_stopped_and_resumed_to_the_same_numbers(whole, tmp_path, share):
    stop, (complete, monitor) = Stop(), whole
    at = int(share * monitor.total)
    watcher = Watcher(at=at, call=lambda: stop.limit(-1e9))
    first = look(tmp_path / "run", spec("healthy"), monitor=watcher, stop=stop)
    assert first.summary["status"] == "budget"
    second = resume(tmp_path / "run", monitor=Watcher())
    assert dumps(second.summary) == dumps(complete.summary)
    assert without_ends(tmp_path / "run") == without_ends(complete.folder)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_lost_checkpoint_is_trained_again(whole, tmp_path):
    stop, (complete, monitor) = Stop(), whole
    watcher = Watcher(at=int(0.6 * monitor.total), call=lambda: stop.limit(-1e9))
    look(tmp_path / "run", spec("healthy"), monitor=watcher, stop=stop)
    (path,) = (tmp_path / "run" / "checkpoints").glob("*.safetensors")
    path.unlink()
    watcher = Watcher()
    assert dumps(resume(tmp_path / "run", monitor=watcher).summary) == dumps(complete.summary)
    assert watcher.lines == []
    assert without_ends(tmp_path / "run") == without_ends(complete.folder)


def test_killed_and_resumed_to_the_same_numbers(tmp_path):
    """SIGKILL from outside, in the middle of training; the whole run is made by the same hands."""
    command = [sys.executable, "-m", "steadygrad", "inspect"]
    task = [tiny("slow"), "--steps", "16", "--budget", "10m", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "run"
    with subprocess.Popen(
        [*command, *task, "--out", str(folder)], env=environment, stderr=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: lines(folder) >= 4)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert lines(folder) < 1 + 24
    assert not (folder / "summary.json").exists()
    resume(folder, monitor=Watcher())
    look(tmp_path / "whole", tiny("slow"), steps=16)
    assert without_ends(folder) == without_ends(tmp_path / "whole")


def lines(folder):
    record = folder / "record.jsonl"
    return record.read_text().count("\n") if record.exists() else 0


def wait_for(ready, seconds=60):
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_record_of_another_study_is_refused(tmp_path):
    study(tmp_path / "run", stop=halted(), monitor=Watcher())
    with pytest.raises(InputError, match=r"record of `steadygrad inspect`. Found 'advise'"):
        resume(tmp_path / "run", monitor=Watcher())


def halted():
    """Ends as soon as there is a record."""
    stop = Stop()
    limit = stop.limit
    stop.limit = lambda seconds: limit(-1e9)
    return stop
