"""From a budget to the length of training; where trainings are evaluated, and what that gives."""

import math
import re
from statistics import fmean

import pytest
from msgspec.structs import replace

from steadygrad._checks import InputError
from steadygrad.studies.advise import trials
from steadygrad.studies.advise.plan import (
    BRANCHES,
    END_MARKS,
    FEW,
    FRACTIONS,
    LEAST,
    MIN_STEPS,
    RUNS,
    end_marks,
    lengths_of,
    make_plan,
)
from steadygrad.studies.advise.schema import Settings
from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.trainer import Diverged
from steadygrad.studies.trials import start_up
from steadygrad.studies.work import Workplace
from tests.unit.studies.framework import PLAN, make_trainer
from tests.unit.studies.results import make_header
from tests.unit.studies.tiny_task import diverging, diverging_branches, make_task, without_dropout

SPEED = 1000.0


def plan_of(budget, speed=SPEED, **given):
    """The plan of a task whose batches of all sizes take as long a sample."""
    seconds = dict.fromkeys(RUNS, 1 / speed)
    sizes = {"batch_size": 8, "train_size": 180_000, "workers": 1}
    return make_plan(budget, seconds, 0.01, **{**sizes, **given})


@pytest.mark.parametrize(
    ("budget", "size", "workers"), [(150, 1, 1), (300, 12, 8), (7200, 12, 1), (7200, 1, 8)]
)
def test_the_trainings_that_are_reckoned_with_fit_the_budget(budget, size, workers):
    plan = plan_of(budget, batch_size=size, workers=workers)
    count = sum(RUNS.values())
    seconds = count * (plan.samples / SPEED + 0.01 * END_MARKS)
    whole = workers * (budget - start_up(workers)) * (1 - BRANCHES)
    assert plan.samples >= FEW * size
    # They fill it, but for some evaluations of the smallest batch on the way.
    assert whole - 2 < seconds <= whole or plan.samples == FEW * size
    assert plan.work == int(workers * budget * SPEED)
    assert plan.samples % size == 0


