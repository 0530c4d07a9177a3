"""A record begins whole, or not at all."""

import json
import os
from pathlib import Path

import pytest

from steadygrad._checks import InputError
from steadygrad.studies.folder import RunWriter, read_run
from tests.unit.record.helpers import assert_one_line, make_header, no_space, write


class TestCreate:
    def test_the_header_comes_first_and_is_read_as_it_was(self, tmp_path: Path):
        data = write(tmp_path / "deep" / "run", 1.0)
        first = json.loads(data.splitlines()[0])
        assert (first["kind"], first["schema"], first["study"]) == ("run", 2, "advise")
        assert first["settings"]["tolerance"] == 0.2
        assert first["plan"]["points"] == [128, 512]
        assert read_run(tmp_path / "deep" / "run").header == make_header()

    def test_folder_that_is_not_empty(self, tmp_path: Path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(InputError) as error:
            RunWriter.create(tmp_path, make_header())
        assert_one_line(error, "notes.txt", "Remedy", "--out")
        assert "--resume" not in str(error.value)
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_folder_with_a_run_names_resume_and_stays_as_it_is(self, tmp_path: Path):
        before = write(tmp_path, 1.0)
        with pytest.raises(InputError) as error:
            RunWriter.create(tmp_path, make_header())
        assert_one_line(error, "--resume")
        assert (tmp_path / "record.jsonl").read_bytes() == before

    def test_file_in_the_way(self, tmp_path: Path):
        file = tmp_path / "file"
        file.write_text("x")
        for folder in (file, file / "run"):
            with pytest.raises(InputError) as error:
                RunWriter.create(folder, make_header())
            assert_one_line(error, "Cannot write", "Remedy")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    @pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
    def test_folder_without_permission(self, tmp_path: Path):
        tmp_path.chmod(0o500)
        try:
            for folder in (tmp_path, tmp_path / "run"):
                with pytest.raises(InputError) as error:
                    RunWriter.create(folder, make_header())
                assert_one_line(error, "Cannot write", "Remedy")
        finally:
            tmp_path.chmod(0o700)

    def test_failed_write_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(os, "fsync", no_space)
        with pytest.raises(InputError) as error:
            RunWriter.create(tmp_path / "a" / "b", make_header())
        assert_one_line(error, "No space left", "Remedy: name a folder with --out")
        assert list(tmp_path.iterdir()) == []

    def test_header_that_cannot_be_written_leaves_nothing(self, tmp_path: Path):
        with pytest.raises(TypeError):
            RunWriter.create(tmp_path / "run", make_header(environment={"torch": object()}))
        assert list(tmp_path.iterdir()) == []
