"""Records survive a kill at any byte, and go on where they ended."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steadygrad.record import RecordError, RunWriter, read_run
from tests.unit.record.helpers import HEADER, assert_one_line, no_space, write


class TestResume:
    def test_goes_on_after_the_last_whole_line(self, tmp_path: Path):
        data = write(tmp_path, 3.0, 2.0)
        (tmp_path / "record.jsonl").write_bytes(data[:-5])
        with RunWriter.resume(tmp_path) as writer:
            writer.append("train", steps=1, loss=2.0)
        assert (tmp_path / "record.jsonl").read_bytes() == data

    def test_failed_append_leaves_whole_lines_and_can_be_repeated(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        with RunWriter.create(tmp_path, HEADER) as writer:
            writer.append("train", loss=2.0)
            with monkeypatch.context() as full:
                full.setattr(os, "fsync", no_space)
                with pytest.raises(RecordError) as error:
                    writer.append("train", loss=1.5)
            assert_one_line(error, "No space left", "Remedy")
            assert len(read_run(tmp_path).events) == 1
            writer.append("train", loss=1.0)
        run = read_run(tmp_path)
        assert [entry["loss"] for entry in run.events] == [2.0, 1.0]
        assert not run.truncated


# Raw files may write a part of what they are given; this one does, slowly, so that a kill falls
# into the middle of a line.
CHILD = """
import sys, time
from pathlib import Path
from steadygrad.record import RunWriter

class Slow:
    def __init__(self, file):
        self.file = file
    def write(self, data):
        time.sleep(0.0005)
        return self.file.write(data[:2000])
    def __getattr__(self, name):
        return getattr(self.file, name)

writer = RunWriter.create(Path(sys.argv[1]), {"study": "advise"})
writer._file = Slow(writer._file)
for number in range(10_000):
    writer.append("train", number=number, filler="x" * 100_000)
    print(number, flush=True)
"""


def kill_a_writer(folder: Path, delay: float) -> int:
    """Kills a process that writes big lines; returns how many it had reported as written."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True
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
        assert [entry["number"] for entry in run.events] == list(range(len(run.events)))
        assert all(entry["filler"] == "x" * 100_000 for entry in run.events)
        broken += run.truncated
        with RunWriter.resume(folder) as writer:
            writer.append("end", status="complete")
        again = read_run(folder)
        assert [*run.events, {"event": "end", "status": "complete"}] == again.events
        assert not again.truncated
    assert broken > 0, "no kill fell into a line: the test has lost its point"


def test_a_run_in_progress_is_left_alone(tmp_path):
    with RunWriter.create(tmp_path / "run", {"study": "x"}) as writer:
        writer.append("one")
        before = (tmp_path / "run" / "record.jsonl").read_bytes()
        with pytest.raises(RecordError, match=r"in progress in another process. Remedy: wait"):
            RunWriter.resume(tmp_path / "run")
        assert (tmp_path / "run" / "record.jsonl").read_bytes() == before
    with RunWriter.resume(tmp_path / "run") as again:
        again.append("two")
    assert [e["event"] for e in read_run(tmp_path / "run").events] == ["one", "two"]
