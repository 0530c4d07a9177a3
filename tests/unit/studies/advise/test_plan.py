"""The plan: arithmetic from a budget to amounts of work."""

import dataclasses

import pytest

from steadygrad._checks import InputError
from steadygrad.studies.advise.plan import (
    END_MARKS,
    EVALUATION_COST,
    FRACTIONS,
    MIN_STEPS,
    SHARE_OF_BUDGET,
    Plan,
    make_plan,
    parse_budget,
)

SIZES = {"batch_size": 8, "train_size": 180_000, "valid_size": 256}


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("5m", 300), ("2h", 7200), ("1.5m", 90), ("45", 45)]
)
def test_budgets_are_durations(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "5 minutes", "m", "-5m", "0s", "1e9h", "inf"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(InputError, match=r"such as 30s, 5m or 2h\. Found .* Remedy: --budget 5m"):
        parse_budget(text)


def test_five_minutes_of_the_language_model():
    """What the issue asks of `make advise`: three or four points, several repeats, wide enough."""
    plan = make_plan(300, 1000, **SIZES)
    assert 3 <= len(plan.points) <= 4
    assert plan.repeats >= 2
    assert plan.points[-1].samples >= 8_000
    assert plan.points[-1].multiples[-1] >= 32


def work_of(plan: Plan, valid_size: int) -> float:
    """The plan's cost, counted unit by unit."""
    work = plan.points[-1].samples
    for point in plan.points:
        work += point.noise_steps * 8 * plan.batch_size
        work += valid_size * EVALUATION_COST
        for multiple in point.multiples:
            evaluations = END_MARKS + (len(FRACTIONS) if multiple == 1 else 0)
            branch = point.branch_samples + evaluations * valid_size * EVALUATION_COST
            work += plan.repeats * branch
    return work


@pytest.mark.parametrize("budget", [25, 60, 300, 7200])
@pytest.mark.parametrize("size", [1, 8, 12])
def test_a_plan_fits_its_budget_and_its_own_rules(budget, size):
    plan = make_plan(budget, 1000, batch_size=size, train_size=180_000, valid_size=256)
    # Rounded up to whole samples, from thirds of samples.
    assert plan.work == pytest.approx(work_of(plan, 256), abs=2)
    assert plan.work <= SHARE_OF_BUDGET * budget * 1000
    seen = [point.samples for point in plan.points]
    assert seen == sorted(set(seen))
    for point in plan.points:
        assert point.samples % size == 0
        assert point.multiples == tuple(2**i for i in range(len(point.multiples)))
        largest = point.multiples[-1] * size
        assert point.branch_samples % largest == 0
        assert point.branch_samples // largest >= MIN_STEPS
        marks = point.end_marks(size)
        assert marks[-1] == point.branch_samples
        assert all(mark % largest == 0 for mark in marks)
    assert len(plan.points[-1].multiples) >= 3


def test_more_time_buys_a_longer_study():
    plans = [make_plan(budget, 1000, **SIZES) for budget in (30, 60, 300, 900, 7200)]
    ends = [plan.points[-1].samples for plan in plans]
    assert ends == sorted(ends)
    assert ends[-1] > 10 * ends[0]


def test_no_batch_is_larger_than_the_data():
    plan = make_plan(300, 1000, batch_size=8, train_size=300, valid_size=10)
    assert plan.points[-1].multiples[-1] == 32  # 256 of 300 samples


def test_a_budget_too_small_says_what_would_do():
    with pytest.raises(InputError, match="too small to measure anything") as caught:
        make_plan(2, 1000, **SIZES)
    least = int(str(caught.value).split("--budget ")[1].split("s")[0])
    assert make_plan(least, 1000, **SIZES).repeats == 2
    with pytest.raises(InputError):
        make_plan(least - 1, 1000, **SIZES)


def test_data_too_few_for_three_batch_sizes():
    with pytest.raises(InputError, match=r"at least 32 training samples.*Found 20"):
        make_plan(300, 1000, batch_size=8, train_size=20, valid_size=5)


def test_a_record_keeps_the_plan():
    plan = make_plan(300, 1000, **SIZES)
    assert Plan.from_dict(plan.as_dict()) == plan


@pytest.mark.parametrize("budget", [25, 300, 7200])
def test_work_point_by_point(budget):
    plan = make_plan(budget, 1000, **SIZES)
    kept = Plan.from_dict(plan.as_dict())
    ends = kept.ends()
    assert len(ends) == len(plan.points)
    assert ends[-1] == plan.work
    for number in range(1, len(ends)):
        first = dataclasses.replace(plan, points=plan.points[:number])
        # Each of two sums is rounded to whole samples, from thirds.
        assert ends[number - 1] == pytest.approx(work_of(first, 256), abs=2)
