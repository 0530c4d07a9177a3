"""Studies of ``Task`` objects: pairs, the record, failed runs, lengths, memory."""

from dataclasses import replace

import pytest
import torch

from steadygrad.studies.ab.trials import arms_of
from steadygrad.studies.folder import read_run
from tests.unit.studies import tiny_task
from tests.unit.studies.ab import functions
from tests.unit.studies.ab.runs import study, values
from tests.unit.studies.framework import tiny


def test_tasks_are_paired(tmp_path):
    """The same initial weights and order of data: equal tasks give equal losses."""
    task = tiny_task.make_task()
    same = study(tmp_path / "run", task, tiny_task.make_task(), samples=64)
    own, other = values(same)
    assert own == other
    assert len({*own}) == len(own)
    (row,) = same.summary.findings
    assert (row.verdict, row.mean, row.low, row.high) == ("no difference", 0, 0, 0)
    itself = study(tmp_path / "itself", task, samples=64, pairs=5)
    own, again = values(itself)
    assert len({*own, *again}) == 10
    assert itself.summary.findings[0].noise > 0


def test_another_learning_rate_is_told(tmp_path):
    words = tiny(), f"{functions.__file__}:faster"
    (row,) = study(tmp_path / "run", *words, samples=256).summary.findings
    assert row.verdict == "better"


def test_each_tasks_data_and_start_are_in_the_record(tmp_path):
    task, start = tiny_task.make_task(), tmp_path / "start.pt"
    start.write_bytes(b"one")
    other = replace(task, start=start, provenance={"corpus": "mine"})
    before = arms_of([task, other]).provenance
    start.write_bytes(b"two")
    after = arms_of([task, other]).provenance
    assert {key for key in before if before[key] != after[key]} == {"B1: Task.start"}
    assert before["B1: corpus"] == "mine"
    assert task.provenance == arms_of([task]).provenance == tiny_task.make_task().provenance


def test_a_task_that_diverges_has_failed(tmp_path):
    tasks = tiny_task.make_task(), tiny_task.make_task(lr=1e30)
    (row,) = study(tmp_path / "run", *tasks, samples=64).summary.findings
    assert (row.verdict, row.failed) == ("worse", (0, 4))


def test_memory_that_runs_out_in_a_run_of_b_halves_its_own_micro_batch(tmp_path):
    """In the middle of each run, and the next one begins with the whole batch again."""
    plain, calls, lost = tiny_task.without_dropout(), [], []

    def hungry(model, batch):
        calls.append(batch)
        if len(calls) > 100 and model.training and len(batch[0]) > 1:
            lost.append(len(batch[0]))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tiny_task.losses(model, batch)

    tasks = plain, replace(plain, per_sample_loss=hungry)
    own, other = values(study(tmp_path / "run", *tasks, samples=512, pairs=3))
    assert other == pytest.approx(own, rel=1e-5)
    assert lost == [4, 2] * 3


def test_each_task_ends_on_a_whole_step_of_its_own(tmp_path):
    tasks = tiny_task.make_task(batch_size=8), tiny_task.make_task(batch_size=12)

    def runs(samples):
        return values(study(tmp_path / f"{samples}", *tasks, samples=samples, pairs=1))

    # Six and four steps of both; the schedule of the learning rate ends with them.
    assert runs(53) == runs(48) != runs(40)
    assert runs(3)[1] == runs(12)[1]


def test_without_a_length_runs_take_ten_passes_over_the_data(tmp_path):
    tasks = tiny_task.make_task(), tiny_task.make_task()
    found = study(tmp_path / "run", *tasks, pairs=1)
    assert read_run(found.folder).header.plan.samples == 10 * len(tasks[0].train)
