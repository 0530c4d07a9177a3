"""A record begins whole, or not at all."""

import json
import os
from pathlib import Path

import pytest

from steadygrad._checks import InputError
from steadygrad.record import SCHEMA, RunWriter, environment, read_run
from tests.unit.record.helpers import HEADER, assert_one_line, no_space, write


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
