"""How the trials are run: where trainings are evaluated, and what their losses stand for."""

import math
from statistics import fmean

import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.plan import END_MARKS, FRACTIONS, end_marks, lengths_of
from steadygrad.studies.advise.schema import Plan, Settings
from steadygrad.studies.advise.trials import TRIALS
from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.trainer import Diverged
from steadygrad.studies.workplace import Workplace
from tests.unit.studies.framework import PLAN, make_trainer
from tests.unit.studies.results import make_header
from tests.unit.studies.tiny_task import diverging, diverging_branches, make_task, without_dropout


def run_job(job, plan, place):
    return TRIALS[job["kind"]](plan, place, **{n: v for n, v in job.items() if n != "kind"})


def scratch_job(course, samples, *, warmup_samples=0, rate=1.0, repeat=0):
    known = {"repeat": repeat, "rate": rate, "warmup_samples": warmup_samples}
    return {"kind": "scratch", "course": course, "samples": samples, **known}


def place_of(folder, task, **options):
    trainer = make_trainer(task, **options)
    return Workplace(trainer, Checkpoints(folder), lambda samples, what: None, make_header())


@pytest.fixture
def place(tmp_path):
    """Where jobs of a task without random numbers are run, in float64."""
    return place_of(tmp_path, without_dropout(), dtype="float64")


