"""Records survive a kill at any byte, and go on where they ended."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steadygrad.studies.advise.schema import Branch
from steadygrad.studies.folder import RunError, RunWriter, read_run
from steadygrad.studies.schema import End
from tests.unit.record.helpers import assert_one_line, make_branch, make_header, no_space, write


class TestResume:
    def test_goes_on_after_the_last_whole_line(self, tmp_path: Path):
        data = write(tmp_path, 3.0, 2.0)
        (tmp_path / "record.jsonl").write_bytes(data[:-5])
        with RunWriter.resume(tmp_path) as writer:
            writer.append(make_branch(2.0, repeat=1))
        assert (tmp_path / "record.jsonl").read_bytes() == data

    def test_failed_append_leaves_whole_lines_and_can_be_repeated(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        with RunWriter.create(tmp_path, make_header()) as writer:
            writer.append(make_branch(2.0))
            with monkeypatch.context() as full:
                full.setattr(os, "fsync", no_space)
                with pytest.raises(RunError) as error:
                    writer.append(make_branch(1.5))
            assert_one_line(error, "No space left", "Remedy: free space there, then --resume.")
            assert len(read_run(tmp_path).events) == 1
            writer.append(make_branch(1.0))
        run = read_run(tmp_path)
        assert [event.loss for event in run.select(Branch)] == [2.0, 1.0]
        assert not run.truncated


# Raw files may write a part of what they are given; this one does, slowly, so that a kill falls
# into the middle of a line.
CHILD = """
import sys, time
from pathlib import Path
from steadygrad.studies.folder import RunWriter
from tests.unit.record.helpers import make_branch, make_header

class Slow:
    def __init__(self, file):
        self.file = file
    def write(self, data):
        time.sleep(0.0005)
        return self.file.write(data[:2000])
    def __getattr__(self, name):
        return getattr(self.file, name)

writer = RunWriter.create(Path(sys.argv[1]), make_header())
writer._file = Slow(writer._file)
for number in range(10_000):
    writer.append(make_branch(repeat=number, time={"filler": "x" * 100_000}))
    print(number, flush=True)
"""


def kill_a_writer(folder: Path, delay: float) -> int:
    """Kills a process that writes big lines; returns how many it had reported as written."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert child.stdout is not None
    reported = [int(child.stdout.readline())]
    time.sleep(delay)
    child.send_signal(signal.SIGKILL)
    reported += [int(line) for line in child.stdout.read().split()]
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    return len(reported)


def test_kill_in_the_middle_of_a_line_loses_only_that_line(tmp_path: Path):
    moments = random.Random(0)
    broken = 0
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        reported = kill_a_writer(folder, moments.uniform(0.0, 0.15))
        run = read_run(folder)
        assert len(run.events) - reported in (0, 1)  # written whole, but not yet reported
        assert [event.repeat for event in run.select(Branch)] == list(range(len(run.events)))
        assert all(event.time["filler"] == "x" * 100_000 for event in run.events)
        broken += run.truncated
        with RunWriter.resume(folder) as writer:
            writer.append(End(status="complete"))
        again = read_run(folder)
        assert [*run.events, End(status="complete")] == again.events
        assert not again.truncated
    assert broken > 0, "no kill fell into a line: the test has lost its point"


def test_a_run_in_progress_is_left_alone(tmp_path):
    with RunWriter.create(tmp_path / "run", make_header()) as writer:
        writer.append(make_branch(2.0))
        before = (tmp_path / "run" / "record.jsonl").read_bytes()
        with pytest.raises(RunError, match=r"in progress in another process. Remedy: wait"):
            RunWriter.resume(tmp_path / "run")
        assert (tmp_path / "run" / "record.jsonl").read_bytes() == before
    with RunWriter.resume(tmp_path / "run") as again:
        again.append(make_branch(1.0))
    assert [event.loss for event in read_run(tmp_path / "run").select(Branch)] == [2.0, 1.0]
