"""A run that was stopped or whose files were changed, against one that was not."""

import shutil
import time

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.studies.advise.schema import Settings
from steadygrad.studies.distributed import Deadline
from steadygrad.studies.folder import RunError, dumps, read_run, write_summary
from steadygrad.studies.paired import SEEDS
from steadygrad.studies.record import OBJECT
from steadygrad.studies.run import resume, start
from steadygrad.studies.schema import Training
from steadygrad.studies.work import run_trial
from tests.refusals import refused
from tests.unit.studies import tiny_task
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
    planned,
    recorded,
    summary,
    timeless,
    tiny,
)
from tests.unit.studies.results import rewrite_header, trial


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "run"
    begin(folder)
    return folder


def test_stopped_and_resumed_to_the_same_numbers(base, whole, tmp_path):
    folder = copy(base, tmp_path / "run")
    outcome, watcher = part(folder, 1500)
    assert outcome.summary.status == "budget"
    assert 1500 <= watcher.done < watcher.total
    kept = contents(folder)
    assert len(kept) > 2
    _, watcher = go_on(folder)
    assert lines(folder) == lines(whole)
    assert summary(folder) == summary(whole)
    assert left(folder) == FILES
    assert watcher.lines == []
    # No result is there a second time, with another time of its own.
    assert kept.items() <= contents(folder).items()


def test_a_budget_of_its_own_ends_a_resumed_run(base, tmp_path):
    outcome = resume(
        copy(base, tmp_path / "run"), {"budget": 1e-6}, deadline=Deadline(), monitor=Watcher()
    )
    assert outcome.summary.status == "budget"


def test_a_budget_that_is_over_before_the_run_began_leaves_a_run(tmp_path):
    """As where the task takes long to make; an evaluation of its own asks the clock first."""
    task = tiny_task.make_task(evaluate=lambda model, valid: 1.0)
    known = {"task": OBJECT, "device": "cpu", "threads": 1, "workers": 1, "budget": 60.0}
    with planned(PLAN):
        late = {"deadline": Deadline(time.monotonic() - 1e6), "monitor": Watcher()}
        outcome = start("advise", Settings(**known), tmp_path / "run", task=task, **late)
    assert (outcome.summary.status, recorded(tmp_path / "run")) == ("budget", 0)


def test_a_complete_run_is_not_run_again(whole, tmp_path):
    folder = copy(whole, tmp_path / "run")
    before, written = contents(folder), (folder / "summary.json").stat()
    outcome, watcher = go_on(folder, budget=5.0)
    assert outcome.summary.status == "complete"
    assert contents(folder) == before
    # Nor written again: the folder may be one that only its owner can write to.
    assert (folder / "summary.json").stat().st_mtime_ns == written.st_mtime_ns
    assert watcher.stages == []
    assert ["complete" in line for line in watcher.lines] == [True]
    # It gets the summary of today's words.
    now = read_run(folder).summary
    write_summary(folder, now | {"words": ["Words of an older version."]})
    assert dumps(go_on(folder)[0].summary) == dumps(now)
    assert summary(folder) == dumps(now)


def test_a_complete_run_may_have_more_seeds(whole, tmp_path):
    """But none that no look takes."""
    folder = copy(whole, tmp_path / "run")
    outcome, watcher = go_on(folder, seeds=9)
    assert (outcome.summary.status, watcher.stages != []) == ("complete", True)
    assert timeless(whole).items() < timeless(folder).items()
    seeds = {run.seed for run in read_run(folder).results.select(Training)}
    assert seeds == {*range(8), *SEEDS}
    # Fewer than were planned are no limit: they could end a study before its first look.
    outcome, watcher = go_on(copy(whole, tmp_path / "few"), seeds=3)
    assert (outcome.summary.status, watcher.stages) == ("complete", [])
    begin(tmp_path / "new", at=1)
    assert go_on(tmp_path / "new", seeds=3)[0].summary.checked


def test_a_complete_run_is_of_no_other_task(whole, tmp_path):
    """The answer of another task would be taken for that of this one."""
    folder = copy(whole, tmp_path / "run")
    twice = lambda model, batch: 2 * tiny_task.make_task().per_sample_loss(model, batch)
    sgd = lambda parameters, lr: torch.optim.SGD(parameters, lr)
    changes = {"name": "other", "lr": 0.5, "per_sample_loss": twice, "make_optimizer": sgd}
    named = {"per_sample_loss": "losses before training", "make_optimizer": "optimizer"}
    for name, value in changes.items():
        task = tiny_task.make_task(**{name: value})
        with refused(named.get(name, name)):
            resume(folder, {}, task=task, deadline=Deadline(), monitor=Watcher())
    task = tiny_task.make_task()
    again = resume(folder, {}, task=task, deadline=Deadline(), monitor=Watcher())
    assert dumps(again.summary) == summary(folder)


# What must not change


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda header: header["settings"].update(task=tiny("other_data")), "sha256 = '0000"),
        (lambda header: header["task"].update(batch_size=8), "batch_size = 8"),
        (lambda header: header["task"].update(optimizer="SGD"), "optimizer = 'SGD'"),
        (lambda header: header["runtime"].update(world_size=2), "world_size = 2"),
    ],
    ids=["data", "batch size", "optimizer", "processes"],
)
def test_what_must_not_change(base, tmp_path, change, name):
    folder = copy(base, tmp_path / "run")
    rewrite_header(folder, change)
    before = contents(folder)
    with refused(name):
        go_on(folder, task=read_run(folder).header.settings.task)
    assert contents(folder) == before


def test_what_may_change_is_told(base, tmp_path):
    folder = copy(base, tmp_path / "run")
    rewrite_header(folder, lambda header: header["environment"].update(torch="1.0"))
    _, watcher = part(folder, 1, task=tiny())
    assert [line.split(" and is ")[0] for line in watcher.lines] == ["torch was 1.0"]


def test_a_worker_notices_that_another_run_is_in_the_folder(base, tmp_path):
    """A cluster's workers outlive a run, and folders are used again."""
    folder, files = copy(base, tmp_path / "run"), dumps({tiny(): tiny()})
    first = run_trial(str(folder), trial(0, 256), files)
    shutil.rmtree(folder)
    begin(folder, seed=1)
    second = run_trial(str(folder), trial(0, 256), files)
    assert first.loss != second.loss
    assert read_run(folder).header.settings.seed == 1


def test_a_run_whose_folder_is_a_link_is_left_alone(base, tmp_path):
    """A stranger's may lead anywhere."""
    folder = copy(base, tmp_path / "run")
    (folder / "results").rename(tmp_path / "elsewhere")
    (folder / "results").symlink_to(tmp_path / "elsewhere")
    before = left(tmp_path / "elsewhere")
    with refused("'results'", kind=RunError):
        go_on(folder)
    assert left(tmp_path / "elsewhere") == before


def test_a_record_of_another_study_is_refused(base):
    before = contents(base)
    with pytest.raises(InputError, match=r"steadygrad inspect.*steadygrad advise"):
        resume(base, name="inspect", deadline=Deadline(), monitor=Watcher())
    assert contents(base) == before
