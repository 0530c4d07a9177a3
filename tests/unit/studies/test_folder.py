"""A run's folder: begun whole or not at all, read as it was written, trusted in nothing."""

import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steadygrad._checks import InputError
from steadygrad._studies import STUDIES, module_of
from steadygrad.studies.advise.schema import Branch, Noise, Scratch
from steadygrad.studies.folder import (
    Results,
    RunError,
    create,
    read_run,
    replace_file,
    understanding,
    write_page,
    write_result,
    write_summary,
)
from steadygrad.studies.schema import Result
from tests.unit.studies.results import (
    assert_one_line,
    make_branch,
    make_header,
    make_noise,
    make_point,
    make_scratch,
    no_space,
    rewrite,
    rewrite_header,
    write,
)

ROOT = os.name == "posix" and os.geteuid() == 0


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def losses(folder: Path) -> list[float]:
    return [branch.loss for branch in read_run(folder).select(Branch)]


# Creation


def test_a_run_begins_with_its_header(tmp_path: Path):
    create(tmp_path / "deep" / "run", make_header())
    assert names(tmp_path / "deep" / "run") == ["header.json", "results"]
    run = read_run(tmp_path / "deep" / "run")
    assert run.header == make_header()
    assert (list(run.results), run.summary, run.unreadable) == ([], None, ())


def test_a_folder_that_is_not_empty_stays_as_it_is(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError) as error:
        create(tmp_path, make_header())
    assert_one_line(error, "notes.txt", "--out")
    assert names(tmp_path) == ["notes.txt"]
    write(tmp_path / "run", make_branch(1.0))
    write(tmp_path / "begun")
    for folder in (tmp_path / "run", tmp_path / "begun"):
        before = names(folder)
        with pytest.raises(InputError) as error:
            create(folder, make_header())
        assert_one_line(error, "--resume")
        assert names(folder) == before


def cannot_write(folder: Path, *parts: str) -> None:
    with pytest.raises(RunError) as error:
        create(folder, make_header())
    assert_one_line(error, "Cannot write", "--out", *parts)


def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        cannot_write(folder)
    monkeypatch.setattr(os, "fsync", no_space)
    cannot_write(tmp_path / "a" / "b", "No space left")
    with pytest.raises(TypeError):
        create(tmp_path / "run", make_header(environment={"torch": object()}))
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(ROOT, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path):
    tmp_path.chmod(0o500)
    try:
        for folder in (tmp_path, tmp_path / "run"):
            cannot_write(folder)
    finally:
        tmp_path.chmod(0o700)


# What is written is read


def test_results_are_read_as_they_were_written_in_one_order(tmp_path: Path):
    found = [
        make_scratch(rate=0.5), make_scratch(math.inf, rate=2.0), make_point(1), make_branch(2.0),
        make_noise(value=math.nan, high=math.inf), make_branch(-math.inf, repeat=1), make_point(),
    ]  # fmt: skip
    run = write(tmp_path / "run", *found)
    again = write(tmp_path / "again", *found[::-1])
    assert run.unreadable == ()
    assert sorted(map(repr, run.results)) == sorted(map(repr, found))
    assert list(map(repr, run.results)) == list(map(repr, again.results))
    assert math.isnan(run.select(Noise)[0].value)
    assert run.select(Noise)[0].high == math.inf
    for path in (run.folder / "results").iterdir():
        assert json.loads(path.read_bytes(), parse_constant=pytest.fail)
        assert path.read_bytes() == (again.folder / "results" / path.name).read_bytes()


def test_results_by_key():
    results = Results([make_noise(time={"seconds": 1.0}), make_branch(1.0)])
    assert ("branch", 0, 0, 4) in results
    results.add(make_branch(math.nan, repeat=1))
    assert results.get(Noise, 0) == make_noise(time={"seconds": 1.0})
    assert results.get(Branch, 0, 0, 4) == make_branch(1.0)
    assert results.get(Branch, 0, 0, 8) is None
    assert [branch.repeat for branch in results.select(Branch)] == [0, 1]
    assert [result.key[0] for result in results] == ["branch", "branch", "noise"]


