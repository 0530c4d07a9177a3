"""From a budget to the length of training; where trainings are evaluated, and what that gives."""

import math
import re
from dataclasses import replace as replace_task
from statistics import fmean
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from torch import nn

from steadygrad._checks import InputError
from steadygrad.studies.advise import trials
from steadygrad.studies.advise.plan import (
    END_MARKS,
    FEW,
    LEAST,
    RUNS,
    end_marks,
    lengths_of,
    make_plan,
    sizes_of,
)
from steadygrad.studies.advise.schema import Settings
from steadygrad.studies.schema import start_up
from steadygrad.studies.work import Workplace
from tests.unit.studies.framework import PLAN, make_trainer
from tests.unit.studies.results import make_header
from tests.unit.studies.tiny_task import (
    diverging,
    diverging_above,
    losses,
    make_task,
    without_dropout,
)

SPEED = 1000.0


def task_of(batch_size, train_size, *, decays=False):
    """What a plan asks of a task."""
    decay = "linear" if decays else "none"
    return SimpleNamespace(batch_size=batch_size, train=range(train_size), lr_decay=decay)


def plan_of(budget, speed=SPEED, **given):
    """The plan of a task whose batches of all sizes take as long a sample."""
    named = ("samples", "seeds", "batch_sizes", "max_batch")
    settings = Settings(budget=budget, **{n: given.pop(n) for n in named if n in given})
    sizes = {"batch_size": 8, "train_size": 180_000, "decays": False}
    task = task_of(**{n: given.pop(n, default) for n, default in sizes.items()})
    seconds = dict.fromkeys(RUNS, 1 / speed)
    return make_plan(settings, task, seconds, 0.01, **{"workers": 1, **given})


@pytest.mark.parametrize(
    ("budget", "size", "workers"), [(150, 1, 1), (300, 12, 8), (7200, 12, 1), (7200, 1, 8)]
)
def test_the_trainings_that_are_reckoned_with_fit_the_budget(budget, size, workers):
    plan = plan_of(budget, batch_size=size, workers=workers)
    count = sum(RUNS.values())
    seconds = count * (plan.samples / SPEED + 0.01 * END_MARKS)
    whole = workers * (budget - start_up(workers))
    assert plan.samples >= FEW * size
    # They fill it, but for some evaluations of the smallest batch on the way.
    assert whole - 2 < seconds <= whole or plan.samples == FEW * size
    assert plan.work == int(workers * budget * SPEED)
    assert plan.samples % size == 0


@pytest.mark.parametrize(
    ("base", "most", "world", "sizes"),
    [
        (8, 50, 1, (8, 12, 16, 24, 32, 48)),
        (8, 50, 8, (8, 16, 24, 32, 48)),
        # The middle between an odd size and twice that is none.
        (5, 40, 1, (5, 10, 15, 20, 30, 40)),
        (8, 7, 1, (8,)),
    ],
)
def test_sizes_that_can_be_tried(base, most, world, sizes):
    assert sizes_of(base, most, world) == sizes


@pytest.mark.parametrize("decays", [False, True])
def test_what_does_not_fit_is_predicted_from_shorter_lengths(decays):
    fitting = plan_of(300, samples=4000, decays=decays)
    assert (fitting.rungs, fitting.target) == ((4000,), 0)
    plan = plan_of(3000, samples=5_000_000, decays=decays)
    *shorter, longest = plan.rungs
    assert (plan.target, longest) == (5_000_000, plan.samples)
    assert [round(longest / n) for n in shorter] == [16, 4]
    assert all(n % 8 == 0 and n >= FEW * 8 for n in shorter)
    # All trainings together fit: some four at three sizes, and the searches for their rates.
    assert 35 < plan.work / longest < 60 * (2 if decays else 1)
    # More seeds, at a resume, need no other shares of the work.
    assert plan_of(3000, samples=5_000_000, decays=decays, seeds=4).work == plan.work
    # Too short ones are left out.
    assert plan_of(300, samples=5_000_000, decays=decays).shorter == ()


