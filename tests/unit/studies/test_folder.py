"""A run's folder: begun whole or not at all, read as it was written, trusted in nothing."""

import json
import math
import os
from contextlib import suppress

import msgspec
import pytest

from steadygrad.studies.advise.schema import Noise
from steadygrad.studies.folder import (
    RunError,
    create,
    identity,
    read_run,
    replace_file,
    write_result,
    write_summary,
)
from steadygrad.studies.schema import Training
from tests.refusals import refused
from tests.unit.studies.framework import contents
from tests.unit.studies.results import (
    make_header,
    make_noise,
    make_training,
    no_space,
    rewrite,
    rewrite_header,
    write,
)


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def losses(folder):
    return [run.loss for run in read_run(folder).results.select(Training)]


# Creation


def test_a_run_begins_with_its_header(tmp_path):
    create(tmp_path / "deep" / "run", make_header())
    assert names(tmp_path / "deep" / "run") == ["header.json", "results"]
    run = read_run(tmp_path / "deep" / "run")
    assert run.header == make_header()
    assert (list(run.results), run.summary, run.unreadable) == ([], None, ())


def test_a_header_has_numbers_that_are_not_finite(tmp_path):
    losses = math.inf, -math.inf, math.nan
    create(tmp_path / "run", msgspec.structs.replace(make_header(), first_losses=losses))
    assert str(read_run(tmp_path / "run").header.first_losses) == str(losses)


def test_a_folder_that_is_not_empty_stays_as_it_is(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    write(tmp_path / "begun")
    for folder, found in ((tmp_path / "own", "notes.txt"), (tmp_path / "begun", "--resume")):
        before = names(folder)
        with refused(found):
            create(folder, make_header())
        assert names(folder) == before


def test_a_folder_in_which_no_run_can_begin_is_left_empty(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with refused("--out", kind=RunError):
            create(folder, make_header())
    with pytest.raises(TypeError):
        create(tmp_path / "run", make_header(environment={"torch": object()}))
    monkeypatch.setattr(os, "fsync", no_space)
    with refused("No space left", "--out", kind=RunError):
        create(tmp_path / "a" / "b", make_header())
    assert names(tmp_path) == ["a", "a/b", "file"]


# What is written is read


def test_results_are_read_as_they_were_written_in_one_order(tmp_path):
    found = [
        make_training(step=-0.5), make_training(math.inf, step=1.0), make_noise(math.nan),
        make_training(-math.inf, seed=1), make_noise(math.inf, 128), make_training(2.0),
    ]  # fmt: skip
    run = write(tmp_path / "run", *found)
    again = write(tmp_path / "again", *found[::-1])
    assert run.unreadable == ()
    assert sorted(map(repr, run.results)) == sorted(map(repr, found))
    assert list(map(repr, run.results)) == list(map(repr, again.results))
    for path in (run.folder / "results").iterdir():
        assert json.loads(path.read_bytes(), parse_constant=pytest.fail)
        assert path.read_bytes() == (again.folder / "results" / path.name).read_bytes()


def test_different_keys_have_different_files_and_equal_ones_the_same(tmp_path):
    (tmp_path / "results").mkdir()
    steps = [0, 1, 1.5, 10, -1, -1.5, 2.0**-60, -64]
    for step in [*steps, 1.0, 10.0]:
        write_result(tmp_path, make_training(step=step), "a run")
    assert len(names(tmp_path)) == 1 + len(steps)
    # A whole number may be given for a field that is read as a float.
    run = write(tmp_path / "run", make_training(step=1))
    assert (len(run.results.select(Training)), run.unreadable) == (1, ())


# Damage


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def huge(path):
    os.truncate(path, 1 << 40)


def holding(data):
    return lambda path: path.write_bytes(data)


def fields(**changes):
    return lambda path: rewrite(path, lambda fields: fields.update(changes))


def timed(seconds):
    return fields(time={"seconds": 1.0, "peak_bytes": seconds})


GOOD = json.dumps(msgspec.to_builtins(make_training(2.0))).encode()
NEST = json.loads("[" * 600 + "]" * 600)


@pytest.mark.parametrize(
    "damage",
    [
        holding(GOOD[:-9]),
        holding(b"[" * 10**5),
        fields(kind="weather"),
        pipe,
        huge,
        fields(arm=2),
        fields(samples=10**400),
        fields(loss="text"),
        fields(colour=NEST),
        fields(time=[]),
        *map(timed, [None, "fast", [1.0], {}, True, math.nan, math.inf, -1, 10**400]),
        # Of no run, and of another one.
        holding(GOOD),
        fields(run="0" * 64),
    ],
)
def test_a_result_that_cannot_be_read_is_left_out_and_named(tmp_path, damage):
    write(tmp_path / "run", make_training(2.0), make_training(3.0, seed=1), make_noise())
    path = tmp_path / "run" / "results" / "training-0-256-0-0.json"
    damage(path)
    run = read_run(tmp_path / "run")
    assert run.unreadable == (path.name,)
    assert [one.loss for one in run.results.select(Training)] == [3.0]
    assert len(run.results.select(Noise)) == 1
    # It is trained again.
    write_result(tmp_path / "run", make_training(2.0), identity(tmp_path / "run"))
    assert losses(tmp_path / "run") == [2.0, 3.0]


def test_foreign_and_half_written_files_are_no_results_and_unknown_fields_are_left_alone(tmp_path):
    """As a later version of the same schema may add them."""
    run = write(tmp_path / "run", make_training(2.0))
    (run.folder / "results" / ".0123456789abcdef.part").write_bytes(GOOD[:9])
    own = run.folder / "results" / "training-0-256-0-0.json"
    fields(colour="red")(own)
    (run.folder / "results" / "training-0-256-0-7.json").write_bytes(own.read_bytes())
    write_result(run.folder, make_training(2.0, arm=7), identity(run.folder))  # beyond the plan
    rewrite_header(run.folder, lambda fields: fields.update(colour="red"))
    assert losses(run.folder) == [2.0]
    assert read_run(run.folder).unreadable == ("training-0-256-0-7.json", "training-7-256-0-0.json")


def test_results_of_another_run_are_left_out_and_named(tmp_path):
    """It differs in when it began, or in its seed."""
    write(tmp_path / "other", make_training(1.0), make_training(2.0, seed=1))
    create(tmp_path / "run", make_header(time={"created": "later"}))
    write_result(tmp_path / "run", make_training(3.0), identity(tmp_path / "run"))
    moved = tmp_path / "other" / "results" / "training-0-256-0-1.json"
    moved.rename(tmp_path / "run" / "results" / moved.name)
    assert losses(tmp_path / "run") == [3.0]
    assert read_run(tmp_path / "run").unreadable == (moved.name,)
    # A study whose folder was taken over meanwhile.
    write_result(tmp_path / "run", make_training(4.0, seed=1), identity(tmp_path / "other"))
    assert losses(tmp_path / "run") == [3.0]


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (holding(b"[" * 10**5), "header"),
        (holding(b'{"schema": 4, "study": []}'), "header"),
        (fields(environment={"torch": NEST}), "header"),
        (fields(time={"folder": 1}), "time"),
        (pipe, "header.json"),
        (huge, "header.json"),
        (lambda path: path.unlink(), "header.json"),
        (fields(schema=2), "schema 2"),
        (fields(plan={}), "plan"),
    ],
)
def test_a_damaged_header(tmp_path, damage, found):
    run = write(tmp_path / "run")
    damage(run.folder / "header.json")
    with refused(found, str(run.folder), kind=RunError):
        read_run(run.folder)


