"""A record is read as it was written, and a damaged one is refused in one line."""

import json
import math
from pathlib import Path

import pytest

from steadygrad.studies.advise.schema import Branch, Noise
from steadygrad.studies.folder import RunError, RunWriter, read_run
from tests.unit.record.helpers import (
    assert_one_line,
    make_branch,
    make_header,
    make_noise,
    rewrite,
    with_checksums,
    write,
)


def losses(run) -> list[float]:
    return [event.loss for event in run.select(Branch)]


def refused(folder: Path, *parts: str) -> None:
    """Neither reading nor going on takes the record, and both leave it as it is."""
    before = (folder / "record.jsonl").read_bytes()
    for use in (read_run, RunWriter.resume):
        with pytest.raises(RunError) as error:
            use(folder)
        assert_one_line(error, *parts)
    assert (folder / "record.jsonl").read_bytes() == before


class TestRead:
    def test_events_in_order_and_by_class(self, tmp_path: Path):
        events = [make_branch(2.0), make_noise(value=math.nan, high=math.inf), make_branch(1.0)]
        with RunWriter.create(tmp_path, make_header()) as writer:
            for event in events:
                writer.append(event)
        run = read_run(tmp_path)
        assert losses(run) == [2.0, 1.0]
        assert math.isnan(run.select(Noise)[0].value)
        assert run.select(Noise)[0].high == math.inf
        assert [run.events[0], run.events[2]] == [events[0], events[2]]
        assert (run.summary, run.truncated, run.folder) == (None, False, tmp_path)

    def test_a_line_is_on_the_disk_when_append_returns(self, tmp_path: Path):
        with RunWriter.create(tmp_path, make_header()) as writer:
            writer.append(make_branch(2.0))
            assert read_run(tmp_path).events == [make_branch(2.0)]

    def test_a_cut_at_every_byte_of_the_last_line_keeps_the_others(self, tmp_path: Path):
        data = write(tmp_path, 3.0, 2.0, 1.0)
        start = data.rindex(b"\n", 0, -1) + 1
        for end in range(start, len(data)):
            (tmp_path / "record.jsonl").write_bytes(data[:end])
            run = read_run(tmp_path)
            assert losses(run) == [3.0, 2.0]
            assert run.truncated == (end > start)

    @pytest.mark.parametrize("garbage", [b"\x00" * 40, b"{]", b"\xff\xfe", b"[" * 100_000])
    def test_broken_last_line_with_its_newline_is_dropped(self, tmp_path: Path, garbage: bytes):
        data = write(tmp_path, 3.0, 2.0)
        (tmp_path / "record.jsonl").write_bytes(data + garbage + b"\n")
        run = read_run(tmp_path)
        assert (losses(run), run.truncated) == ([3.0, 2.0], True)

    def test_broken_line_in_the_middle(self, tmp_path: Path):
        lines = write(tmp_path, 3.0, 2.0, 1.0).splitlines(keepends=True)
        lines[2] = lines[2][: len(lines[2]) // 2] + b"\n"
        (tmp_path / "record.jsonl").write_bytes(b"".join(lines))
        refused(tmp_path, "Line 3", "does not follow the line before", "Remedy")

    def test_lines_exchanged_left_out_or_of_another_run(self, tmp_path: Path):
        lines = write(tmp_path / "a", 3.0, 2.0, 1.0).splitlines(keepends=True)
        other = write(tmp_path / "b", 3.5, 2.0, 1.0).splitlines(keepends=True)
        header, first, second, third = lines
        for changed, number in (
            ([header, second, first, third], 2),
            ([header, first, third, third], 3),
            ([header, first, other[2], third], 3),
        ):
            (tmp_path / "a" / "record.jsonl").write_bytes(b"".join(changed))
            refused(tmp_path / "a", f"Line {number}", "does not follow the line before")

    @pytest.mark.parametrize(
        "content", [b"", b'{"kind": "run", "sch', b"[1]\n", b'{"event":"x"}\n', b"[" * 10**5]
    )
    def test_truncated_or_foreign_header(self, tmp_path: Path, content: bytes):
        (tmp_path / "record.jsonl").write_bytes(content)
        refused(tmp_path, "header", "Remedy")

    def test_no_record_there(self, tmp_path: Path):
        file = tmp_path / "file"
        file.write_text("x")
        for folder in (tmp_path, tmp_path / "absent", file):
            with pytest.raises(RunError) as error:
                read_run(folder)
            assert_one_line(error, "record.jsonl", str(folder), "Remedy")

    def test_record_that_cannot_be_read(self, tmp_path: Path):
        (tmp_path / "record.jsonl").mkdir()
        with pytest.raises(RunError) as error:
            read_run(tmp_path)
        assert_one_line(error, "Cannot read", "Remedy")


class TestChecksum:
    """Each line ends with the CRC-32 of its text; an edit shows."""

    def test_every_line_has_that_of_its_text(self, tmp_path: Path):
        lines = write(tmp_path, 3.0, math.inf).splitlines(keepends=True)
        assert lines == list(with_checksums([json.loads(line) for line in lines]))
        assert len({json.loads(line)["crc"] for line in lines}) == 3

    @pytest.mark.parametrize("line", [1, 2])
    def test_an_edit_of_a_middle_line_is_refused(self, tmp_path: Path, line: int):
        lines = write(tmp_path, 3.5, 3.5, 1.0).splitlines(keepends=True)
        edited = lines[line].replace(b"3.5", b"2.5")
        assert edited != lines[line]
        lines[line] = edited
        (tmp_path / "record.jsonl").write_bytes(b"".join(lines))
        refused(tmp_path, f"Line {line + 1} of", "is damaged", "Remedy: restore it from a copy")

    def test_an_edit_of_the_header_is_refused(self, tmp_path: Path):
        data = write(tmp_path, 3.0).replace(b'"tolerance": 0.2', b'"tolerance": 0.3')
        (tmp_path / "record.jsonl").write_bytes(data)
        refused(tmp_path, "Expected the header of a run in line 1", "Found a damaged")

    def test_an_edit_of_the_last_line_drops_it(self, tmp_path: Path):
        """It cannot be told from a line that a kill cut: the trial is run again."""
        data = write(tmp_path, 3.0, 2.0).replace(b'"loss": 2.0', b'"loss": 1.0')
        (tmp_path / "record.jsonl").write_bytes(data)
        run = read_run(tmp_path)
        assert (losses(run), run.truncated) == ([3.0], True)

    def test_a_line_without_one_is_damaged(self, tmp_path: Path):
        lines = write(tmp_path, 3.0, 2.0).splitlines(keepends=True)
        lines[1] = lines[1].partition(b', "crc"')[0] + b"}\n"
        (tmp_path / "record.jsonl").write_bytes(b"".join(lines))
        refused(tmp_path, "Line 2 of", "is damaged")


class TestVersions:
    def test_an_older_schema_has_a_remedy(self, tmp_path: Path):
        old = b'{"kind": "run", "schema": 1, "study": "advise", "settings": {"seed": 0}}\n'
        (tmp_path / "record.jsonl").write_bytes(old + b'{"kind": "point", "point": 0}\n')
        found = "was written by an older steadygrad: schema 1, this one reads 2. Remedy: run the"
        refused(tmp_path, found)

    def test_a_newer_schema(self, tmp_path: Path):
        write(tmp_path, 1.0)
        rewrite(tmp_path, 0, lambda header: header.update(schema=3))
        found = "written by a newer steadygrad: schema 3, this one reads 2. Remedy: pip install -U"
        refused(tmp_path, found)

    @pytest.mark.parametrize("schema", [True, "2", 2.0, None])
    def test_a_schema_that_is_no_number_is_no_header(self, tmp_path: Path, schema):
        write(tmp_path, 1.0)
        rewrite(tmp_path, 0, lambda header: header.update(schema=schema))
        refused(tmp_path, "Expected the header of a run")

    @pytest.mark.parametrize("study", ["measure", None, ["advise"], {}])
    def test_an_unknown_study(self, tmp_path: Path, study):
        write(tmp_path, 1.0)
        rewrite(tmp_path, 0, lambda header: header.update(study=study))
        refused(tmp_path, "the record of a known study", f"Found `study = {study!r}`", "Remedy")


class TestSummary:
    def test_what_was_written_last_is_read(self, tmp_path: Path):
        with RunWriter.create(tmp_path, make_header()) as writer:
            writer.write_summary({"schema": 2, "value": math.inf})
            writer.write_summary({"schema": 2, "value": math.nan, "status": "complete"})
        summary = read_run(tmp_path).summary
        assert summary is not None
        assert math.isnan(summary["value"])
        assert summary["status"] == "complete"

    @pytest.mark.parametrize(
        "content",
        [
            "{",
            "[]",
            '{"schema": "2"}',
            '{"schema": true}',
            '{"schema": 2, "words": 3}',
            '{"schema": 2, "words": ["one", 2]}',
            '{"schema": 2, "status": null}',
            "[" * 10**5,
            '{"a":' * 10**5,
            "\udc80",
        ],
        ids=lambda content: content[:40],
    )
    def test_foreign_summary(self, tmp_path: Path, content: str):
        write(tmp_path, 1.0)
        (tmp_path / "summary.json").write_text(content, errors="surrogateescape")
        with pytest.raises(RunError) as error:
            read_run(tmp_path)
        assert_one_line(error, "summary.json", "Remedy: delete it; nothing is lost: --resume")

    @pytest.mark.parametrize(("old", "new"), [('"batch_size": 8', '"batch_size": 9'), ("8", "x")])
    def test_an_edited_summary(self, tmp_path: Path, old: str, new: str):
        with RunWriter.create(tmp_path, make_header()) as writer:
            writer.write_summary({"schema": 2, "recommendation": {"batch_size": 8, "known": True}})
        path = tmp_path / "summary.json"
        path.write_text(path.read_text().replace(old, new, 1))
        with pytest.raises(RunError) as error:
            read_run(tmp_path)
        assert_one_line(error, "summary.json", "Remedy: delete it; nothing is lost: --resume")

    @pytest.mark.parametrize(("schema", "age"), [(3, "a newer"), (1, "an older")])
    def test_summary_of_another_schema(self, tmp_path: Path, schema: int, age: str):
        write(tmp_path, 1.0)
        (tmp_path / "summary.json").write_text(f'{{"schema": {schema}}}')
        with pytest.raises(RunError) as error:
            read_run(tmp_path)
        assert_one_line(error, "summary.json", f"written by {age} steadygrad", "Remedy")