def test_a_share_of_the_run_stands_for_a_budget():
    settings = Settings(samples=100_000, share=0.1)
    assert settings.timed(500.0).budget == pytest.approx(20)
    assert Settings(samples=100_000, budget=7).timed(500.0).budget == 7
    # Not beside one, and of a length alone.
    for wrong in ({"samples": 100_000, "budget": 7}, {}):
        with pytest.raises(InputError, match="--share"):
            Settings(share=0.1, **wrong).timed(500.0)


@pytest.mark.parametrize(
    ("named", "arms"),
    [
        ({"batch_sizes": "256, 16,64"}, (8, 16, 64, 256)),
        # Those that are too large for a length are predicted from all that are smaller.
        ({"batch_sizes": "8,1000", "samples": 1280}, (8, 12, 16, 24, 32)),
        ({"max_batch": 24}, (8, 12, 16, 24)),
    ],
)
def test_sizes_that_the_user_can_use(named, arms):
    assert plan_of(3000, **named).arms == arms


@pytest.mark.parametrize(
    "named",
    [
        {"batch_sizes": "4,16"},
        {"batch_sizes": "9" * 5000},
        {"batch_sizes": "8"},
        {"batch_sizes": "16;32"},
        {"batch_sizes": "-8"},
        {"max_batch": 4},
        {"max_batch": 180_001},
    ],
)
def test_sizes_that_cannot_be_used_are_refused(named):
    for budget in (3000, 1):  # what is too little for anything is said after that
        with pytest.raises(InputError, match="--batch-sizes"):
            plan_of(budget, **named)
    with pytest.raises(InputError, match="--batch-sizes"):
        plan_of(3000, world=3, batch_size=3, batch_sizes="16")


def test_no_batch_is_larger_than_the_data():
    plan = plan_of(3000, train_size=300)
    assert plan.largest_batch == 256 == plan.arms[-1]
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
    plan = make_plan(Settings(budget=60), task_of(4, 4096), seconds, 0.0, workers=1)
    assert planned().samples == plan.samples
    assert speeds == [(4, False), (16, True), (64, True)]
    del speeds[:]
    # A slow task is not kept waiting: 4 steps of 64 take more than the budget.
    planned(100.0, make_task(train=make_task().valid), samples=256)
    assert speeds == [(4, False), (16, True)]


def test_settings_that_no_plan_can_have(speeds):
    with pytest.raises(InputError, match="--seeds"):
        planned(seeds=3)
    assert [planned(seeds=n).seeds for n in (4, 9, 0)] == [4, 9, 64]
    length = planned().samples
    assert planned(task=make_task(warmup_samples=length)).samples == length
    with pytest.raises(InputError, match=r"Task\.warmup_samples"):
        planned(task=make_task(warmup_samples=length + 1))


def train(place, size, samples, *, step=0.0, seed=0):
    """A training of a batch size, in a study of 4 and of that."""
    plan, arm = replace(PLAN, arms=(4, size)), int(size != 4)
    return trials.training(plan, place, arm, samples, step, seed)


def place_of(task, **options):
    trainer = make_trainer(task, **options)
    return Workplace(trainer, lambda samples: None, make_header())


@pytest.fixture
def place():
    """Where a task without random numbers is trained, in float64."""
    return place_of(without_dropout(), dtype="float64")


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
    run = train(place, 4, length)
    losses = {4 * steps: loss for steps, loss, _ in found}
    assert len(run.curve) == 3
    for n, (at, loss) in zip(lengths_of(length, 0.2), run.curve, strict=True):
        # A step ends at its mark, or is the first after it.
        ends = {math.ceil(mark / 4) * 4 for mark in end_marks(n, decays=False)}
        assert at == pytest.approx(fmean(ends))
        assert loss == pytest.approx(fmean(losses[end] for end in ends), rel=1e-12)
    assert run.loss == run.curve[-1][1]
    assert place.trainer.steps == length // 4


