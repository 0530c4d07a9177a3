"""The search for learning rates: which trials there are, and what decides them."""

import math
import random

import pytest

from steadygrad.studies.compare.plan import make_trials
from steadygrad.studies.compare.schema import Run, Traits
from steadygrad.studies.compare.search import Search, center
from steadygrad.studies.folder import Results
from tests.unit.studies.compare.runs import made, planned, record


def bowl(best):
    """Losses with a minimum at a step of each optimizer, which falls as runs get longer."""

    def loss_of(optimizer, multiple, samples, point, step, repeat):
        return 1 + 0.1 * (step - best[optimizer]) ** 2 + 1 / samples + 0.01 * repeat

    return loss_of


def counts(journal, samples=None):
    """Runs of the search by optimizer."""
    found = {}
    for run in journal.select(Run):
        if not run.repeat and samples in (None, run.samples):
            found[run.optimizer] = found.get(run.optimizer, 0) + 1
    return found


def steps(journal, optimizer, samples):
    return sorted(
        run.step
        for run in journal.select(Run)
        if (run.optimizer, run.samples, run.repeat) == (optimizer, samples, 0)
    )


def test_an_interior_best_rate_needs_no_more_trials():
    plan = planned()
    journal = record(plan, bowl({"adamw": 0, "lans": 1, "sgd": -1}))
    assert counts(journal) == dict.fromkeys(plan.optimizers, 5 + 3 + 3)
    assert steps(journal, "lans", 32) == [-2, -1, 0, 1, 2]
    assert steps(journal, "lans", 64) == [0, 1, 2]
    search = Search(plan, journal, 1)
    assert search.tuned("lans", 2) == (0, 1)
    assert all(search.is_interior(name, rung) for name in plan.optimizers for rung in range(3))


def test_one_with_a_rate_of_its_own_makes_no_ladder_grow():
    plan = planned(traits={"lans": Traits(own_rate=True)})
    journal = record(plan, bowl({"adamw": 0, "lans": 4, "sgd": -1}))
    assert counts(journal) == {"adamw": 5 + 3 + 3, "lans": 3, "sgd": 5 + 3 + 3}
    assert Search(plan, journal, 1).is_interior("lans", 0)


def test_a_best_rate_at_the_edge_extends_the_ladders_of_all():
    plan = planned()
    journal = record(plan, bowl({"adamw": 0, "lans": 4, "sgd": 0}))
    # Three rates more, until 4 has a neighbour above: of all.
    assert counts(journal, 32) == dict.fromkeys(plan.optimizers, 8)
    assert steps(journal, "lans", 32) == [-2, -1, 0, 1, 2, 3, 4, 5]
    # The others get theirs at the end with the lower loss, and below where both are equal.
    assert steps(journal, "adamw", 32) == [-4, -3, -2, -1, 0, 1, 2, 3]
    search = Search(plan, journal, 1)
    assert search.tuned("lans", 1) == search.tuned("lans", 2) == (0, 4)
    assert search.is_interior("lans", 0)


def test_a_best_rate_that_keeps_moving_is_said_to_be_at_the_edge():
    plan = planned()
    journal = record(plan, bowl({"adamw": 0, "lans": 60, "sgd": 0}))
    search = Search(plan, journal, 1)
    # 4 rates more over the shortest runs, and one more over each of the others.
    assert search.best("lans", 0) == 2 + 4
    assert search.best("lans", 1) == 2 + 4 + 1 + 1
    assert not search.is_interior("lans", 1)
    assert len(set(counts(journal).values())) == 1


def test_all_rates_that_diverge_are_searched_downwards():
    def loss_of(optimizer, step, **fields):
        return math.inf if optimizer == "sgd" and step > -5 else 1.0 + 0.1 * abs(step)

    plan = planned()
    journal = record(plan, loss_of)
    assert Search(plan, journal, 1).best("sgd", 0) == -5
    assert steps(journal, "sgd", 32)[0] == -6
    assert len(set(counts(journal).values())) == 1


