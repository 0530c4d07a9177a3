"""How the trials are run: where runs are evaluated, and what their losses stand for."""

import math

import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.plan import (
    END_MARKS,
    FRACTIONS,
    averaged_end,
    end_marks,
    scratch_job,
)
from steadygrad.studies.advise.schema import Plan
from steadygrad.studies.advise.trials import TRIALS
from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.workplace import Workplace
from tests.unit.studies.framework import PLAN, begin, make_trainer
from tests.unit.studies.tiny_task import diverging_branches, make_task, without_dropout


def run_job(job, plan, place):
    return TRIALS[job["kind"]](plan, place, **{n: v for n, v in job.items() if n != "kind"})


@pytest.fixture
def place(tmp_path):
    """Where jobs of a task without random numbers are run, in float64."""
    trainer = make_trainer(without_dropout(), dtype="float64")
    return Workplace(trainer, Checkpoints(tmp_path), lambda samples, what: None)


def plan(length) -> Plan:
    return replace(PLAN, points=(length // 4, length))


def evaluated(place, monkeypatch):
    """Numbers of steps after which the trainer was evaluated, and the losses there."""
    found, evaluate = [], place.trainer.evaluate

    def watched():
        found.append((place.trainer.steps, evaluate()))
        return found[-1][1]

    monkeypatch.setattr(place.trainer, "evaluate", watched)
    return found


@pytest.mark.parametrize("length", [64, 256, 1200])
def test_the_smallest_batch_from_scratch_is_the_main_trajectory(place, monkeypatch, length):
    """With its seed: as many evaluations at the same places, the last ones averaged."""
    whole, found, ends = plan(length), evaluated(place, monkeypatch), end_marks(length, 4)
    run = run_job(scratch_job(((0, 4),), length), whole, place)
    assert all(at < ends[0] for at, _ in run.curve[:-1])
    assert [4 * steps for steps, _ in found] == [at for at, _ in run.curve[:-1]] + ends
    assert (run.samples, run.loss) == run.curve[-1]
    assert run.samples == sum(ends) / len(ends)
    assert run.loss == math.fsum(loss for _, loss in found[-len(ends) :]) / len(ends)
    first, second = (run_job({"kind": "point", "point": i}, whole, place) for i in (0, 1))
    assert first.curve[-1] == (length // 4, first.valid_loss)
    assert second.curve[-1] == (length, second.valid_loss)
    curve = averaged_end(second.curve)
    assert [at for at, _ in run.curve] == [at for at, _ in curve]
    assert [loss for _, loss in run.curve] == pytest.approx([loss for _, loss in curve])


@pytest.mark.parametrize(("size", "steps"), [(100, 2), (200, 1), (256, 1), (60, 4), (12, 21)])
def test_every_batch_size_has_a_loss(place, monkeypatch, size, steps):
    """256 samples are evaluated from 240 on; batches of 100 and of 200 end before."""
    found = evaluated(place, monkeypatch)
    run = run_job(scratch_job(((0, size),), 256), plan(256), place)
    assert run.steps == steps == place.trainer.steps
    assert math.isfinite(run.loss)
    assert run.curve == ((run.samples, run.loss),)
    last = [number for number, _ in found]
    assert run.samples == round(size * sum(last) / len(last))
    late = {number for number in range(1, steps + 1) if size * number >= 240}
    assert set(last) == (late or {steps})


def test_a_schedule_is_averaged_over_the_same_end(place, monkeypatch):
    found = evaluated(place, monkeypatch)
    stages = ((0, 4), (64, 16))
    job = scratch_job(stages, 1200, warmup_samples=64)
    run = run_job(job, plan(1200), place)
    steps = 16 + (1200 - 64) // 16
    assert run.steps == steps
    assert len(found) == len(end_marks(1200, 4)) == 5
    assert [stage.from_samples for stage in run.stages] == [0, 64]
    assert [stage.lr for stage in run.stages] == pytest.approx([0.001, 0.002])


def test_the_learning_rate_decays_over_the_run_that_is_trained(tmp_path, monkeypatch):
    """Runs from scratch may be shorter than the main trajectory."""
    trainer, rates = make_trainer(make_task(lr_decay="linear")), []
    place, evaluate = Workplace(trainer, Checkpoints(tmp_path), lambda *_: None), trainer.evaluate

    def watched():
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        return evaluate()

    monkeypatch.setattr(trainer, "evaluate", watched)
    run_job(scratch_job(((0, 4),), 256), plan(1024), place)
    # The middle of the last step's batch of four.
    assert rates[-1] == pytest.approx(0.001 * 2 / 256)
    assert rates == sorted(rates, reverse=True)


def test_branches_are_evaluated_at_the_largest_batchs_last_steps(place, monkeypatch):
    whole = plan(256)
    run_job({"kind": "point", "point": 0}, whole, place)
    for size in (4, 8, 16):
        found = evaluated(place, monkeypatch)
        job = {"kind": "branch", "point": 0, "repeat": 1, "batch_size": size}
        run = run_job(job, whole, place)
        assert run.samples == 80 == (64 + 80 + 96) / END_MARKS
        assert run.loss == math.fsum(loss for _, loss in found[-END_MARKS:]) / END_MARKS
        way = [at for at in (round(24 * part) * 4 for part in FRACTIONS) if at < 64]
        assert [at for at, _ in run.curve] == [*(way if size == 4 else []), 80]
        monkeypatch.undo()


def test_a_run_that_diverges_has_one_loss(tmp_path):
    trainer = make_trainer(diverging_branches())
    place = Workplace(trainer, Checkpoints(tmp_path), lambda samples, what: None)
    run = run_job(scratch_job(((0, 64),), 1024), plan(1024), place)
    assert (run.loss, run.curve) == (math.inf, ((1024, math.inf),))


def test_weights_that_never_move_give_no_advice(tmp_path):
    """The optimizer ignores its learning rate: all losses are equal, and none falls."""
    found, _ = begin(tmp_path / "run", "still", at=None)
    assert found.summary.recommendation.batch_size is None
    assert found.summary.going_on is None
    assert [point.critical.fall for point in found.summary.points] == [0.0, 0.0]
    assert found.summary.recommendation.why == "flat"
    assert "validation loss of batch 4 does not fall" in found.summary.answer
