"""The plan: arithmetic from a budget to amounts of work."""

import re
from functools import partial
from types import SimpleNamespace

import pytest

from steadygrad._checks import InputError
from steadygrad.studies.advise.plan import (
    END_STEP,
    MIN_STEPS,
    RUN_ENDS,
    end_marks,
    end_unit,
    make_plan,
    make_trials,
    run_marks,
)
from steadygrad.studies.advise.schema import Settings
from steadygrad.studies.advise.trials import plan_for
from steadygrad.studies.trials import SHARE, start_up
from tests.unit.studies.tiny_task import make_task


def undecided(key, journal):
    """Before anything is recorded no trial that depends on results has a job."""


def plan_of(budget, speed=1000.0, *, size=8, train=180_000, valid=256, workers=1):
    trials = partial(make_trials, valid_size=valid, decide=undecided)
    sizes = {"batch_size": size, "train_size": train, "workers": workers}
    return make_plan(budget, speed, trials_of=trials, **sizes)


def test_five_minutes_of_the_language_model():
    """Needs of `make advise`: three points, several repeats, a check from scratch."""
    plan = plan_of(300, workers=2)
    assert len(plan.points) == 3
    assert (plan.repeats, plan.seeds, plan.candidates, plan.rates) == (3, 4, 3, True)
    assert plan.length >= 8_000
    assert plan.multiples[-1][-1] >= 32


@pytest.mark.parametrize("budget", [25, 60, 300, 7200])
@pytest.mark.parametrize("size", [1, 8, 12])
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_plan_fits_its_budget_and_its_own_rules(budget, size, workers):
    plan = plan_of(budget, size=size, workers=workers)
    trials = make_trials(plan, 256, undecided)
    assert plan.work == sum(trial.cost for trial in trials)
    assert plan.work / workers <= plan.span <= SHARE * (budget - start_up(workers)) * 1000
    assert list(plan.points) == sorted(set(plan.points))
    for samples, length, ladder in zip(
        plan.points, plan.branch_samples, plan.multiples, strict=True
    ):
        assert samples % end_unit(samples, size) == 0
        assert ladder == tuple(2**i for i in range(len(ladder)))
        assert length // (ladder[-1] * size) >= MIN_STEPS - 4
        # A size in the middle between two of the ladder divides the branch, too.
        for multiple in ladder[1:]:
            assert length % (multiple * size) == 0
            assert multiple == 1 or length % (3 * multiple * size // 4) == 0
    assert len(plan.multiples[-1]) >= 3


def test_every_trial_has_its_own_key_and_needs_earlier_ones():
    plan = plan_of(300, workers=2)
    seen = set()
    for trial in make_trials(plan, 256, undecided):
        assert trial.key not in seen
        assert seen.issuperset(trial.needs)
        assert trial.cost > 0
        seen.add(trial.key)
    named = "point", "noise", "branch", "middle", "rate", "baseline", "candidate", "schedule"
    assert {key[0] for key in seen} == {*named}


def test_a_decaying_rate_needs_one_more_run_of_the_smallest_batch():
    plan = plan_of(300)
    plain, decaying = (
        [t.key for t in make_trials(plan, 256, undecided, decays=decays) if t.key[0] == "baseline"]
        for decays in (False, True)
    )
    assert plain == [("baseline", seed) for seed in range(1, plan.seeds)]
    assert decaying == [("baseline", 0), *plain]
    assert len(plain) >= 2


def test_more_time_and_more_workers_buy_a_longer_study():
    ends = [plan_of(budget).length for budget in (30, 60, 300, 900, 7200)]
    assert ends == sorted(ends)
    assert ends[-1] > 10 * ends[0]
    ends = [plan_of(900, workers=workers).length for workers in (1, 2, 8)]
    assert ends[0] < ends[1] < ends[2]


@pytest.mark.parametrize("size", [1, 8, 12])
@pytest.mark.parametrize("budget", [25, 300, 7200])
def test_runs_end_with_evaluations_that_many_batch_sizes_reach(budget, size):
    start = 0
    for samples in plan_of(budget, size=size).points:
        unit, ends = end_unit(samples, size), end_marks(samples, size)
        # One batch, or three of them doubled: 1.5, 2, 3, 4, 6, ... times the smallest divide it.
        assert unit == size or (unit % (3 * size), (unit // (3 * size)).bit_count()) == (0, 1)
        assert unit <= END_STEP * samples or unit == size
        assert (2 if unit > size else 3) * unit > END_STEP * samples
        assert ends == [samples - back * unit for back in (4, 3, 2, 1, 0)]
        # The main trajectory is evaluated there, too, and the point itself is its last mark.
        marks = run_marks(samples, size, first=start)
        assert marks[-RUN_ENDS:] == ends
        assert start < marks[0] < marks[-RUN_ENDS]
        assert marks == sorted(set(marks))
        assert all(mark % size == 0 for mark in marks)
        start = samples


@pytest.mark.slow
def test_a_check_has_as_many_seeds_and_candidates_as_fit():
    plans = [plan_of(budget) for budget in range(15, 600)]
    found = {(plan.repeats, plan.seeds, plan.candidates) for plan in plans}
    assert found == {(2, 0, 0), (3, 0, 0), (3, 3, 1), (3, 3, 2), (3, 4, 2), (3, 4, 3)}
    # Three points come before a fourth seed, and both before a third candidate.
    assert all(len(plan.points) >= 3 for plan in plans if plan.candidates == 3)


def test_no_batch_is_larger_than_the_data():
    plan = plan_of(3000, train=300, valid=10)
    assert plan.multiples[-1][-1] == 32  # 256 of 300 samples


@pytest.mark.parametrize(
    ("budget", "speed", "expected"),
    [
        (2, 1000.0, r"(\d\d?)s for this task at 1,000"),
        (20, 26.9087, r"(\d\d0)s for this task at 27"),
    ],
)
def test_a_budget_too_small_says_what_would_do_in_round_numbers(budget, speed, expected):
    with pytest.raises(InputError, match="too small to measure anything") as caught:
        plan_of(budget, speed)
    seconds = re.search(rf"expected at least {expected} samples a second", str(caught.value))[1]
    assert f"Remedy: --budget {seconds}s or more; where other programs keep" in str(caught.value)
    assert str(caught.value).endswith("busy, --threads 1.")
    assert plan_of(int(seconds), speed).repeats == 2
    if len(seconds) < 3:
        with pytest.raises(InputError):
            plan_of(int(seconds) - 1, speed)


def test_data_too_few_for_three_batch_sizes():
    with pytest.raises(InputError, match=r"at least 32 training samples.*Found 20"):
        plan_of(300, train=20, valid=5)


def test_a_warm_up_ends_within_the_run():
    def plan(warmup):
        trainer = SimpleNamespace(task=make_task(warmup_samples=warmup))
        trainer.context, trainer.dependent = SimpleNamespace(size=1), False
        return plan_for(Settings(budget=60), trainer, speed=1000.0, workers=1)

    length = plan(0).length
    assert plan(length).length == length
    with pytest.raises(InputError, match=rf"within the run of {length:,} samples. Found .* --bud"):
        plan(length + 1)
