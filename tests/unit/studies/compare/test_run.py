"""Real studies of a tiny task: what is recorded, paired, resumed and refused."""

import math
from dataclasses import replace

import pytest
from msgspec.structs import replace as but

from steadygrad._checks import InputError
from steadygrad.studies.compare.trials import tried
from steadygrad.studies.folder import read_run
from steadygrad.studies.page import render
from steadygrad.studies.schema import Training
from tests.unit.studies import tiny_task
from tests.unit.studies.compare.runs import ADDED, Places, begin, planned
from tests.unit.studies.framework import go_on, lines, part

SMALL = planned(("adamw", "lans"), samples=64, seeds=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A study of LANS on one process, from the task to its page."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    outcome, _ = begin(folder, at=None, plan=SMALL, optimizers="lans")
    assert outcome.summary.status == "complete"
    return folder


def test_a_study_from_its_task_to_its_page(whole):
    found = read_run(whole).summary
    (row,) = (each for each in found["findings"] if each["kind"] == "verdict")
    assert (row["optimizer"], row["pairs"], [*row["losses"]]) == ("lans", 4, [*"0123"])
    own = {run.key: run for run in read_run(whole).results.select(Training)}
    step = found["tuned"][1]["step"]
    assert [own["training", 1, 64, step, seed].loss for seed in range(4)] == [
        *row["losses"].values()
    ]
    assert row["lr"] == own["training", 1, 64, step, 0].lr == 1e-3 * 2**step
    # The baseline's halves for the samples that it needs.
    assert {run.seed for run in own.values() if (run.arm, run.samples) == (0, 32)} == {*range(4)}
    assert "Losses by seed" in render(read_run(whole))


@pytest.mark.slow
def test_workers_and_interruptions_change_nothing(whole, tmp_path):
    workers, _ = begin(tmp_path / "two", at=None, plan=SMALL, optimizers="lans", workers=2)
    assert lines(tmp_path / "two") == lines(whole)
    begin(tmp_path / "cut", at=300, plan=SMALL, optimizers="lans")
    assert 2 < len(lines(tmp_path / "cut")) < len(lines(whole))
    part(tmp_path / "cut", 900)
    outcome, _ = go_on(tmp_path / "cut")
    assert lines(tmp_path / "cut") == lines(whole)
    assert len({repr(untimed(found.summary)) for found in (outcome, workers)}) == 1


def untimed(summary):
    """Without what the time of the trainings decides."""
    rows = [but(row, time_ratio=None) for row in summary.verdicts]
    return rows, summary.tuned


@pytest.mark.slow
def test_the_tasks_optimizer_and_two_of_the_users_own(tmp_path):
    names = ("adamw", "sgd", "muon", "task", "adamax", "grouped")
    plan = planned(names, (4, 16), samples=64, seeds=6)
    added = {"optimizers": "sgd,muon,task", "add": f"{ADDED}:adamax,{ADDED}:grouped"}
    # In float16 a loss scale steps all of them, also Muon with AdamW.
    outcome, _ = begin(tmp_path / "run", at=None, plan=plan, dtype="float16", **added)
    found = outcome.summary
    assert found.status == "complete"
    assert list(found.optimizers.values())[-3:] == ["AdamW of the task", "adamax", "grouped"]
    assert len(found.verdicts) == 5 * 2
    # AdamW of the task has the same default rate and decay: the same trainings, to the bit.
    own = [row for row in found.verdicts if row.optimizer == "task"]
    assert [(row.mean, row.verdict) for row in own] == [(0, "cannot tell")] * 2
    assert all(row.losses == row.baseline_losses for row in own)


def test_pairs_share_weights_data_and_random_numbers(monkeypatch):
    """At a learning rate of zero all optimizers see the same losses, dropout included."""
    # One of them draws random numbers of its own when it is made.
    places = Places(optimizers="lans,sgd,muon,task", add=f"{ADDED}:drawing")
    monkeypatch.setattr("steadygrad.tasks.Task.lr_factor", lambda self, samples_seen, total: 0.0)
    seen = {}
    step = places.trainer.step

    def watched(indices, ready=None):
        step(indices, ready)
        losses.append((indices.tolist(), float(places.trainer._losses[-1])))

    monkeypatch.setattr(places.trainer, "step", watched)
    for optimizer in ("adamw", "lans", "sgd", "muon", "task", "drawing"):
        for seed in (0, 1, 64):
            losses = []
            run = places.train(optimizer, seed=seed)
            assert len(losses) == 32
            seen.setdefault(seed, []).append((run.loss, losses))
    for found in seen.values():
        assert all(each == found[0] for each in found)
    # Seeds differ in weights and in data.
    assert len({found[0][0] for found in seen.values()}) == 3
    assert len({str(found[0][1][0][0]) for found in seen.values()}) == 3


def test_a_training_has_the_batch_size_and_the_schedule_that_it_is_named_by():
    places, seen = Places(optimizers="lans"), []
    trainer, step = places.trainer, places.trainer.step

    def watched(indices, ready=None):
        step(indices, ready)
        seen.append((len(indices), trainer.optimizer.param_groups[0]["lr"]))

    trainer.step = watched
    places.train("lans", step=0.5, size=16, samples=640)
    assert [size for size, _ in seen] == [16] * 40
    # Linear from nothing over the first tenth, and to nothing over the rest; the rate to begin with
    # is twice the default, by the square root of the batch sizes.
    top = 2e-3 * 2**0.5
    for number, (_, lr) in enumerate(seen):
        # As in the middle of each step.
        begun, left = (number + 0.5) / 4, (39.5 - number) / 36
        assert lr == pytest.approx(top * min(begun, left, 1.0))


def test_a_training_is_the_same_whatever_ran_before():
    places = Places(optimizers="muon,sgd")
    first = places.train("muon", seed=2)
    places.train("sgd", step=10, samples=64)
    tried(places.trainer, "sgd", places.entries["sgd"])
    places.train("adamw", size=16)
    assert places.train("muon", seed=2) == first
    assert Places(optimizers="muon").train("muon", seed=2) == first
    # It leaves the task as it was.
    assert places.trainer.task.lr == 0.001


def test_a_training_that_diverges_is_infinitely_bad():
    places = Places(optimizers="sgd")
    run = places.train("sgd", step=40)
    assert (run.loss, run.curve) == (math.inf, ((128, math.inf),))
    assert math.isfinite(places.train("sgd").loss)
    # An evaluation that is not finite, after training losses that are to the end.
    task = replace(tiny_task.make_task(), evaluate=lambda model, samples: math.nan)
    assert Places(task, optimizers="sgd").train("sgd").loss == math.inf


def test_all_that_a_training_does_counts_as_work():
    places = Places(optimizers="lans")
    run = places.train("lans")
    # An evaluation of 64 samples is a third.
    assert sum(places.told) == 128 + 22
    assert run.curve == ((run.samples, run.loss),)


def test_a_task_that_breaks_in_the_search_keeps_what_is_measured(tmp_path):
    with pytest.raises(InputError, match=r"Task\.per_sample_loss"):
        begin(tmp_path / "run", "loss_raises_later", at=None, plan=SMALL, optimizers="lans")
    assert read_run(tmp_path / "run").summary["status"] == "failed"
