"""From a budget to a length of trainings, and the order of the trials."""

import math
import re

import pytest

from steadygrad._checks import InputError
from steadygrad.studies.compare import trials
from steadygrad.studies.compare.schema import Arm, Settings, Traits
from steadygrad.studies.compare.trials import make_plan
from steadygrad.studies.paired import FARTHEST
from steadygrad.studies.schema import Training
from steadygrad.studies.work import trials_of
from tests.unit.studies.compare.runs import header_of, noisy, planned, record, summary
from tests.unit.studies.framework import make_trainer
from tests.unit.studies.tiny_task import make_task

NAMES = ("adamw", "scaledadam", "lans")


def plan_for(budget, *, speed=200.0, workers=1, names=NAMES, **settings):
    return make_plan(
        Settings(budget=budget, **settings),
        names,
        make_task(),
        speed=speed,
        workers=workers,
    )


def test_a_plan_reckons_with_slower_optimizers(monkeypatch):
    """As torch's Muon is on some processors: three to six times."""
    lengths, settings = [], Settings(optimizers="lans", budget=300)
    for slower in (1.0, 4.0):
        speeds = iter([100.0, 100.0 / (2 * slower - 1), 100.0])
        monkeypatch.setattr(trials, "measured_speed", lambda *a, s=speeds, **k: next(s))
        lengths.append(trials.plan_for(settings, make_trainer(), speed=1e3, workers=1).samples)
    assert lengths[0] == pytest.approx(4 * lengths[1], rel=0.05)  # whole steps, and evaluations


@pytest.mark.parametrize(("budget", "workers", "batches"), [(300, 1, "1"), (7200, 2, "1,3,16")])
def test_about_ten_pairs_of_each_arm_fit_the_budget(budget, workers, batches):
    plan = plan_for(budget, workers=workers, batches=batches)
    sizes = [4 * int(multiple) for multiple in batches.split(",")]
    assert plan.arms == tuple(Arm(name, size) for size in sizes for name in NAMES)
    # By hand: 8 trainings of a search and 10 pairs of each arm, 10 halves of each baseline, each
    # with an evaluation of 22 samples.
    whole, halves = 18 * len(plan.arms), 10 * len(sizes)
    work = plan.samples * (whole + halves / 2) + 22 * (whole + halves)
    assert plan.work == work
    span = 0.85 * 200 * workers * (budget - (12 if workers > 1 else 4))
    unit = 2 * (4 if batches == "1" else 4 * 48)
    assert work <= span < work + unit * (whole + halves / 2)
    # Whole steps at every batch size, of the half as well.
    assert all(plan.samples % (2 * size) == 0 for size in sizes)
    assert plan.samples >= 40 * plan.largest_batch


def test_a_given_length_and_what_cannot_be_planned():
    assert plan_for(120, samples=1003).samples == 1000
    with pytest.raises(InputError, match="--budget 220s"):
        plan_for(100, samples=1003)
    for match, settings in {
        r"--samples .* 160, .*Found 80\.": {"samples": 80},
        r"--seeds .*least 5, .*Found 4\.": {"seeds": 4},
        r"--batches .*'1,1024,1025'": {"batches": "1,1024,1025"},
        "--batches .*'2'": {"batches": "2"},
    }.items():
        with pytest.raises(InputError, match=match):
            plan_for(1000, **settings)
    with pytest.raises(InputError, match=r"too small .* --budget \d+s") as error:
        plan_for(10)
    # What it says would be enough is enough, and a second less is not.
    seconds = int(re.search(r"--budget (\d+)s", str(error.value))[1])
    assert plan_for(seconds).samples == 160
    with pytest.raises(InputError):
        plan_for(seconds - 1)
    # A verdict by four pairs, where there is one comparison.
    assert plan_for(1000, names=NAMES[:2], seeds=4).seeds == 4


def test_a_plan_without_its_baseline_is_refused():
    with pytest.raises(ValueError, match="adamw"):
        planned(("lans", "adamw"))


def test_the_search_is_first_and_the_pairs_go_seed_by_seed():
    plan = planned(("adamw", "lans"), (4, 16), traits={"lans": Traits(own_rate=True)})
    header = header_of(plan)
    trials = trials_of(header, record(plan, noisy(), most=0))
    # One that sets its own rate has no ladder, and could begin its pairs.
    keys = [(arm, step, seed) for _, arm, _, step, seed in (trial.key for trial in trials)]
    search = [(arm, step, seed) for arm in (0, 2) for step in (-1, 0, 1) for seed in (64, 65)]
    assert keys == search + [(arm, 0, seed) for seed in range(5) for arm in (1, 3)]
    assert trials[0].cost == 128 + 22
    # Then five seeds, the baseline first and its half beside it.
    results = record(plan, noisy(), most=12)
    keys = [trial.key[1:3] for trial in trials_of(header, results)]
    assert keys == [(0, 128), (0, 64), (1, 128), (2, 128), (2, 64), (3, 128)] * 5


def test_an_arm_that_is_told_is_trained_no_more():
    runs = record(planned(seeds=6), noisy(lans=-0.3)).select(Training)
    seeds = [{run.seed for run in runs if run.arm == arm and run.seed < 64} for arm in range(3)]
    assert seeds == [{*range(6)}, {*range(5)}, {*range(6)}]
    halves = {run.seed for run in runs if run.samples == 64}
    assert (halves, {run.arm for run in runs if run.samples == 64}) == ({*range(6)}, {0})


def test_arms_that_always_diverge_end_the_study():
    plan = planned(("adamw", "lans"))
    found = record(plan, lambda **_: math.inf)
    pairs = [one for one in found if one.seed < plan.seeds and one.samples == plan.samples]
    assert len(pairs) == 2 * plan.first
    # The ladders went down as far as they go.
    assert min(one.step for one in found) == -FARTHEST


def test_a_ladder_of_equal_losses_has_no_edge():
    plan = planned(("adamw", "lans"), seeds=4)
    assert [one.interior for one in summary(plan, lambda **_: 0.5).tuned] == [True, True]
