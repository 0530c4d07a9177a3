"""What is read is what was written, and what is wrong with a record is said in one line."""

import json
import math
from pathlib import Path

import pytest

from steadygrad.record import SCHEMA, RecordError, RunWriter, check_run, read_run
from steadygrad.record._fields import TABLES
from tests.unit.record.helpers import HEADER, assert_one_line, write


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
