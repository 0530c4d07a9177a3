"""A run that was stopped or whose files were changed, against one that was not."""

import math
import pickle
import random
import shutil

import numpy as np
import pytest

from steadygrad._checks import InputError
from steadygrad.studies.advise.schema import Branch, Settings
from steadygrad.studies.folder import read_run, write_summary
from steadygrad.studies.run import resume, start
from steadygrad.studies.strict_json import dumps
from steadygrad.studies.work import run_job
from tests.unit.studies.framework import (
    FILES,
    PLAN,
    Watcher,
    begin,
    contents,
    copy,
    go_on,
    left,
    lines,
    part,
    summary,
    tiny,
)
from tests.unit.studies.results import rewrite_header

# Of 10,628 samples of work; the second point is reached before the later one.
EARLY, LATE = 400, 10200


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "run"
    begin(folder)
    return folder


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    folder = copy(base, tmp_path_factory.mktemp("whole") / "run")
    go_on(folder)
    return folder


@pytest.fixture(scope="module")
def cut(base, tmp_path_factory):
    """Stopped after the second point."""
    folder = copy(base, tmp_path_factory.mktemp("cut") / "run")
    while not (folder / "checkpoints" / "point-1.pt").exists():
        part(folder, 600)
    return folder


def test_the_whole_run(whole):
    run = read_run(whole)
    assert run.summary["status"] == "complete"
    expected = [
        (i, repeat, 4 * multiple)
        for i in (0, 1)
        for repeat in (0, 1)
        for multiple in PLAN.multiples[i]
    ]
    branches = run.select(Branch)
    planned = [b for b in branches if b.batch_size in (4, 8, 16)]
    assert [(b.point, b.repeat, b.batch_size) for b in planned] == expected
    for branch in planned:
        assert branch.steps == PLAN.branch_samples[branch.point] // branch.batch_size
        assert branch.lr == pytest.approx(0.001 * math.sqrt(branch.batch_size / 4))
        assert branch.curve[-1] == (branch.samples, branch.loss)
    assert left(whole) == FILES


@pytest.mark.few(1)
@pytest.mark.parametrize("at", [EARLY, LATE])
def test_stopped_and_resumed_to_the_same_numbers(base, whole, tmp_path, at):
    folder = copy(base, tmp_path / "run")
    outcome, watcher = part(folder, at)
    assert outcome.summary.status == "budget"
    assert at <= watcher.done < watcher.total
    outcome, watcher = go_on(folder)
    assert lines(folder) == lines(whole)
    assert summary(folder) == summary(whole)
    assert watcher.lines == []
    # Nothing is trained twice but the trial that was stopped in the middle.
    again = [stage for stage in watcher.stages if stage.startswith("training")]
    assert len(again) == (2 if at == EARLY else 0)


def test_a_complete_run_is_not_run_again(whole):
    before, written = contents(whole), (whole / "summary.json").stat()
    outcome, watcher = go_on(whole, budget=5.0)
    assert outcome.summary.status == "complete"
    assert contents(whole) == before
    # Nor written again: the folder may be one that only its owner can write to.
    assert (whole / "summary.json").stat().st_mtime_ns == written.st_mtime_ns
    assert watcher.stages == []
    (line,) = watcher.lines
    assert line.endswith("Remedy: start a new run with a longer --budget.")


def test_a_complete_run_gets_the_summary_of_todays_words(whole, tmp_path):
    folder = copy(whole, tmp_path / "run")
    now, old = read_run(folder).summary, {"words": ["Words of an older version."]}
    write_summary(folder, now | old)
    assert summary(folder) == dumps(now | old)
    assert dumps(go_on(folder)[0].summary) == dumps(now)
    assert summary(folder) == dumps(now)


@pytest.mark.slow
def test_another_run_of_the_same_seed_has_the_same_record(whole, tmp_path):
    begin(tmp_path / "again", at=None)
    assert lines(tmp_path / "again") == lines(whole)
    begin(tmp_path / "other", seed=1, at=2000)
    assert lines(tmp_path / "other")[0] != lines(whole)[0]


# Checkpoints


def exchange(folder):
    shutil.copy(folder / "point-0.pt", folder / "point-1.pt")


def edit(folder):
    path = folder / "point-1.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(folder):
    path = folder / "point-1.pt"
    path.write_bytes(path.read_bytes()[:1000])


def delete(folder):
    shutil.rmtree(folder)


def pickle_in_place(folder):
    for path in folder.iterdir():
        path.write_bytes(pickle.dumps({"name": path.stem}))