def test_the_longer_runs_are_searched_around_the_best_of_the_shorter():
    """The best rate falls by an octave with each horizon; ladders follow."""

    def loss_of(optimizer, samples, step, **fields):
        best = {32: 2, 64: 1, 128: 0}[samples]
        return 1 + 0.1 * (step - best) ** 2

    plan = planned()
    journal = record(plan, loss_of)
    search = Search(plan, journal, 1)
    assert [search.best("lans", rung) for rung in range(3)] == [2, 1, 0]
    assert search.tuned("lans", 1) == (0, 1)
    assert search.tuned("lans", 2) == (0, 0)
    # Without a third rung the longest runs have the rate of those half as long.
    short = planned(full=False)
    search = Search(short, record(short, loss_of), 1)
    assert search.tuned("lans", 1) == search.tuned("lans", 2) == (0, 1)


@pytest.mark.parametrize(
    ("true", "step"), [(0.0, 0.0), (0.25, 0.25), (0.45, 0.5), (-0.4, -0.5), (1.2, 1.25)]
)
def test_the_verdict_has_the_rate_between_the_ladders(true, step):
    plan = planned()
    journal = record(plan, lambda step, **fields: 1 + 0.1 * (step - true) ** 2)
    assert Search(plan, journal, 1).tuned("lans", 2) == (0, step)
    verdicts = {run.step for run in journal.select(Run) if run.repeat > 2}
    assert verdicts == {step}


@pytest.mark.parametrize("wall", [math.inf, 5.0])
def test_a_wall_beside_the_best_rate_keeps_it_on_the_ladder(wall):
    """The parabola of a finite wall leans away from it, by half an octave at most."""
    plan = planned()
    journal = record(plan, lambda step, **f: wall if step > 0 else 1 - 0.1 * step)
    step = Search(plan, journal, 1).tuned("lans", 2)[1]
    assert step == (0.0 if wall == math.inf else -0.5)


def test_the_last_rung_is_searched_at_the_best_point_of_the_other_knobs():
    def loss_of(optimizer, samples, point, step, **fields):
        # At its best point the best rate is another one.
        best = 1 if (optimizer, point) == ("lans", 2) else 0
        return 1 + 0.1 * (step - best) ** 2 - 0.3 * (point == 2)

    plan = planned(points=4)
    journal = record(plan, loss_of)
    search = Search(plan, journal, 1)
    assert search.point("lans") == 2
    assert search.tuned("lans", 2) == (2, 1)
    assert search.tuned("adamw", 2) == (2, 0)
    verdicts = [run for run in journal.select(Run) if run.repeat and run.samples == 128]
    assert {(run.point, run.step) for run in verdicts if run.optimizer == "lans"} >= {(2, 1)}
    # The same number of trials for all.
    assert len(set(counts(journal).values())) == 1


def test_the_shorter_verdict_has_the_rate_at_which_the_point_was_tried():
    """The parabola of the default point lies beside it, and says nothing of another point."""

    def loss_of(optimizer, samples, point, step, **fields):
        return 1 + 0.1 * (step - (0.0 if point else 0.45)) ** 2 - 0.3 * (point == 2)

    plan = planned(points=4)
    search = Search(plan, record(plan, loss_of), 1)
    assert search.tuned("lans", 1) == (2, 0)
    assert search.tuned("lans", 2) == (2, 0)
    alone = planned()
    assert Search(alone, record(alone, loss_of), 1).tuned("lans", 1) == (0, 0.5)


def test_an_optimizer_without_knobs_is_not_trained_twice_at_the_same_ones():
    plan = planned(optimizers=("adamw", "mine"), points=4)
    journal = record(plan, bowl({"adamw": 0, "mine": 0}))
    points = {(run.optimizer, run.point) for run in journal.select(Run)}
    assert {point for name, point in points if name == "adamw"} == {0, 1, 2, 3}
    assert {point for name, point in points if name == "mine"} == {0}


def test_batch_sizes_are_searched_around_the_square_root():
    assert [center(multiple) for multiple in (1, 2, 4, 16, 64, 256)] == [0, 0, 1, 2, 3, 4]
    plan = planned(multiples=(1, 16))
    journal = record(plan, lambda multiple, step, **f: 1 + 0.1 * abs(step - center(multiple)))
    assert {run.step for run in journal.select(Run) if run.multiple == 16 and not run.repeat} == {
        0, 1, 2, 3, 4,
    }  # fmt: skip


def random_losses(seed):
    """Losses at random, with infinities, NaN and ties."""
    drawn = {}
    generator = random.Random(seed)

    def loss_of(**fields):
        key = tuple(fields.values())
        if key not in drawn:
            drawn[key] = generator.choice([math.inf, math.nan, *(i / 4 for i in range(4, 20))])
        return drawn[key]

    return loss_of


