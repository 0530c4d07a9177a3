"""Files of a task and of optimizers: found where the run began, unchanged, on one's own word."""

import json
import sys
from shlex import quote
from types import SimpleNamespace

import pytest

from steadygrad.studies.compare.schema import Settings
from steadygrad.studies.folder import read_run
from steadygrad.studies.record import digests, load_recorded_task, located
from tests.refusals import refused
from tests.unit.studies import framework
from tests.unit.studies.framework import begin, contents, copy, go_on, lines, part
from tests.unit.studies.results import rewrite_header

TASK = """
from pathlib import Path
import torch
import scale_of_mine
from steadygrad.tasks import TensorSamples
from tests.unit.studies import tiny_task

def make_task():
    seed = int((Path(__file__).parent / "data.txt").read_text())
    return tiny_task.make_task(train=tiny_task.make_data(4096, seed))
"""
SPEC = "mine.py:make_task"


def write(folder, seed=0):
    folder.mkdir()
    (folder / "mine.py").write_text(TASK)
    (folder / "scale_of_mine.py").write_text("scale = 1\n")
    (folder / "data.txt").write_text(f"{seed}")
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a task, whose run has just begun, and the present one."""
    monkeypatch.setattr(framework, "tiny", lambda factory: SPEC)
    monkeypatch.chdir(write(tmp_path / "home"))
    # Of another test's folder.
    monkeypatch.delitem(sys.modules, "scale_of_mine", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    begin(tmp_path / "run")
    return tmp_path / "home"


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_file_wherever_it_is_resumed(home, whole, tmp_path, monkeypatch):
    header = read_run(tmp_path / "run").header
    assert {*header.files[SPEC]} == {"mine.py", "scale_of_mine.py"}
    assert len(header.first_losses) == 2
    part(tmp_path / "run", 1000)
    monkeypatch.chdir(write(tmp_path / "elsewhere", seed=1))
    (tmp_path / "elsewhere" / "mine.py").write_text("raise SystemExit('another file')")
    go_on(tmp_path / "run")
    assert lines(tmp_path / "run") == lines(whole)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("mine.py", TASK + "\n", "mine.py"),
        ("scale_of_mine.py", "scale = 2\n", "scale_of_mine.py"),
        ("mine.py", None, "mine.py"),
        ("data.txt", "1", "losses before training"),
    ],
    ids=["task", "neighbour", "gone", "data"],
)
def test_what_has_changed_is_refused(home, tmp_path, name, text, found):
    before = contents(tmp_path / "run")
    (home / name).unlink()
    if text is not None:
        (home / name).write_text(text)
    for given in ({}, {"task": SPEC}):
        with refused(found):
            go_on(tmp_path / "run", **given)
    assert contents(tmp_path / "run") == before


# Strangers


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        (".x.py:make_task", ".x.py:make_task"),
        ("ran.py:make_task", "char-lm"),
        ("x; touch RAN #.py:make_task", "char-lm"),
    ],
)
def test_a_file_that_only_a_stranger_names_is_not_run(home, tmp_path, spec, place):
    """The record came from another user, with a file beside it that says that it was run."""
    run = tmp_path / "run"
    for path in (run / "ran.py", run / ".x.py", home / "ran.py"):
        path.write_text("import pathlib; pathlib.Path('RAN').touch()\n")

    def change(header):
        header["settings"].update(task=spec)
        header["task"].update(spec=place)
        header["time"]["folder"] = str(run)

    rewrite_header(run, change)
    with refused() as error:
        part(run, 1)
    # A command that can be pasted, and runs nothing else.
    assert f"steadygrad advise {quote(spec)} --resume {run}" in str(error.value)
    assert not (home / "RAN").exists()
    assert not (run / "RAN").exists()


@pytest.mark.parametrize("where", ["no state", "of another header"])
def test_a_run_is_ones_own_by_what_lies_outside_of_its_folder(home, tmp_path, monkeypatch, where):
    run = copy(tmp_path / "run", tmp_path / "copy")
    if where == "no state":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "empty"))
    else:
        rewrite_header(run, lambda header: header["time"].update(created="later"))
    with refused("--resume"):
        part(run, 1)
    # Named on the command line it runs, from the present folder.
    part(run, 1, task=SPEC)


# Optimizers


def test_files_of_optimizers_count_from_the_same_folders(tmp_path):
    write(tmp_path / "home")
    (tmp_path / "home" / "o.py").write_text("def mine(model, lr): ...\n")
    settings = Settings(task=SPEC, add="o.py:mine, /abs/p.py:other")
    found = located(settings, str(tmp_path / "home"), {"task": SPEC})
    assert found == {
        SPEC: str(tmp_path.cwd() / SPEC),
        "o.py:mine": f"{tmp_path}/home/o.py:mine",
        "/abs/p.py:other": "/abs/p.py:other",
    }
    assert located(Settings(task="char-lm")) == {}


def test_an_optimizers_file_that_changed_is_refused(tmp_path):
    path = tmp_path / "o.py"
    path.write_text("def mine(model, lr): ...\n")
    files = {"o.py:mine": f"{path}:mine"}
    header = SimpleNamespace(files=digests(files), settings=Settings(task="digits-classifier"))
    header.study = "compare"
    assert load_recorded_task(header, files).name == "digits-classifier"
    path.write_text("def mine(model, lr): pass\n")
    with refused("o.py"):
        load_recorded_task(header, files)


def test_a_home_that_cannot_be_written_costs_no_study(home, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    begin(tmp_path / "second", at=0)
    assert json.loads((tmp_path / "second" / "summary.json").read_text())["status"] == "budget"
    with refused("--resume"):
        go_on(tmp_path / "second")