@pytest.mark.parametrize(
    ("size", "samples"), [(1, 700), (1, 100_000), (8, 4096), (12, 700), (12, 100_000)]
)
def test_points_and_branches_obey_their_own_rules(size, samples):
    plan = plan_of(7200, batch_size=size, samples=max(samples, 64 * size))
    assert list(plan.points) == sorted(set(plan.points))
    assert plan.points[-1] == plan.samples // size * size
    for seen, length, ladder in zip(plan.points, plan.branch_samples, plan.multiples, strict=True):
        assert seen % size == 0
        assert ladder == tuple(2**i for i in range(len(ladder)))
        assert length // (ladder[-1] * size) >= MIN_STEPS - 4
        # A size in the middle between two of the ladder divides the branch, too.
        for multiple in ladder[1:]:
            assert length % (multiple * size) == 0
            assert multiple == 1 or length % (3 * multiple * size // 4) == 0


@pytest.mark.parametrize("tune", [False, True])
@pytest.mark.parametrize("decays", [False, True])
def test_a_given_length_needs_time_for_three_seeds_at_two_sizes(decays, tune):
    """The smallest batch is trained over each length where the rate falls."""
    trainings = 3 * ((1 / 1.6 + 1 / 1.2 + 1 if decays else 1) + 1) * (4 if tune else 1)
    least = trainings * 5000 / SPEED / (1 - BRANCHES) + start_up(1)
    known = {"samples": 5000, "decays": decays, "tune": tune}
    assert plan_of(1.001 * least, **known).samples == 5000
    with pytest.raises(InputError, match="budget"):
        plan_of(0.999 * least, **known)


def test_no_batch_is_larger_than_the_data():
    plan = plan_of(3000, train_size=300)
    assert plan.largest_batch == 256
    assert plan_of(300, train_size=32).largest_batch == 32
    with pytest.raises(InputError, match="training samples"):
        plan_of(300, train_size=31)


@pytest.mark.parametrize(
    ("speed", "digits", "given"),
    [(1000.0, 2, {}), (26.9087, 3, {}), (1000.0, 2, {"samples": 9000})],
)
def test_a_budget_too_small_says_what_would_do_in_round_numbers(speed, digits, given):
    with pytest.raises(InputError, match="budget") as caught:
        plan_of(5, speed, **given)
    (seconds,) = re.findall(r"--budget (\d+)s", str(caught.value))
    assert len(seconds) == digits
    assert ("--samples" in str(caught.value)) == ("samples" in given)
    # Rounded up by a step at most: it is enough, and two steps less are not.
    assert plan_of(int(seconds), speed, **given).samples >= LEAST * 8
    with pytest.raises(InputError):
        plan_of(int(seconds) - 2 * 10 ** (digits - 2), speed, **given)


@pytest.fixture
def speeds(monkeypatch):
    """A clock that stands still, and speeds of larger batches."""
    made = []

    def speed(trainer, size, *, few=False):
        made.append((size, few))
        return 700.0 * size**0.5

    monkeypatch.setattr(trials, "measured_speed", speed)
    monkeypatch.setattr(trials, "clock_of", lambda trainer: lambda: 0.0)
    return made


def planned(speed=SPEED, task=None, **settings):
    settings = Settings(**{"budget": 60, **settings})
    return trials.plan_for(settings, make_trainer(task), speed=speed, workers=1)


def test_speeds_of_larger_batches_are_measured_beside_the_smallest(speeds):
    """The smallest batch's is what the plan reckons with, whatever this machine measures."""
    seconds = {1: 1 / SPEED, 4: 0.5 / SPEED, 16: 0.25 / SPEED}
    sizes = {"batch_size": 4, "train_size": 4096, "workers": 1}
    assert planned().samples == make_plan(60, seconds, 0.0, **sizes).samples
    assert speeds == [(4, False), (16, True), (64, True)]
    del speeds[:]
    # A slow task is not kept waiting: 4 steps of 64 take more than the budget.
    planned(100.0, make_task(train=make_task().valid), samples=256)
    assert speeds == [(4, False), (16, True)]


def test_settings_that_no_plan_can_have(speeds):
    with pytest.raises(InputError, match="--seeds"):
        planned(seeds=2)
    length = planned().samples
    assert planned(task=make_task(warmup_samples=length)).samples == length
    with pytest.raises(InputError, match=r"Task\.warmup_samples"):
        planned(task=make_task(warmup_samples=length + 1))


def run_job(place, length, kind, **job):
    """A trial of a study over so many samples."""
    plan = replace(PLAN, samples=length, points=(length // 4, length))
    return trials.TRIALS[kind](plan, place, **job)


def train(place, course, samples, *, length=None, warmup_samples=0, rate=1.0, repeat=0):
    known = {"repeat": repeat, "rate": rate, "warmup_samples": warmup_samples}
    return run_job(place, length or samples, "scratch", course=course, samples=samples, **known)


def place_of(folder, task, **options):
    trainer = make_trainer(task, **options)
    return Workplace(trainer, Checkpoints(folder), lambda samples, what: None, make_header())


@pytest.fixture
def place(tmp_path):
    """Where jobs of a task without random numbers are run, in float64."""
    return place_of(tmp_path, without_dropout(), dtype="float64")


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
    run = train(place, "4", length)
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
    first, second = (run_job(place, length, "point", point=i) for i in (0, 1))
    assert (first.samples, second.samples) == (length // 4, length)
    assert second.valid_loss == pytest.approx(losses[length], rel=1e-12)


def test_each_seed_is_a_training_of_its_own(place, monkeypatch):
    began, restart = [], place.trainer.restart
    monkeypatch.setattr(place.trainer, "restart", lambda seed: began.append(seed) or restart(seed))
    first, again, second = (train(place, "4", 256, repeat=repeat).loss for repeat in (0, 0, 1))
    assert first == again != second
    # From weights of its own.
    assert began == [0, 0, 1]


@pytest.mark.parametrize(("size", "steps"), [(100, 2), (256, 1), (12, 21)])
def test_every_batch_size_has_a_loss(place, monkeypatch, size, steps):
    """256 samples are evaluated from 241 on; a batch of 100 ends before."""
    found = evaluated(place, monkeypatch)
    run = train(place, str(size), 256)
    assert run.steps == steps == place.trainer.steps
    assert math.isfinite(run.loss)
    assert run.curve == ((run.place, run.loss),)
    last = [number for number, _, _ in found]
    assert run.place == size * fmean(last)
    late = {number for number in range(1, steps + 1) if size * number >= 241}
    assert set(last) == (late or {steps})


def test_a_schedule_is_averaged_over_the_same_end(place, monkeypatch):
    found = evaluated(place, monkeypatch)
    run = train(place, "4-16@64", 1200, warmup_samples=64)
    assert run.steps == 16 + (1200 - 64) // 16
    assert len(found) == len(end_marks(1200, decays=False)) == END_MARKS
    assert [stage.from_samples for stage in run.stages] == [0, 64]
    assert [stage.lr for stage in run.stages] == pytest.approx([0.001, 0.002])
    other = train(place, "4-16@64", 1200, rate=2.0)
    assert [stage.lr for stage in other.stages] == pytest.approx([0.002, 0.004])


def test_the_learning_rate_decays_over_the_length_that_is_trained(tmp_path, monkeypatch):
    place = place_of(tmp_path, make_task(lr_decay="linear"))
    found = evaluated(place, monkeypatch)
    run = train(place, "4", 256, length=1024)
    # The middle of the last step's batch of four; the other lengths are other trainings.
    assert [rate for _, _, rate in found] == [pytest.approx(0.001 * 2 / 256)]
    assert run.curve == ((256, run.loss),)


def test_branches_are_evaluated_at_the_largest_batchs_last_steps(place, monkeypatch):
    found = evaluated(place, monkeypatch)
    run_job(place, 256, "point", point=0)
    for size in (4, 16):
        run = run_job(place, 256, "branch", point=0, repeat=1, batch_size=size)
        assert run.samples == (48 + 64 + 80 + 96) / 4 == 72
        assert run.loss == fmean(loss for _, loss, _ in found[-END_MARKS:])
        way = [at for at in (round(24 * part) * 4 for part in FRACTIONS) if at < 48]
        assert [at for at, _ in run.curve] == [*(way if size == 4 else []), 72]


def test_a_training_that_diverges_is_a_result_but_at_the_tasks_own_settings(tmp_path):
    place = place_of(tmp_path, diverging_branches())
    run = train(place, "64", 1024)
    assert (run.loss, run.place, run.curve) == (math.inf, 1024, ((1024, math.inf),))
    assert math.isinf(train(place, "8", 1024, rate=16.0).loss)
    place = place_of(tmp_path, diverging())
    with pytest.raises(Diverged, match=r"Task\.lr"):
        train(place, "4", 1024)
    # Where rates are searched, the task's own is one of many.
    place.header = make_header(settings=Settings(task="tiny", tune=True))
    assert math.isinf(train(place, "4", 1024).loss)


@pytest.mark.parametrize(("tune", "factors"), [(False, [1.125, 1.375]), (True, [0.25, 0.75])])
def test_a_larger_batch_warms_up_from_the_tasks_rate_or_from_0(place, monkeypatch, tune, factors):
    rates, step = [], place.trainer.step
    place.header = make_header(settings=Settings(task="tiny", tune=tune))

    def watched(*batch):
        rates.append(place.trainer.optimizer.param_groups[0]["lr"])
        return step(*batch)

    monkeypatch.setattr(place.trainer, "step", watched)
    train(place, "16", 256, warmup_samples=64)
    assert [*rates[:2], rates[-1]] == pytest.approx([0.001 * factor for factor in (*factors, 2.0)])
