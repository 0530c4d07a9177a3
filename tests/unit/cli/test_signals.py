"""The program, killed and interrupted."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from steadygrad.record import read_run, strip_times
from tests.unit.studies.helpers import tiny

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(*arguments):
    command = [sys.executable, "-m", "steadygrad", "advise", "--device", "cpu", *arguments]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def lines(folder):
    path = folder / "record.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(process, folder, count):
    """Waits until a record is so long, or the program has ended."""
    while process.poll() is None and lines(folder) < count:
        time.sleep(0.002)


def undisturbed(tmp_path, *arguments):
    process = start(*arguments, "--out", str(tmp_path / "whole"))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return tmp_path / "whole"


def contents(folder):
    events = [strip_times(event) for event in read_run(folder).events]
    return [event for event in events if event["event"] != "end"]


@pytest.mark.slow
def test_killed_three_times_and_resumed_to_the_same_summary(tmp_path):
    """SIGKILL at random moments: nothing can be tidied up, and nothing is lost."""
    arguments = [tiny(), "--budget", "2m"]
    whole = undisturbed(tmp_path, *arguments)
    total, folder = lines(whole), tmp_path / "killed"
    moments = random.Random(20).sample(range(2, total - 2), 3)
    for number, moment in enumerate(sorted(moments)):
        where = ["--resume", str(folder)] if number else [*arguments, "--out", str(folder)]
        process = start(*where)
        wait_for_lines(process, folder, moment)
        process.kill()
        _, err = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, err
    assert lines(folder) < total
    process = start("--resume", str(folder))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert (folder / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()
    assert json.dumps(contents(folder)) == json.dumps(contents(whole))
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"]
)
def test_a_signal_leaves_a_partial_report(tmp_path, number, code):
    folder = tmp_path / "run"
    process = start(tiny("slow"), "--budget", "1h", "--out", str(folder))
    wait_for_lines(process, folder, 1)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "No batch size can be recommended yet: the study was interrupted" in " ".join(
        out.split()
    )
    run = read_run(folder)
    assert run.summary["status"] == "interrupted"
    assert run.select("end") == [{"event": "end", "status": "interrupted"}]
    assert (folder / "report.html").stat().st_size > 1000