@pytest.mark.parametrize("seed", range(25))
def test_all_optimizers_get_the_same_trials_whatever_happens(seed):
    plan = planned(points=1 + seed % 2, full=bool(seed % 3), multiples=((1,), (1, 4))[seed % 2])
    journal = record(plan, random_losses(seed))
    assert len(set(counts(journal).values())) == 1
    verdicts = [run for run in journal.select(Run) if run.repeat]
    of = {n: sum(run.optimizer == n for run in verdicts) for n in plan.optimizers}
    # Runs at the default rate are those of the verdict where it is the best.
    least = len(plan.multiples) * 2 * plan.seeds
    assert all(least <= count <= least + 2 for count in of.values())
    for name in plan.optimizers:
        ladder = [run.step for run in journal.select(Run) if run.optimizer == name]
        assert max(map(abs, ladder)) < 20


@pytest.mark.few(12)
@pytest.mark.parametrize("seed", range(25))
def test_decisions_are_the_same_whatever_else_is_recorded(seed):
    """Trials in any order that their needs allow: the same jobs, and the same results."""
    plan = planned(points=1 + seed % 2, full=bool(seed % 3), multiples=((1,), (1, 4))[seed % 2])
    generator, loss_of = random.Random(seed), random_losses(seed)
    trials = make_trials(plan, 64)
    serial = {trial.key: trial.job for trial in trials}
    reference = record(plan, loss_of, speed=False)
    expected = {key: job(reference) for key, job in serial.items()}

    journal, done, waiting = Results(), set(), list(trials)
    while waiting:
        ready = [trial for trial in waiting if done.issuperset(trial.needs)]
        trial = generator.choice(ready)
        waiting.remove(trial)
        done.add(trial.key)
        job = trial.job(journal)
        assert job == expected[trial.key], trial.key
        if job is not None and job["kind"] == "training":
            fields = {name: value for name, value in job.items() if name != "kind"}
            journal.add(made(loss=loss_of(**fields), **fields))
    assert len(journal.select(Run)) == len(reference.select(Run))


def test_a_loss_that_is_no_number_is_infinitely_bad():
    """The lowest rates are looked at first, and nothing is less than NaN."""
    plan = planned()
    journal = record(plan, lambda step, **f: math.nan if step < -1 else 1 + 0.1 * abs(step))
    assert Search(plan, journal, 1).best("lans", 0) == 0


def test_a_search_knows_what_is_not_recorded_yet():
    plan, whole = planned(), bowl({"adamw": 0, "lans": 1, "sgd": -1})
    half = record(plan, whole, speed=False, keep=lambda e: e.samples == 32 or e.optimizer == "lans")
    search = Search(plan, half, 1)
    assert search.is_done("adamw", 0)
    assert not search.is_done("adamw", 1)
    assert search.tried("adamw", 1) == {}
    # As long as the others' rates are not known, its ladder may still grow.
    assert search.is_done("lans", 0)
    assert not search.is_done("lans", 1)
    losses = {step: whole("lans", 1, 64, 0, step, 0) for step in (0, 1, 2)}
    assert search.tried("lans", 1) == losses
    assert Search(plan, record(plan, whole), 1).is_done("adamw", 2)


def test_trials_are_in_an_order_that_serves_them():
    plan = planned(multiples=(1, 4), points=3)
    trials = make_trials(plan, 64)
    places = {trial.key: place for place, trial in enumerate(trials)}
    assert len(places) == len(trials)
    assert all(places[key] < places[trial.key] for trial in trials for key in trial.needs)
    # The task's batch size is done before larger ones begin, its long verdicts before its short.
    kinds = [(key[0], key[1]) for key in places if len(key) > 1]
    assert max(i for i, kind in enumerate(kinds) if kind[1] == 1) < min(
        i for i, kind in enumerate(kinds) if kind[1] == 4
    )
    assert places["verdict", 1, 2, 3, "sgd"] < places["verdict", 1, 1, 1, "adamw"]
    # An evaluation of 64 samples costs 22, a third; a verdict's run has four.
    costs = {trial.key: trial.cost for trial in trials}
    assert costs["search", 1, 0, 0, 0, "lans"] == 32 + 22
    assert costs["verdict", 1, 2, 1, "lans"] == 128 + 4 * 22
