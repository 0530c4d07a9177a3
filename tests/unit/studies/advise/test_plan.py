"""The plan: arithmetic from a budget to the length of training."""

import re
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from steadygrad._checks import InputError
from steadygrad.studies.advise import trials
from steadygrad.studies.advise.analysis import Evidence
from steadygrad.studies.advise.plan import (
    BRANCHES,
    END_MARKS,
    FEW,
    LEAST,
    MIN_STEPS,
    RUNS,
    course_of,
    end_marks,
    lengths_of,
    make_plan,
    rungs,
    stages_of,
    stretches,
)
from steadygrad.studies.advise.schema import Settings
from steadygrad.studies.folder import Results
from steadygrad.studies.trials import start_up
from tests.unit.studies.advise.events import make_header
from tests.unit.studies.tiny_task import make_task

SPEED = 1000.0


def plan_of(budget, speed=SPEED, *, evaluation=0.01, slower=1.0, **given):
    """The plan of a task whose larger batches take so many times as long a sample."""
    seconds = {multiple: (slower if multiple > 1 else 1) / speed for multiple in RUNS}
    sizes = {"batch_size": 8, "train_size": 180_000, "workers": 1}
    return make_plan(budget, seconds, evaluation, **{**sizes, **given})


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


def test_what_makes_the_training_longer():
    longer = [plan_of(budget).samples for budget in (60, 300, 900, 7200)]
    assert longer == sorted(set(longer))
    longer = [plan_of(900, workers=workers).samples for workers in (1, 2, 8)]
    assert longer == sorted(set(longer))
    plain = plan_of(900).samples
    # Larger batches that take half the time a sample, or evaluations that take none.
    assert plan_of(900, slower=0.5).samples > 1.3 * plain
    free = plan_of(900, evaluation=0.0).samples
    assert free > plain > plan_of(900, evaluation=0.1).samples
    # A rate that falls takes a training for each length of the smallest batch.
    assert plan_of(900, evaluation=0.0, decays=True).samples < free
    # A search for learning rates takes three times the trainings.
    lengths = [plan_of(9000, evaluation=0.0, tune=tune).samples for tune in (True, False)]
    assert 3 * lengths[0] == pytest.approx(lengths[1], abs=24)
    # Short trainings rather have fewer pairs.
    assert FEW * 8 in {plan_of(budget).samples for budget in range(70, 140, 2)}


def test_a_length_that_is_given_leaves_no_choice():
    given = [plan_of(b, s, samples=5000) for b, s in ((60, 1000.0), (9000, 1000.0), (60, 3000.0))]
    assert [plan.samples for plan in given] == [5000] * 3
    same = [replace(plan, samples_per_second=1.0, work=1) for plan in given]
    assert same[0] == same[1] == same[2]
    assert (plan_of(300).seeds, plan_of(300, seeds=5).seeds) == (64, 5)
    assert plan_of(300, samples=512).points == (512,)
    with pytest.raises(InputError, match="--samples"):
        plan_of(300, samples=511)


def test_no_batch_is_larger_than_the_data():
    plan = plan_of(3000, train_size=300)
    assert plan.largest_batch == 256
    assert plan_of(300, train_size=32).largest_batch == 32
    with pytest.raises(InputError, match="training samples"):
        plan_of(300, train_size=31)


@pytest.mark.parametrize(
    ("speed", "digits", "given"),
    [
        (1000.0, 2, {}),
        (26.9087, 3, {}),
        (1000.0, 2, {"samples": 9000}),
        (500.0, 2, {"decays": True}),
    ],
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


def test_batch_sizes_that_can_be_tried():
    assert rungs(8, 8) == [8]
    assert rungs(8, 48) == [8, 12, 16, 24, 32, 48]
    assert rungs(1, 8) == [1, 2, 3, 4, 6, 8]
    # Whole shares of all ranks.
    assert rungs(6, 96, 4) == [6, 12, 24, 36, 48, 72, 96]


def test_the_warm_up_is_a_sixteenth_of_the_run_at_most():
    for samples, rule, expected in (
        (4096, "sqrt", 256),
        (1000, "linear", 56),
        (4096, "constant", 0),
    ):
        header = make_header(task={"lr_rule": rule}, samples=samples)
        assert Evidence(header, Results()).warmup_samples == expected


def test_lengths_marks_and_courses():
    assert lengths_of(4096, 0.2) == [2560, 3413, 4096]
    assert end_marks(1000, decays=False) == [940, 960, 980, 1000]
    assert end_marks(1000, decays=True) == [1000]
    stages = ((0, 16), (4096, 64), (8192, 512))
    assert course_of(stages) == "16-64@4096-512@8192"
    assert stages_of(course_of(stages)) == stages
    assert stages_of("24") == ((0, 24),)
    assert stretches(stages[:2], 5000) == [(0, 4096, 16), (4096, 5000, 64)]


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
    trainer = SimpleNamespace(task=task or make_task(), evaluate=lambda: 0.0)
    trainer.context = SimpleNamespace(size=1, gather=lambda value: [value])
    return trials.plan_for(Settings(**{"budget": 60, **settings}), trainer, speed=speed, workers=1)


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