@pytest.mark.parametrize(
    "damage", [holding(b"{"), holding(b"[1]"), fields(study="inspect"), fields(x=NEST), pipe]
)
def test_a_summary_that_cannot_be_read_is_none(tmp_path, damage):
    run = write(tmp_path / "run", summary={"study": "advise", "words": []})
    assert run.summary == {"study": "advise", "words": []}
    damage(run.folder / "summary.json")
    assert read_run(run.folder).summary is None
    write_summary(run.folder, {"study": "advise", "x": math.nan})
    assert list(read_run(run.folder).summary) == ["study", "x"]


# Writing


def ctrl_c(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("fault", [no_space, ctrl_c])
def test_what_cannot_be_written_leaves_the_old_file_and_no_half_one(tmp_path, monkeypatch, fault):
    run = write(tmp_path / "run", make_training(2.0), summary={"study": "advise"})
    replace_file(run.folder / "report.html", b"old")
    before = names(run.folder)
    monkeypatch.setattr(os, "fsync", fault)
    for call in (
        lambda: write_result(run.folder, make_training(1.0), identity(run.folder)),
        lambda: write_result(run.folder, make_training(1.0, seed=1), identity(run.folder)),
        lambda: write_summary(run.folder, {}),
        lambda: replace_file(run.folder / "report.html", b"new"),
    ):
        with pytest.raises((RunError, KeyboardInterrupt)):
            call()
    assert names(run.folder) == before
    assert losses(run.folder) == [2.0]
    assert (run.folder / "report.html").read_text() == "old"


def test_each_write_has_a_part_file_of_its_own(tmp_path, monkeypatch):
    """One that a kill left behind stops no later write."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda part, path: None)
        replace_file(tmp_path / "report.html", b"killed")
    replace_file(tmp_path / "report.html", b"new")
    assert (tmp_path / "report.html").read_text() == "new"


def test_of_two_processes_that_begin_in_a_folder_one_does(tmp_path, monkeypatch):
    create(tmp_path / "run", make_header())
    before = contents(tmp_path / "run")
    # As the other one saw it a moment before.
    monkeypatch.setattr("pathlib.Path.iterdir", lambda self: iter(()))
    with refused("run", kind=RunError):
        create(tmp_path / "run", make_header())
    monkeypatch.undo()
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("name", [".taken.part", "report.html"])
def test_a_link_that_came_with_the_folder_is_not_followed(tmp_path, name, monkeypatch):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    # As if the name had been guessed.
    monkeypatch.setattr("secrets.token_hex", lambda _: "taken")
    with suppress(RunError):
        replace_file(folder / "report.html", b"page")
    assert victim.read_text() == "precious"
    assert name != "report.html" or not (folder / name).is_symlink()
