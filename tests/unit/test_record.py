"""Records survive a kill at any byte, and say in one line what is wrong with them."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steadygrad import record
from steadygrad._checks import InputError
from steadygrad.record import (
    SCHEMA,
    RecordError,
    RunWriter,
    check_run,
    dumps,
    environment,
    loads,
    plural,
    read_run,
    replace_file,
    strip_times,
    write_report,
)
from steadygrad.record._fields import TABLES

HEADER = {"study": "advise", "seed": 3, "task": {"name": "char-lm"}}


def assert_one_line(error: pytest.ExceptionInfo[InputError], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def write(folder: Path, *losses: float) -> bytes:
    with RunWriter.create(folder, HEADER) as writer:
        for step, loss in enumerate(losses):
            writer.append("train", steps=step, loss=loss)
    return (folder / "record.jsonl").read_bytes()


class TestJson:
    def test_non_finite_numbers_are_strict_json_and_come_back(self):
        text = dumps({"low": -math.inf, "high": math.inf, "value": math.nan, "rest": [1.5, (2,)]})
        assert json.loads(text) == {
            "low": "-inf",
            "high": "inf",
            "value": "nan",
            "rest": [1.5, [2]],
        }
        back = loads(text)
        assert back["low"] == -math.inf
        assert back["high"] == math.inf
        assert math.isnan(back["value"])

    @pytest.mark.parametrize("text", ["nan", "inf", "-inf", "\\nan", "\\\\inf", "nano", "\\", ""])
    def test_a_text_stays_a_text(self, text: str):
        assert loads(dumps({"name": text, "list": [text]})) == {"name": text, "list": [text]}

    def test_floats_come_back_to_the_bit(self):
        source = random.Random(0)
        values = [source.uniform(-1, 1) * 10 ** source.randint(-300, 300) for _ in range(500)]
        assert loads(dumps(values)) == values

    def test_half_a_surrogate_pair_survives(self):
        # File names that are not UTF-8 reach Python like this.
        assert loads(dumps("a\udc80b").encode("ascii")) == "a\udc80b"

    def test_what_json_cannot_hold_is_refused(self):
        with pytest.raises(TypeError):
            dumps({"x": object()})


class TestCreate:
    def test_header_comes_first_and_is_complete(self, tmp_path: Path):
        data = write(tmp_path / "deep" / "run", 1.0)
        first = json.loads(data.splitlines()[0])
        assert first["event"] == "run"
        assert first["schema"] == SCHEMA == 1
        assert first["seed"] == 3
        assert first["environment"] == environment()
        assert "T" in first["time"]["created"]

    def test_a_given_time_and_environment_are_kept(self, tmp_path: Path):
        given = {"time": {"created": "then"}, "environment": {"torch": "x"}, "event": "other"}
        RunWriter.create(tmp_path, HEADER | given).close()
        header = read_run(tmp_path).header
        assert header["time"] == {"created": "then"}
        assert header["environment"] == {"torch": "x"}
        assert header["event"] == "run"

    def test_folder_that_is_not_empty(self, tmp_path: Path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(InputError) as error:
            RunWriter.create(tmp_path, HEADER)
        assert_one_line(error, "notes.txt", "Remedy", "--out")
        assert "--resume" not in str(error.value)
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_folder_with_a_run_names_resume_and_stays_as_it_is(self, tmp_path: Path):
        before = write(tmp_path, 1.0)
        with pytest.raises(InputError) as error:
            RunWriter.create(tmp_path, HEADER)
        assert_one_line(error, "--resume")
        assert (tmp_path / "record.jsonl").read_bytes() == before

    def test_file_in_the_way(self, tmp_path: Path):
        file = tmp_path / "file"
        file.write_text("x")
        for folder in (file, file / "run"):
            with pytest.raises(InputError) as error:
                RunWriter.create(folder, HEADER)
            assert_one_line(error, "Cannot write", "Remedy")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    @pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
    def test_folder_without_permission(self, tmp_path: Path):
        tmp_path.chmod(0o500)
        try:
            for folder in (tmp_path, tmp_path / "run"):
                with pytest.raises(InputError) as error:
                    RunWriter.create(folder, HEADER)
                assert_one_line(error, "Cannot write", "Remedy")
        finally:
            tmp_path.chmod(0o700)

    def test_failed_write_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(os, "fsync", no_space)
        with pytest.raises(InputError) as error:
            RunWriter.create(tmp_path / "a" / "b", HEADER)
        assert_one_line(error, "No space left", "Remedy")
        assert list(tmp_path.iterdir()) == []

    def test_header_that_cannot_be_written_leaves_nothing(self, tmp_path: Path):
        with pytest.raises(TypeError):
            RunWriter.create(tmp_path / "run", {"task": object()})
        assert list(tmp_path.iterdir()) == []


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


class TestRead:
    def test_events_in_order_and_by_kind(self, tmp_path: Path):
        with RunWriter.create(tmp_path, HEADER) as writer:
            writer.append("train", loss=2.0)
            writer.append("noise", value=math.nan, high=math.inf)
            writer.append("train", loss=1.0)
        run = read_run(tmp_path)
        assert [entry["loss"] for entry in run.select("train")] == [2.0, 1.0]
        assert run.select("noise")[0]["high"] == math.inf
        assert (run.summary, run.truncated, run.folder) == (None, False, tmp_path)

    def test_a_line_is_on_the_disk_when_append_returns(self, tmp_path: Path):
        with RunWriter.create(tmp_path, HEADER) as writer:
            writer.append("train", loss=2.0)
            assert read_run(tmp_path).events == [{"event": "train", "loss": 2.0}]

    def test_a_cut_at_every_byte_of_the_last_line_keeps_the_others(self, tmp_path: Path):
        data = write(tmp_path, 3.0, 2.0, 1.0)
        start = data.rindex(b"\n", 0, -1) + 1
        for end in range(start, len(data)):
            (tmp_path / "record.jsonl").write_bytes(data[:end])
            run = read_run(tmp_path)
            assert [entry["loss"] for entry in run.events] == [3.0, 2.0]
            assert run.truncated == (end > start)

    @pytest.mark.parametrize("garbage", [b"\x00" * 40 + b"\n", b"{]\n", b"\xff\xfe\n"])
    def test_broken_last_line_with_its_newline_is_dropped(self, tmp_path: Path, garbage: bytes):
        data = write(tmp_path, 3.0, 2.0)
        (tmp_path / "record.jsonl").write_bytes(data + garbage)
        run = read_run(tmp_path)
        assert (len(run.events), run.truncated) == (2, True)

    @pytest.mark.parametrize("line", [b"17", b"null", b"[1]", b"{}", b'{"event": 3}'])
    @pytest.mark.parametrize("after", [b"", b'{"event": "end"}\n'], ids=["last", "middle"])
    def test_whole_line_that_is_no_event(self, tmp_path: Path, line: bytes, after: bytes):
        """A kill leaves a part of a line: a whole value of another kind was put there."""
        data = write(tmp_path, 3.0, 2.0) + line + b"\n" + after
        (tmp_path / "record.jsonl").write_bytes(data)
        for use in (read_run, RunWriter.resume):
            with pytest.raises(RecordError) as error:
                use(tmp_path)
            assert_one_line(error, "names its 'event' in line 4 of", f"Found {json.loads(line)!r}")
        assert (tmp_path / "record.jsonl").read_bytes() == data

    def test_broken_line_in_the_middle(self, tmp_path: Path):
        lines = write(tmp_path, 3.0, 2.0, 1.0).splitlines(keepends=True)
        lines[2] = lines[2][: len(lines[2]) // 2] + b"\n"
        (tmp_path / "record.jsonl").write_bytes(b"".join(lines))
        for use in (read_run, RunWriter.resume):
            with pytest.raises(RecordError) as error:
                use(tmp_path)
            assert_one_line(error, "Line 3", "not the last", "Remedy")

    @pytest.mark.parametrize(
        "content", [b"", b'{"event": "run", "sch', b"[1]\n", b'{"event":"x"}\n']
    )
    def test_truncated_header(self, tmp_path: Path, content: bytes):
        (tmp_path / "record.jsonl").write_bytes(content)
        with pytest.raises(RecordError) as error:
            read_run(tmp_path)
        assert_one_line(error, "header", "Remedy")

    def test_no_record_there(self, tmp_path: Path):
        file = tmp_path / "file"
        file.write_text("x")
        for folder in (tmp_path, tmp_path / "absent", file):
            with pytest.raises(RecordError) as error:
                read_run(folder)
            assert_one_line(error, "record.jsonl", str(folder), "Remedy")

    def test_record_that_cannot_be_read(self, tmp_path: Path):
        (tmp_path / "record.jsonl").mkdir()
        with pytest.raises(RecordError) as error:
            read_run(tmp_path)
        assert_one_line(error, "Cannot read", "Remedy")

    def test_newer_schema(self, tmp_path: Path):
        data = write(tmp_path, 1.0).replace(b'"schema": 1', b'"schema": 2')
        (tmp_path / "record.jsonl").write_bytes(data)
        with pytest.raises(RecordError) as error:
            read_run(tmp_path)
        found = "written by a newer steadygrad: schema 2, this one reads up to 1. Remedy: pip"
        assert_one_line(error, found)

    def test_summary(self, tmp_path: Path):
        with RunWriter.create(tmp_path, HEADER) as writer:
            writer.write_summary({"schema": 1, "value": math.inf})
            writer.write_summary({"schema": 1, "value": math.nan, "status": "complete"})
        summary = read_run(tmp_path).summary
        assert summary is not None
        assert math.isnan(summary["value"])
        assert summary["status"] == "complete"

    @pytest.mark.parametrize("content", ["{", "[]", '{"schema": "1"}', '{"schema": 2}'])
    def test_foreign_summary(self, tmp_path: Path, content: str):
        write(tmp_path, 1.0)
        (tmp_path / "summary.json").write_text(content)
        with pytest.raises(RecordError) as error:
            read_run(tmp_path)
        assert_one_line(error, "summary.json", "Remedy")


class TestCheck:
    """The table itself; what the commands make of it is tested with them."""

    def test_what_no_table_knows_is_left_alone(self, tmp_path: Path):
        with RunWriter.create(tmp_path, {"study": "other", "plan": 3}) as writer:
            writer.append("train", loss="low")
        check_run(read_run(tmp_path), to_resume=True)

    def test_the_line_is_named(self, tmp_path: Path):
        write(tmp_path, 3.0)
        run = read_run(tmp_path)
        with pytest.raises(RecordError) as error:
            check_run(run)
        found = f"'task.sample' to be a text in line 1 of {str(tmp_path / 'record.jsonl')!r}. Found"
        assert_one_line(error, found, "Found none. Remedy: restore the file from a copy")

    def test_every_table_is_of_a_schema_that_is_read(self):
        assert {schema for schema, _ in TABLES} == set(range(1, SCHEMA + 1))


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


def test_replace_file_shows_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "report.html"
    replace_file(path, b"old")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        with pytest.raises(RecordError) as error:
            replace_file(path, b"new")
    assert_one_line(error, "report.html", "No space left")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_report_is_written_as_utf8(tmp_path: Path):
    assert write_report(tmp_path, "größer \udc80") == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_bytes() == "größer ?".encode()


def test_strip_times_drops_only_the_time():
    event = {"event": "point", "loss": 1.0, "time": {"seconds": 3.1}, "times": 2}
    assert strip_times(event) == {"event": "point", "loss": 1.0, "times": 2}
    assert "time" in event


def test_environment_names_versions_and_hardware():
    found = environment()
    assert list(found) == ["python", "steadygrad", "torch", "platform", "cpu", "cores"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"][0].isdigit()
    assert found["cores"] >= 1
    assert found["cpu"]


def test_every_public_name_exists():
    assert all(hasattr(record, name) for name in record.__all__)


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("image", "images"),
        ("batch", "batches"),
        ("query", "queries"),
        ("day", "days"),
        ("waltz", "waltzes"),
    ],
)
def test_plural(one: str, many: str):
    assert plural(one) == many


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