class Odd(Result, frozen=True, tag="odd"):
    key_fields = ("name",)

    name: str | int | float


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd", "a/b", "", ".", "nul\0", "x" * 500, "é", "\ud800", "a b", "CON:",
        "a\nb", 1e300, math.inf, -1, 0.1 + 0.2,
    ],
)  # fmt: skip
def test_a_key_of_any_kind_has_a_file_in_the_folder(tmp_path: Path, name: Any):
    (tmp_path / "results").mkdir()
    write_result(tmp_path, Odd(name=name))
    (path,) = (tmp_path / "results").iterdir()
    assert path.suffix == ".json"
    assert path.name.isascii()
    assert len(path.name) < 200
    assert names(tmp_path) == ["results", f"results/{path.name}"]


def test_different_keys_have_different_files_and_equal_ones_the_same(tmp_path: Path):
    (tmp_path / "results").mkdir()
    keys = ["a/b", "a_b", "a b", "x" * 300, "x" * 301, "1e5", 1, 1.5, "é", "è"]
    for name in keys:
        write_result(tmp_path, Odd(name=name))
    write_result(tmp_path, Odd(name=1.0))
    assert len(list((tmp_path / "results").iterdir())) == len(keys)
    # A whole number may be given for a field that is read as a float.
    run = write(tmp_path / "run", make_scratch(rate=1))
    assert (len(run.select(Scratch)), run.unreadable) == (1, ())


# Damage


def linked(path: Path) -> None:
    elsewhere = path.parents[2] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def swapped(path: Path) -> None:
    path.write_bytes((path.parent / "branch-0-1-4.json").read_bytes())


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def holding(data: bytes):
    return lambda path: path.write_bytes(data)


def fields(**changes: Any):
    return lambda path: rewrite(path, lambda fields: fields.update(changes))


GOOD = json.dumps(msgspec.to_builtins(make_branch(2.0))).encode()
DAMAGE = {
    "empty": holding(b""),
    "cut": holding(GOOD[:-9]),
    "zeros": holding(b"\0" * 40),
    "not UTF-8": holding(GOOD.replace(b'"branch"', b'"bran\xff"')),
    "surrogate": holding(GOOD.replace(b'"branch"', b'"\\ud800"')),
    "nested": holding(b"[" * 10**5),
    "twice": holding(GOOD + GOOD),
    "a number": holding(b"3"),
    "null": holding(b"null"),
    "another kind": fields(kind="weather"),
    "swapped": swapped,
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pipe": pipe,
    "device": device,
    "huge": huge,
    "dangling": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "no such point": fields(point=2),
    "negative": fields(batch_size=-4),
    "too large": fields(samples=10**400),
    "a text": fields(loss="text"),
    "no rate": fields(lr="nan"),
    "a short pair": fields(curve=[[1]]),
    "missing": lambda path: rewrite(path, lambda fields: fields.pop("loss")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_result_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, damage: str):
    write(tmp_path / "run", make_branch(2.0), make_branch(3.0, repeat=1), make_noise())
    path = tmp_path / "run" / "results" / "branch-0-0-4.json"
    DAMAGE[damage](path)
    run = read_run(tmp_path / "run")
    assert run.unreadable == (path.name,)
    assert [branch.loss for branch in run.select(Branch)] == [3.0]
    assert len(run.select(Noise)) == 1
    # It is trained again.
    if damage != "folder":
        write_result(tmp_path / "run", make_branch(2.0))
        assert (losses(tmp_path / "run"), path.is_symlink()) == ([2.0, 3.0], False)


def test_foreign_and_half_written_files_are_no_results(tmp_path: Path):
    run = write(tmp_path / "run", make_branch(2.0))
    (run.folder / "results" / ".0123456789abcdef.part").write_bytes(GOOD[:9])
    (run.folder / "results" / "branch-0-7-4.json").write_bytes(GOOD)
    # Of a plan with more points: the page would lack others.
    write_result(run.folder, make_branch(point=2))
    run = read_run(run.folder)
    unreadable = ("branch-0-7-4.json", "branch-2-0-4.json")
    assert (len(list(run.results)), run.unreadable) == (1, unreadable)


def test_unknown_fields_are_left_alone(tmp_path: Path):
    """As a later version of the same schema may add them."""
    run = write(tmp_path / "run", make_branch(2.0))
    rewrite(run.folder / "results" / "branch-0-0-4.json", lambda found: found.update(colour="red"))
    rewrite_header(run.folder, lambda found: found.update(colour="red"))
    assert losses(run.folder) == [2.0]


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(RunError) as error:
        read_run(folder)
    assert_one_line(error, *parts)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[1]", b'{"study": "adv', b"[" * 10**5, b'{"schema": "3"}',
     b'{"schema": true}', b'{"schema": 3, "study": []}'],
)  # fmt: skip
def test_a_damaged_header(tmp_path: Path, content: bytes):
    write(tmp_path / "run")
    (tmp_path / "run" / "header.json").write_bytes(content)
    refused(tmp_path / "run", "header")


