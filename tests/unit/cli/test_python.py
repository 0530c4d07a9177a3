"""The studies from Python: the command's numbers, typed, printed and drawn."""

import os
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import steadygrad
from steadygrad.cli import main
from steadygrad.cli.studies import _words
from steadygrad.studies.advise.schema import Summary
from steadygrad.studies.folder import dumps, read_run, write_result
from steadygrad.studies.run import _alone
from tests.unit.cli.quick import tiny
from tests.unit.studies.framework import contents, environment, generators, timeless
from tests.unit.studies.tiny_task import make_task

PLAIN = {"device": "cpu", "threads": 1, "progress": False}


@pytest.mark.slow
def test_a_task_object_gives_the_numbers_of_its_factory(tmp_path, capsys):
    found = steadygrad.advise(make_task(), budget="2m", out=tmp_path / "run", **PLAIN)
    assert capsys.readouterr() == ("", "")
    torch.set_num_threads(2)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    before = generators()
    again = steadygrad.advise(tiny(), workers=1, budget=120, out=str(tmp_path / "again"), **PLAIN)
    assert generators() == before
    assert torch.get_num_threads() == 2
    assert timeless(found.folder) == timeless(again.folder)
    assert isinstance(found.summary, Summary)
    assert dumps(found.summary) == dumps(again.summary)  # a NaN is not equal to itself
    assert found.summary.recommendation.samples == 128
    assert dumps(found.to_dict()) == dumps(read_run(found.folder).summary)
    assert " ".join(str(found).split()).startswith(found.summary.answer)
    assert "verdict" in str(found)
    assert "&lt;title&gt;" in found._repr_html_()
    assert read_run(found.folder).header.settings.budget == 120


@pytest.mark.slow
def test_ctrl_c_ends_it_and_the_same_task_goes_on(tmp_path, monkeypatch, capsys, request):
    # A shell's background job begins with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    folder, tasks, killed = tmp_path / "run", [make_task(), make_task()], []
    whole = steadygrad.advise(make_task(), out=tmp_path / "whole", **PLAIN)

    def write(*arguments):
        path = write_result(*arguments)
        if len(list(folder.glob("results/*"))) == 3 and not killed:
            killed.append(path)
            os.kill(os.getpid(), signal.SIGINT)
        return path

    monkeypatch.setattr("steadygrad.studies.work.write_result", write)
    with pytest.raises(KeyboardInterrupt):
        steadygrad.advise(tasks[0], out=folder, **PLAIN)
    assert read_run(folder).summary["status"] == "interrupted"
    # No other process has the task, and no built-in or other one takes its place.
    assert main(["advise", "--resume", str(folder)]) == 2
    assert "a Task object" in capsys.readouterr().err
    with pytest.raises(ValueError, match="task = 'a Task object'"):
        steadygrad.advise("char-lm", resume=folder, progress=False)
    with pytest.raises(ValueError, match=r"lr = 0\.001"):
        steadygrad.advise(make_task(lr=0.5), resume=folder, progress=False)
    found = steadygrad.advise(tasks[1], resume=folder, progress=False)
    assert dumps(found.to_dict()) == dumps(whole.to_dict())
    assert timeless(folder) == timeless(whole.folder)
    # A complete run needs no task.
    kept = contents(folder)
    again = steadygrad.advise(resume=folder, progress=False)
    assert dumps(again.summary) == dumps(found.summary)
    assert contents(folder) == kept


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (make_task, {}, "Found function"),
        ("no-task", {}, "'no-task'"),
        ("char-lm", {"budget": "soon"}, "--budget.*'soon'"),
        ("char-lm", {"budget": 0}, "budget"),
        ("char-lm", {"tolerance": 2}, "--tolerance.*'2'"),
        ("char-lm", {"tolerence": 0.1}, "--tolerance"),
        (make_task(), {"workers": 2}, "workers"),
        (make_task(), {"workers": "auto"}, "workers"),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_is_written(task, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        steadygrad.advise(task, **{"out": tmp_path / "run", **PLAIN, **options})
    assert list(tmp_path.iterdir()) == []


def test_a_list_is_the_text_of_the_command_line():
    given = {"batch_sizes": [32, 64], "keep_half_life": True}
    assert _words([], given) == ["--batch-sizes=32,64", "--keep-half-life"]


def test_a_second_study_at_the_same_time_is_refused(tmp_path):
    """Torch's random numbers are the process's."""
    with _alone(), pytest.raises(ValueError, match="at a time"):
        steadygrad.advise("char-lm", out=tmp_path / "run", **PLAIN)
    assert list(tmp_path.iterdir()) == []


SCRIPT = f"""
import random

import steadygrad
from tests.unit.cli.quick import quick

before = random.getstate()
with quick():
    found = steadygrad.advise("tiny.py:make_task", workers=2, out="run", **{PLAIN})
assert random.getstate() == before
print(found.summary.answer)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_may_have_workers(tmp_path):
    """Spawn would run it again in every worker. Packages that it imports draw random numbers."""
    (tmp_path / "script.py").write_text(SCRIPT)
    shutil.copy(tiny().rpartition(":")[0], tmp_path / "tiny.py")
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.stderr, done.stdout.count("\n")) == ("", 1)