def test_each_seed_is_a_training_of_its_own(place, monkeypatch):
    began, restart = [], place.trainer.restart
    monkeypatch.setattr(place.trainer, "restart", lambda seed: began.append(seed) or restart(seed))
    first, again, second = (train(place, 4, 256, seed=seed).loss for seed in (0, 0, 1))
    assert first == again != second
    # From weights of its own.
    assert began == [0, 0, 1]


@pytest.mark.parametrize(("size", "steps"), [(100, 2), (256, 1), (12, 21)])
def test_every_batch_size_has_a_loss(place, monkeypatch, size, steps):
    """256 samples are evaluated from 241 on; a batch of 100 ends before."""
    found = evaluated(place, monkeypatch)
    run = train(place, size, 256)
    assert place.trainer.steps == steps
    ((at, loss),) = run.curve
    assert math.isfinite(loss)
    assert loss == run.loss
    last = [number for number, _, _ in found]
    assert at == size * fmean(last)
    late = {number for number in range(1, steps + 1) if size * number >= 241}
    assert set(last) == (late or {steps})


def test_the_learning_rate_decays_over_the_length_that_is_trained(monkeypatch):
    place = place_of(make_task(lr_decay="linear"))
    found = evaluated(place, monkeypatch)
    run = train(place, 4, 256)
    # The middle of the last step's batch of four; the other lengths are other trainings.
    assert [rate for _, _, rate in found] == [pytest.approx(0.001 * 2 / 256)]
    assert run.curve == ((256, run.loss),)


def test_a_training_that_diverges_is_a_result():
    place = place_of(diverging_above())
    run = train(place, 64, 1024)
    assert (run.loss, run.curve) == (math.inf, ((1024, math.inf),))
    # At each of the smallest batch's lengths, and at the task's own rate: that is one of many.
    for factory, step in ((diverging_above, 4.0), (diverging, 0.0)):
        lost = train(place_of(factory()), 4, 1024, step=step)
        assert [loss for _, loss in lost.curve] == [math.inf] * 3


@pytest.mark.parametrize("octaves", [0.0, -1.0])
@pytest.mark.parametrize(("size", "factors"), [(4, [1, 1, 1]), (16, [1.125, 1.375, 2])])
def test_a_larger_batch_warms_up_from_the_smallest_ones_rate(
    place, monkeypatch, size, factors, octaves
):
    rates, step = [], place.trainer.step

    def watched(*batch):
        rates.append(place.trainer.optimizer.param_groups[0]["lr"])
        return step(*batch)

    monkeypatch.setattr(place.trainer, "step", watched)
    train(place, size, 1024, step=octaves)
    own = 0.001 * 2**octaves
    assert [*rates[:2], rates[-1]] == pytest.approx([own * factor for factor in factors])


def test_the_noise_scale_is_that_of_the_reference_training(place):
    """At each point a span of measurements; with one sample a step there is none."""
    found = trials.noise(replace(PLAN, arms=(4, 8)), place, 256, 0.0)
    assert [point.samples for point in found.points] == [16, 64, 128, 256]
    assert place.trainer.steps == 64
    assert found.points[-1].noise_trace > 0
    place.trainer.task = replace_task(place.trainer.task, batch_size=1)
    assert trials.noise(replace(PLAN, arms=(1, 2)), place, 256, 0.0).points == ()


def test_a_stand_in_trains_its_own_arms_in_the_same_micro_batches():
    """The real model's arms come after them."""
    rows = []

    def counted(model, batch):
        rows.append((sum(p.numel() for p in model.parameters()), len(batch[0])))
        return losses(model, batch)

    task = make_task(proxy=lambda: nn.Linear(8, 1), per_sample_loss=counted)
    place = place_of(task, micro_batch_size=2)
    plan = replace(PLAN, arms=(4, 8, 4, 8), stand_in=9, target=4096, samples=64)
    found = {arm: trials.training(plan, place, arm, 64, 0.0, 0) for arm in (1, 3)}
    assert found[1].loss != found[3].loss
    assert {arm: one.arm for arm, one in found.items()} == {1: 1, 3: 3}
    assert {parameters for parameters, _ in rows} == {9, 161}
    assert {count for _, count in rows} == {2}