@pytest.mark.few(1)
@pytest.mark.parametrize("damage", [exchange, edit, truncate, delete, pickle_in_place])
def test_a_checkpoint_that_cannot_be_trusted_is_trained_anew(cut, whole, tmp_path, damage):
    folder = copy(cut, tmp_path / "run")
    damage(folder / "checkpoints")
    _, watcher = go_on(folder)
    assert any(stage.startswith("training to 256") for stage in watcher.stages)
    assert watcher.lines == []
    assert lines(folder) == lines(whole)
    assert summary(folder) == summary(whole)


def test_checkpoints_that_are_whole_are_not_trained_anew(cut, tmp_path):
    """Else the test above says nothing."""
    folder = copy(cut, tmp_path / "run")
    _, watcher = part(folder, 200)
    assert not any(stage.startswith("training") for stage in watcher.stages)


def test_a_file_in_place_of_all_checkpoints_is_said(cut, tmp_path):
    folder = copy(cut, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").write_text("mine")
    with pytest.raises(InputError, match=r"folder for checkpoints.*Remedy: remove what is in its"):
        go_on(folder)
    assert read_run(folder).summary["status"] == "failed"


# What must not change


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": 1}, "takes seed = 0 from the record. Found 1. Remedy: leave --seed away"),
        ({"dtype": "float64"}, "takes dtype = 'float32' from the record"),
        ({"tolerance": 0.5}, "takes tolerance = 0.2"),
        ({"keep_half_life": True}, "leave --keep-half-life away"),
        ({"threads": 2}, "takes threads = 1"),
        ({"sharding": "fsdp2"}, "takes sharding = 'ddp'"),
        ({"task": "char-lm"}, "leave TASK away"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_differ_are_refused(cut, given, message):
    before = contents(cut)
    with pytest.raises(InputError, match=message):
        go_on(cut, **given)
    assert contents(cut) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["settings"].update(task=tiny("other_data")), "sha256 = '0000"),
        (lambda h: h["task"].update(batch_size=8), "batch_size = 8 as in the record. Found 4"),
        (lambda h: h["task"].update(parameters=7), "parameters = 7 as in the record"),
        (lambda h: h["task"].update(optimizer="SGD"), "optimizer = 'SGD'"),
        (lambda h: h["runtime"].update(world_size=2), "world_size = 2 .*torchrun"),
    ],
    ids=["data", "batch size", "model", "optimizer", "processes"],
)
def test_what_must_not_change(cut, tmp_path, change, message):
    folder = copy(cut, tmp_path / "run")
    rewrite_header(folder, change)
    before = contents(folder)
    with pytest.raises(InputError, match=message):
        go_on(folder, task=read_run(folder).header.settings.task)
    assert contents(folder) == before


def test_what_may_change_is_told(cut, tmp_path):
    folder = copy(cut, tmp_path / "run")
    rewrite_header(folder, lambda h: h["environment"].update(torch="1.0"))
    _, watcher = part(folder, 1, task=tiny())
    assert [line.split(" and is ")[0] for line in watcher.lines] == ["torch was 1.0"]


def test_a_worker_notices_that_another_run_is_in_the_folder(base, tmp_path):
    """A cluster's workers outlive a run, and folders are used again."""
    folder, job = copy(base, tmp_path / "run"), {"kind": "point", "point": 0}
    first = run_job(str(folder), job, files := dumps({tiny(): tiny()}))
    shutil.rmtree(folder)
    begin(folder, seed=1)
    second = run_job(str(folder), job, files)
    assert first.valid_loss != second.valid_loss
    assert read_run(folder).header.settings.seed == 1


@pytest.mark.parametrize("name", ["results", "checkpoints"])
def test_a_run_whose_folders_are_links_is_left_alone(cut, tmp_path, name):
    """A stranger's may lead anywhere."""
    folder = copy(cut, tmp_path / "run")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    before = left(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=f"'{name}', a link"):
        go_on(folder)
    assert left(tmp_path / "elsewhere") == before


def test_a_record_of_another_study_is_refused(base):
    before = contents(base)
    with pytest.raises(InputError, match=r"run of `steadygrad inspect`\. Found one of `steadyg"):
        resume(base, name="inspect", monitor=Watcher())
    assert contents(base) == before


def test_an_optimizer_that_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    settings = Settings(task=tiny("unsavable"), device="cpu", workers=1, threads=1)
    with pytest.raises(InputError, match="optimizer's state should hold tensors"):
        start("advise", settings, tmp_path / "run", monitor=Watcher())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_numpy_in_a_task_does_not_change_a_resumed_run(tmp_path):
    """Its noise comes from numpy and from Python: both are seeded for each trial."""
    whole, _ = begin(tmp_path / "whole", "augmented", at=None)
    begin(tmp_path / "cut", "augmented", at=1500)
    assert 1 < len(lines(tmp_path / "cut")) < len(lines(tmp_path / "whole")) - 5
    np.random.rand(17)
    random.random()
    go_on(tmp_path / "cut")
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert whole.summary.status == "complete"
