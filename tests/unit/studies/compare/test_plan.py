"""From a budget to amounts of work; the search for learning rates, and what decides it."""

import math
import random
import re
from itertools import product

import pytest

from steadygrad._checks import InputError
from steadygrad.studies.compare.plan import make_plan, make_trials
from steadygrad.studies.compare.schema import Run, Settings, Traits
from steadygrad.studies.compare.search import Search
from steadygrad.studies.folder import Results
from tests.unit.studies.compare.runs import planned, record, result_of
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


@pytest.mark.parametrize(
    ("budget", "workers", "batches"),
    [(100, 5, "1"), (300, 1, "1"), (3600, 2, "1,3,16"), (7200, 1, "1")],
)
def test_the_plan_fits_its_budget_and_uses_it(budget, workers, batches):
    plan = plan_for(budget, workers=workers, batches=batches)
    trials = make_trials(plan, 64)
    assert plan.work == sum(trial.cost for trial in trials)
    assert plan.work / workers <= plan.span <= plan.work
    seconds = plan.span / plan.samples_per_second
    assert seconds <= 0.85 * budget
    # Bisected to 3 %, and runs are a whole number of units; start-up is taken off.
    assert seconds >= 0.75 * (budget - 12)
    assert plan.horizons == (plan.horizons[2] // 4, plan.horizons[2] // 2, plan.horizons[2])
    # Whole steps of every batch size, and enough of them.
    for horizon, multiple in product(plan.horizons, plan.multiples):
        assert horizon % (4 * multiple) == 0
        assert horizon >= 8 * 4 * multiple


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


@pytest.mark.parametrize(("budget", "seeds"), [(2000, 10), (1000, 5), (600, 3)])
def test_a_length_that_is_given_leaves_the_seeds_to_the_budget(budget, seeds):
    plan = plan_for(budget, samples=3203)
    assert (plan.horizons, plan.seeds) == ((800, 1600, 3200), seeds)
    assert plan.span / plan.samples_per_second <= 0.85 * budget


def test_seeds_may_be_given():
    plan = plan_for(3600, seeds=25)
    assert plan.seeds == 25
    assert plan.horizons[2] < plan_for(3600).horizons[2]


@pytest.mark.parametrize(
    ("budget", "settings", "match"),
    [
        (7200, {"samples": 400, "batches": "1,4"}, "--samples should be at least 512"),
        (3600, {"seeds": 1}, "--seeds"),
        *((300, {"batches": text}, "--batches") for text in ("2", "1,4,3", "1,,4", "1,2000")),
    ],
)
def test_settings_that_no_plan_can_have(budget, settings, match):
    with pytest.raises(InputError, match=match):
        plan_for(budget, **settings)


def bowl(lans=0, sgd=0):
    """Losses with a minimum at a step of each optimizer, which falls as runs get longer."""
    best = {"adamw": 0, "lans": lans, "sgd": sgd}

    def loss_of(optimizer, multiple, samples, step, repeat):
        return 1 + 0.1 * (step - best[optimizer]) ** 2 + 1 / samples + 0.01 * repeat

    return loss_of


def searched(loss_of, **plan):
    """The search of a whole study, and its results."""
    journal = record(planned(**plan), loss_of)
    return Search(planned(**plan), journal, 1), journal


def counts(journal, samples=None):
    """Runs of the search by optimizer."""
    found = {}
    for run in journal.select(Run):
        if not run.repeat and samples in (None, run.samples):
            found[run.optimizer] = found.get(run.optimizer, 0) + 1
    return found


def steps(journal, optimizer, samples):
    at = optimizer, samples, 0
    runs = journal.select(Run)
    return sorted(run.step for run in runs if (run.optimizer, run.samples, run.repeat) == at)


def test_an_interior_best_rate_needs_no_more_trials():
    search, journal = searched(bowl(lans=1, sgd=-1))
    assert counts(journal) == dict.fromkeys(search.plan.optimizers, 5 + 3 + 3)
    assert steps(journal, "lans", 32) == [-2, -1, 0, 1, 2]
    assert steps(journal, "lans", 64) == [0, 1, 2]
    assert search.tuned("lans", 2) == 1
    names = search.plan.optimizers
    assert all(search.is_interior(name, rung) for name in names for rung in range(3))
    # Without a third rung the longest runs have the rate of those half as long.
    search, journal = searched(bowl(lans=1), full=False)
    assert (search.tuned("lans", 2), steps(journal, "lans", 128)) == (1, [])


def test_one_with_a_rate_of_its_own_makes_no_ladder_grow():
    search, journal = searched(bowl(lans=4, sgd=-1), traits={"lans": Traits(own_rate=True)})
    assert counts(journal) == {"adamw": 5 + 3 + 3, "lans": 3, "sgd": 5 + 3 + 3}
    assert search.is_interior("lans", 0)


def test_a_best_rate_at_the_edge_extends_the_ladders_of_all():
    search, journal = searched(bowl(lans=4))
    # Three rates more, until 4 has a neighbour above: of all.
    assert counts(journal, 32) == dict.fromkeys(search.plan.optimizers, 8)
    assert steps(journal, "lans", 32) == [-2, -1, 0, 1, 2, 3, 4, 5]
    # The others get theirs at the end with the lower loss, and below where both are equal.
    assert steps(journal, "adamw", 32) == [-4, -3, -2, -1, 0, 1, 2, 3]
    assert search.tuned("lans", 1) == search.tuned("lans", 2) == 4
    assert search.is_interior("lans", 0)


@pytest.mark.parametrize(
    ("true", "wall", "step"),
    [
        (0.0, None, 0.0),
        (0.45, None, 0.5),
        (-0.4, None, -0.5),
        (1.2, None, 1.25),
        # The parabola of a finite wall leans away from it, by half an octave at most.
        (0.5, 5.0, -0.5),
        (0.5, math.inf, 0.0),
    ],
)
def test_the_verdict_has_the_rate_between_the_ladders(true, wall, step):
    def loss_of(step, **fields):
        return wall if wall and step > 0 else 1 + 0.1 * (step - true) ** 2

    search, journal = searched(loss_of)
    assert search.tuned("lans", 2) == step
    assert {run.step for run in journal.select(Run) if run.repeat > 2} == {step}


@pytest.mark.few(10)
@pytest.mark.parametrize("seed", range(25))
def test_all_optimizers_get_the_same_trials_in_whatever_order(seed):
    """Losses at random, with infinities, NaN and ties; any order that the trials' needs allow."""
    plan = planned(full=bool(seed % 3), multiples=((1,), (1, 4))[seed % 2])
    generator, drawn = random.Random(seed), {}

    def loss_of(**fields):
        losses = [math.inf, math.nan, *(i / 4 for i in range(4, 20))]
        return drawn.setdefault(tuple(fields.values()), generator.choice(losses))

    trials = make_trials(plan, 64)
    whole = record(plan, loss_of)
    assert len(set(counts(whole).values())) == 1
    verdicts = [run.optimizer for run in whole.select(Run) if run.repeat]
    each = len(plan.multiples) * 2 * plan.seeds
    assert all(verdicts.count(name) == each for name in plan.optimizers)
    assert max(abs(run.step) for run in whole.select(Run)) < 20

    expected = {trial.key: trial.job(whole) for trial in trials}
    journal, done, waiting = Results(), set(), list(trials)
    while waiting:
        trial = generator.choice([each for each in waiting if done.issuperset(each.needs)])
        waiting.remove(trial)
        done.add(trial.key)
        job = trial.job(journal)
        assert job == expected[trial.key], trial.key
        if job is not None:
            journal.add(result_of(plan, job, loss_of))
    assert len(journal.select(Run)) == len(whole.select(Run))


def test_trials_are_in_an_order_that_serves_them():
    trials = make_trials(planned(multiples=(1, 4)), 64)
    places = {trial.key: place for place, trial in enumerate(trials)}
    assert len(places) == len(trials)
    assert all(places[key] < places[trial.key] for trial in trials for key in trial.needs)
    # The task's batch size is done before larger ones begin, its long verdicts before its short.
    multiples = [trial.key[1] for trial in trials[1:]]
    assert multiples == sorted(multiples)
    assert places["verdict", 1, 2, 3, "sgd"] < places["verdict", 1, 1, 1, "adamw"]
    # An evaluation of 64 samples costs 22, a third; a verdict's run has four.
    costs = {trial.key: trial.cost for trial in trials}
    assert costs["search", 1, 0, 0, 0, "lans"] == 32 + 22
    assert costs["verdict", 1, 2, 1, "lans"] == 128 + 4 * 22
