"""The parts of a record that every study shares: JSON, files, words, the environment."""

import json
import math
import os
import random
import sys
from pathlib import Path

import pytest

from steadygrad import record
from steadygrad.record import (
    RecordError,
    dumps,
    environment,
    loads,
    plural,
    replace_file,
    write_report,
)
from tests.unit.record.helpers import assert_one_line, no_space


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
        with pytest.raises(RecordError) as error:
            replace_file(path, b"new")
    assert_one_line(error, "report.html", "No space left")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_report_is_written_as_utf8(tmp_path: Path):
    assert write_report(tmp_path, "größer \udc80") == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_bytes() == "größer ?".encode()


def test_a_page_that_cannot_be_written_says_how_to_draw_it_again(tmp_path: Path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(RecordError) as error:
        write_report(tmp_path, "page")
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
