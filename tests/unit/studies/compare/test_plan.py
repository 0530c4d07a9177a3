"""From a budget to amounts of work."""

import re

import pytest

from steadygrad._checks import InputError
from steadygrad.studies.compare.plan import LEVELS, make_plan, make_trials
from steadygrad.studies.compare.schema import Settings
from tests.unit.studies.tiny_task import make_task

NAMES = ("adamw", "scaledadam", "lans")


def plan_for(budget, *, speed=200.0, workers=1, names=NAMES, **settings):
    return make_plan(
        Settings(budget=budget, **settings),
        names,
        batch_size=4,
        train_size=len(make_task().train),
        speed=speed,
        workers=workers,
        valid_size=64,
    )


@pytest.mark.parametrize(("budget", "workers"), [(100, 5), (300, 1), (3600, 2), (7200, 1)])
def test_the_plan_fits_its_budget_and_uses_it(budget, workers):
    plan = plan_for(budget, workers=workers)
    trials = make_trials(plan, 64)
    assert plan.work == sum(trial.cost for trial in trials)
    assert plan.work / workers <= plan.span <= plan.work
    seconds = plan.span / plan.samples_per_second
    assert seconds <= 0.85 * budget
    # Bisected to 3 %, and runs are a whole number of units; start-up is taken off.
    assert seconds >= 0.75 * (budget - 12)
    assert plan.horizons == (plan.horizons[2] // 4, plan.horizons[2] // 2, plan.horizons[2])


def test_more_time_gives_longer_runs_then_seeds():
    plans = [plan_for(budget) for budget in (60, 120, 600, 3600, 4 * 3600)]
    longest = [plan.horizons[2] for plan in plans]
    seeds = [plan.seeds for plan in plans]
    assert seeds == sorted(seeds)
    assert (seeds[0], seeds[-1]) == (3, 10)
    assert longest[0] < longest[1] < longest[2] < longest[-1]
    for plan in plans:
        steps = {(seeds, full): steps for seeds, full, steps in LEVELS}
        assert plan.horizons[2] // plan.batch_size >= steps[plan.seeds, plan.full]


@pytest.mark.parametrize(
    ("batches", "workers", "names"), [("1", 1, NAMES), ("1,4", 2, NAMES), ("1,3,5", 1, NAMES[:2])]
)
def test_a_budget_that_is_too_small_says_which_is_enough(batches, workers, names):
    options = {"batches": batches, "workers": workers, "names": names}
    with pytest.raises(InputError, match="budget") as error:
        plan_for(5, **options)
    seconds = int(re.search(r"--budget (\d+)s or more", str(error.value)).group(1))
    assert plan_for(seconds, **options).seeds == 3
    with pytest.raises(InputError, match="budget"):
        plan_for(seconds - 1, **options)


@pytest.mark.parametrize(("budget", "seeds"), [(2000, 10), (1200, 5), (700, 3)])
def test_a_length_that_is_given_leaves_the_seeds_to_the_budget(budget, seeds):
    plan = plan_for(budget, samples=3203)
    assert (plan.horizons, plan.seeds) == ((800, 1600, 3200), seeds)
    assert plan.span / plan.samples_per_second <= 0.85 * budget


def test_a_length_that_cannot_be_used():
    with pytest.raises(InputError, match="fewer --samples, or"):
        plan_for(60, samples=100_000)
    with pytest.raises(InputError, match="--samples should be at least 512"):
        plan_for(7200, samples=400, batches="1,4")
    assert plan_for(7200, samples=512, batches="1,4").horizons == (128, 256, 512)


def test_larger_batches_have_whole_steps_and_enough_of_them():
    plan = plan_for(3600, batches="1,3,16")
    for horizon in plan.horizons:
        for multiple in plan.multiples:
            steps, rest = divmod(horizon, multiple * plan.batch_size)
            assert rest == 0
            assert steps >= 8


@pytest.mark.parametrize("batches", ["2", "1,4,3", "1,1", "1,,4", "1,2000"])
def test_batches_that_cannot_be_used(batches):
    with pytest.raises(InputError, match=r"--batches .* 1024"):
        plan_for(300, batches=batches)


def test_seeds_may_be_given():
    plan = plan_for(3600, seeds=25)
    assert plan.seeds == 25
    assert plan.horizons[2] < plan_for(3600).horizons[2]
    with pytest.raises(InputError, match="--seeds"):
        plan_for(3600, seeds=1)
    with pytest.raises(InputError, match="--samples, fewer --seeds"):
        plan_for(60, seeds=25, samples=1 << 20)