def plan(length) -> Plan:
    return replace(PLAN, samples=length, points=(length // 4, length))


def evaluated(place, monkeypatch):
    """Where the trainer was evaluated: steps, loss and learning rate."""
    found, trainer, evaluate = [], place.trainer, place.trainer.evaluate

    def watched():
        rate = trainer.optimizer.param_groups[0]["lr"]
        found.append((trainer.steps, evaluate(), rate))
        return found[-1][1]

    monkeypatch.setattr(trainer, "evaluate", watched)
    return found


def test_the_smallest_batch_is_evaluated_at_the_end_of_each_length(place, monkeypatch):
    """It passes them all, where no rate decays; each loss is a mean of the last evaluations."""
    found, length = evaluated(place, monkeypatch), 1200
    run = run_job(scratch_job("4", length), plan(length), place)
    losses = {4 * steps: loss for steps, loss, _ in found}
    assert len(run.curve) == 3
    for n, (at, loss) in zip(lengths_of(length, 0.2), run.curve, strict=True):
        # A step ends at its mark, or is the first after it.
        ends = {math.ceil(mark / 4) * 4 for mark in end_marks(n, decays=False)}
        assert at == pytest.approx(fmean(ends))
        assert loss == pytest.approx(fmean(losses[end] for end in ends), rel=1e-12)
    assert (run.place, run.loss) == run.curve[-1]
    assert (run.steps, run.samples, run.batch_size) == (length // 4, length, 4)
    # The points and the branches' main trajectory are the same training.
    first, second = (run_job({"kind": "point", "point": i}, plan(length), place) for i in (0, 1))
    assert (first.samples, second.samples) == (length // 4, length)
    assert second.valid_loss == pytest.approx(losses[length], rel=1e-12)


def test_each_seed_is_a_training_of_its_own(place, monkeypatch):
    began, restart = [], place.trainer.restart
    monkeypatch.setattr(place.trainer, "restart", lambda seed: began.append(seed) or restart(seed))

    def losses(course, repeat):
        return run_job(scratch_job(course, 256, repeat=repeat), plan(256), place).loss

    assert losses("4", 0) == losses("4", 0) != losses("4", 1)
    assert losses("8", 1) != losses("8", 0)
    # From weights of its own.
    assert began == [0, 0, 1, 1, 0]


@pytest.mark.parametrize(("size", "steps"), [(100, 2), (256, 1), (12, 21)])
def test_every_batch_size_has_a_loss(place, monkeypatch, size, steps):
    """256 samples are evaluated from 241 on; a batch of 100 ends before."""
    found = evaluated(place, monkeypatch)
    run = run_job(scratch_job(str(size), 256), plan(256), place)
    assert run.steps == steps == place.trainer.steps
    assert math.isfinite(run.loss)
    assert run.curve == ((run.place, run.loss),)
    last = [number for number, _, _ in found]
    assert run.place == size * fmean(last)
    late = {number for number in range(1, steps + 1) if size * number >= 241}
    assert set(last) == (late or {steps})


def test_a_schedule_is_averaged_over_the_same_end(place, monkeypatch):
    found = evaluated(place, monkeypatch)
    run = run_job(scratch_job("4-16@64", 1200, warmup_samples=64), plan(1200), place)
    assert run.steps == 16 + (1200 - 64) // 16
    assert len(found) == len(end_marks(1200, decays=False)) == END_MARKS
    assert [stage.from_samples for stage in run.stages] == [0, 64]
    assert [stage.lr for stage in run.stages] == pytest.approx([0.001, 0.002])
    other = run_job(scratch_job("4-16@64", 1200, rate=2.0), plan(1200), place)
    assert [stage.lr for stage in other.stages] == pytest.approx([0.002, 0.004])


def test_the_learning_rate_decays_over_the_length_that_is_trained(tmp_path, monkeypatch):
    place = place_of(tmp_path, make_task(lr_decay="linear"))
    found = evaluated(place, monkeypatch)
    run = run_job(scratch_job("4", 256), plan(1024), place)
    # The middle of the last step's batch of four; the other lengths are other trainings.
    assert [rate for _, _, rate in found] == [pytest.approx(0.001 * 2 / 256)]
    assert run.curve == ((256, run.loss),)


def test_branches_are_evaluated_at_the_largest_batchs_last_steps(place, monkeypatch):
    whole, found = plan(256), evaluated(place, monkeypatch)
    run_job({"kind": "point", "point": 0}, whole, place)
    for size in (4, 16):
        job = {"kind": "branch", "point": 0, "repeat": 1, "batch_size": size}
        run = run_job(job, whole, place)
        assert run.samples == (48 + 64 + 80 + 96) / 4 == 72
        assert run.loss == fmean(loss for _, loss, _ in found[-END_MARKS:])
        way = [at for at in (round(24 * part) * 4 for part in FRACTIONS) if at < 48]
        assert [at for at, _ in run.curve] == [*(way if size == 4 else []), 72]


def test_a_training_that_diverges_is_a_result_but_at_the_tasks_own_settings(tmp_path):
    place = place_of(tmp_path, diverging_branches())
    run = run_job(scratch_job("64", 1024), plan(1024), place)
    assert (run.loss, run.place, run.curve) == (math.inf, 1024, ((1024, math.inf),))
    assert math.isinf(run_job(scratch_job("8", 1024, rate=16.0), plan(1024), place).loss)
    place = place_of(tmp_path, diverging())
    with pytest.raises(Diverged, match=r"Task\.lr"):
        run_job(scratch_job("4", 1024), plan(1024), place)
    # Where rates are searched, the task's own is one of many.
    place.header = make_header(settings=Settings(task="tiny", tune=True))
    assert math.isinf(run_job(scratch_job("4", 1024), plan(1024), place).loss)


@pytest.mark.parametrize(("tune", "factors"), [(False, [1.125, 1.375]), (True, [0.25, 0.75])])
def test_a_larger_batch_warms_up_from_the_tasks_rate_or_from_0(place, monkeypatch, tune, factors):
    rates, step = [], place.trainer.step
    place.header = make_header(settings=Settings(task="tiny", tune=tune))

    def watched(*batch):
        rates.append(place.trainer.optimizer.param_groups[0]["lr"])
        return step(*batch)

    monkeypatch.setattr(place.trainer, "step", watched)
    run_job(scratch_job("16", 256, warmup_samples=64), plan(256), place)
    assert [*rates[:2], rates[-1]] == pytest.approx([0.001 * factor for factor in (*factors, 2.0)])
