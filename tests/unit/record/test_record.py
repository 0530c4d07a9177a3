"""The parts of a record that every study shares: JSON, files, words, the environment."""

import json
import math
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from steadygrad import record
from steadygrad.studies.environment import environment
from steadygrad.studies.folder import RunError, RunWriter, read_run, replace_file, write_page
from steadygrad.studies.strict_json import dumps, loads
from steadygrad.studies.text import plural
from tests.unit.record.helpers import assert_one_line, no_space, write


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


def test_replace_file_shows_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "report.html"
    replace_file(path, b"old")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        with pytest.raises(RunError) as error:
            replace_file(path, b"new")
    assert_one_line(error, "report.html", "No space left")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_report_is_written_as_utf8(tmp_path: Path):
    assert write_page(tmp_path, "größer \udc80") == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_bytes() == "größer ?".encode()


def test_a_page_that_cannot_be_written_says_how_to_draw_it_again(tmp_path: Path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(RunError) as error:
        write_page(tmp_path, "page")
    assert_one_line(error, "The results are kept. Remedy: ", f"`steadygrad report {tmp_path}`.")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_environment_names_versions_and_hardware():
    found = environment()
    names = ["python", "steadygrad", "torch", "platform", "cpu", "cores", "memory_bytes"]
    assert list(found) == names
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"][0].isdigit()
    assert found["cores"] >= 1
    assert found["cpu"]
    # More than any Python needs, less than any machine has.
    assert 2**27 < found["memory_bytes"] < 2**50


def test_environment_holds_what_the_study_knows_of_its_accelerator():
    gpu = {"gpu": "X100", "gpu_memory_bytes": 2**36, "cuda": "12.8"}
    assert environment(gpu) == {**environment(), **gpu}


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


class TestFolderOfAStranger:
    """No name in it is trusted: neither to be free, nor to be a file, nor to be small."""

    @pytest.mark.parametrize("name", [".report.html.part", ".taken.part", "report.html"])
    def test_a_link_that_came_with_it_is_not_followed(self, tmp_path: Path, name: str, monkeypatch):
        victim, folder = tmp_path / "victim", tmp_path / "run"
        victim.write_text("precious")
        folder.mkdir()
        (folder / name).symlink_to(victim)
        # As if the name had been guessed.
        monkeypatch.setattr("secrets.token_hex", lambda _: "taken")
        with suppress(RunError):
            write_page(folder, "page")
        assert victim.read_text() == "precious"
        assert name != "report.html" or not (folder / name).is_symlink()

    def test_a_failure_leaves_nothing_beside_the_file(self, tmp_path: Path, monkeypatch):
        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            replace_file(tmp_path / "x", b"x")
        assert list(tmp_path.iterdir()) == []

    def test_two_writers_of_one_page(self, tmp_path: Path):
        def write(number: int) -> None:
            for _ in range(25):
                write_page(tmp_path, f"{number}" * 200_000)
                assert len({*(tmp_path / "report.html").read_text()}) == 1

        with ThreadPoolExecutor(3) as writers:
            list(writers.map(write, range(3)))
        assert (tmp_path / "report.html").stat().st_size == 200_000

    @pytest.mark.parametrize("kind", ["pipe", "device", "large"])
    @pytest.mark.parametrize("name", ["record.jsonl", "summary.json"])
    def test_what_is_no_small_file_is_not_read(self, tmp_path: Path, name: str, kind: str):
        write(tmp_path, 1.0)
        path = tmp_path / name
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.touch()
            os.truncate(path, 1 << 40)
        with pytest.raises(RunError) as error:
            read_run(tmp_path)
        assert_one_line(error, str(path), "Remedy")

    @pytest.mark.parametrize("name", ["record.jsonl", "checkpoints", "pending"])
    def test_links_are_not_written_through(self, tmp_path: Path, name: str):
        write(tmp_path / "run", 1.0)
        path = tmp_path / "run" / name
        (tmp_path / "elsewhere").mkdir()
        if path.exists():
            path.rename(tmp_path / "elsewhere" / name)
        path.symlink_to(tmp_path / "elsewhere" / (name if name == "record.jsonl" else ""))
        with pytest.raises(RunError) as error:
            RunWriter.resume(tmp_path / "run")
        assert_one_line(error, name, "Remedy")
