"""Steps that a budget has time for."""

import pytest

from steadygrad.studies.folder import Results
from steadygrad.studies.inspect.findings import summarize
from steadygrad.studies.inspect.plan import REPEATED, make_plan
from steadygrad.studies.inspect.schema import Plan, Settings, Shortened
from tests.unit.studies.inspect.runs import HEADER
from tests.unit.studies.results import changed

BATCH, VALID = 4, 300
PLAN = Plan(batch_size=BATCH, steps=200, layers=(), work=1)


def steps(budget, speed, workers=1, **settings):
    return make_plan(Settings(budget=budget, **settings), PLAN, VALID, speed=speed, workers=workers)


def test_a_budget_with_time_for_all():
    plan = steps(300.0, 1e4)
    assert (plan.steps, plan.work) == (200, 3 * 200 * BATCH + 2 * 100)


@pytest.mark.parametrize("budget", [30.0, 45.0, 60.0])
def test_a_short_budget_is_kept(budget):
    """And the steps that are given stay."""
    plan = steps(budget, 40.0)
    assert 16 < plan.steps < 200
    seconds = REPEATED * plan.work / 40.0
    assert 0.6 * budget < seconds + 4 < budget
    assert steps(budget, 40.0, steps=200).steps == 200


def test_the_least_and_what_two_workers_gain():
    """They train two phases at a time."""
    assert steps(5.0, 1.0).steps == 16
    assert steps(60.0, 40.0).steps < steps(60.0, 40.0, workers=2).steps < 200


@pytest.mark.parametrize(
    ("given", "planned", "said"), [(None, 64, True), (64, 64, False), (None, 200, False)]
)
def test_fewer_steps_than_usual_are_said(given, planned, said):
    settings = Settings(task="tiny", steps=given)
    header = changed(HEADER, settings=settings, plan=changed(HEADER.plan, steps=planned))
    found = summarize(header, Results([]), "budget")
    assert (Shortened(steps=64) in found.findings) == said