def test_there_is_no_run(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        refused(folder, "header.json", str(folder))


@pytest.mark.parametrize("kind", [pipe, device, huge, DAMAGE["folder"]])
def test_a_header_that_is_no_small_file_is_not_read(tmp_path: Path, kind):
    run = write(tmp_path / "run")
    kind(run.folder / "header.json")
    refused(run.folder, "header.json")


@pytest.mark.parametrize("schema", [2, 99])
def test_another_version(tmp_path: Path, schema: int):
    write(tmp_path / "run", header=make_header(study="advise"))
    rewrite_header(tmp_path / "run", lambda header: header.update(schema=schema))
    refused(tmp_path / "run", f"schema {schema}")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"study": "inspect"}', b"[" * 10**5, None]
)
def test_a_summary_that_cannot_be_read_is_none(tmp_path: Path, content: bytes | None):
    run = write(tmp_path / "run", summary={"study": "advise", "words": []})
    assert run.summary == {"study": "advise", "words": []}
    path = run.folder / "summary.json"
    path.write_bytes(content) if content is not None else pipe(path)
    assert read_run(run.folder).summary is None
    write_summary(run.folder, {"study": "advise", "x": math.nan})
    assert list(read_run(run.folder).summary) == ["study", "x"]


def test_numbers_that_no_study_writes_are_one_line(tmp_path: Path):
    with pytest.raises(RunError) as error, understanding(tmp_path):
        raise ZeroDivisionError("by\nzero")
    assert_one_line(error, "ZeroDivisionError", str(tmp_path))
    with pytest.raises(InputError, match="mine"), understanding(tmp_path):
        raise InputError("mine")


# Writing


def test_a_full_disk_leaves_the_old_file_and_no_half_one(tmp_path: Path, monkeypatch):
    run = write(tmp_path / "run", make_branch(2.0), summary={"study": "advise"})
    write_page(run.folder, "old")
    before = names(run.folder)
    monkeypatch.setattr(os, "fsync", no_space)
    for call in (
        lambda: write_result(run.folder, make_branch(1.0)),
        lambda: write_result(run.folder, make_branch(1.0, repeat=1)),
        lambda: write_summary(run.folder, {}),
    ):
        with pytest.raises(RunError) as error:
            call()
        assert_one_line(error, "No space left", "--resume")
    with pytest.raises(RunError) as error:
        write_page(run.folder, "new")
    assert_one_line(error, "report.html", "--resume")
    assert names(run.folder) == before
    assert losses(run.folder) == [2.0]
    assert (run.folder / "report.html").read_text() == "old"


def test_an_interrupt_leaves_nothing_beside_the_file(tmp_path: Path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "x", b"x")
    assert names(tmp_path) == []


def test_two_writers_of_one_file(tmp_path: Path):
    """Such as two processes that resume one run."""

    def write_often(number: int) -> None:
        for _ in range(25):
            write_page(tmp_path, f"{number}" * 200_000)
            assert len({*(tmp_path / "report.html").read_text()}) == 1

    with ThreadPoolExecutor(3) as writers:
        list(writers.map(write_often, range(3)))
    assert names(tmp_path) == ["report.html"]


@pytest.mark.parametrize("name", [".report.html.part", ".taken.part", "report.html"])
def test_a_link_that_came_with_the_folder_is_not_followed(tmp_path: Path, name: str, monkeypatch):
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


def test_results_that_are_gone_or_a_file(tmp_path: Path):
    run = write(tmp_path / "run")
    (run.folder / "results").rmdir()
    assert list(read_run(run.folder).results) == []
    write_result(run.folder, make_branch(1.0))
    assert losses(run.folder) == [1.0]
    shutil.rmtree(run.folder / "results")
    (run.folder / "results").write_text("mine")
    assert list(read_run(run.folder).results) == []
    with pytest.raises(RunError) as error:
        write_result(run.folder, make_branch(1.0))
    assert_one_line(error, "results")


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_has_its_types(study: str):
    assert module_of(study, "schema").Settings().task == "char-lm"
