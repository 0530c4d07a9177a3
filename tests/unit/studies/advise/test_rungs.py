"""The ladder of lengths: which are trained, and what they say of a longer training."""

import math
import random
from functools import cache

import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.growth import longest, rungs_of
from steadygrad.studies.advise.search import _border_arm, _next_arm, trials_of
from steadygrad.studies.folder import Results, dumps
from steadygrad.studies.paired import SEEDS
from steadygrad.studies.schema import Training
from tests.unit.studies.advise.events import LENGTH, SIZES, make_header, studied, within_tolerance

# Of the longest rung; how many times as long the run is; the samples of a study.
TOP, TIMES, WORK = 16 * LENGTH, 64, 60
TUNED = dict.fromkeys((8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512), 0.5)


def ladder_header(settings=None, task=None, **plan):
    own = {"shorter": (LENGTH, 4 * LENGTH), "target": TIMES * TOP, "work": WORK * TOP, "seeds": 64}
    return make_header(TOP, settings=settings, task=task, **{**own, **plan})


def ladder(critical, growth, header=None, **world):
    """Header and results of a study whose every size is best at half an octave."""
    header = header or ladder_header()
    known = {"growth": growth, "best": TUNED, "lengths": WORK, **world}
    return header, studied(header, critical, **known)


@cache
def usual(**world):
    """A ladder that several tests look at."""
    return ladder(200.0, 0.35, **world)


def trainings(made):
    return [run for run in made if isinstance(run, Training)]


@pytest.mark.parametrize("sigma", [0.0005, 0.004])
@pytest.mark.parametrize(("size", "growth"), [(200.0, 0.35), (60.0, 0.2), (800.0, 0.3)])
def test_the_critical_size_of_a_longer_training_is_predicted(size, growth, sigma):
    header, made = ladder(size, growth, sigma=sigma)
    for rung in rungs_of(header, Results(made))[0]:
        own = rung.critical
        truth = within_tolerance(size * (rung.samples / TOP) ** growth)
        # Between two sizes it is interpolated, which is an error of some per cent.
        assert own.low / 1.1 < truth < 1.1 * own.high
        assert own.batch_size == pytest.approx(truth, rel=0.15)
    found = summarize(header, Results(made), "complete")
    truth = within_tolerance(size * TIMES**growth)
    predicted = found.growth.predicted
    assert predicted.low < truth < predicted.high
    assert predicted.batch_size == pytest.approx(truth, rel=0.35)
    assert found.growth.samples == header.plan.target
    # Safe is what passed over the longest rung.
    safe = found.recommendation
    assert safe.samples == TOP
    assert safe.batch_size <= within_tolerance(size)
    assert safe.lr == pytest.approx(0.001 * math.sqrt(safe.batch_size / 8) * 2**0.5, rel=0.2)
    likely = found.growth.likely
    assert likely.samples == TIMES * TOP
    assert likely.batch_size == pytest.approx(predicted.batch_size, rel=0.05)  # two digits
    # Of several processes each has as many samples.
    shared = replace(header, runtime=replace(header.runtime, world_size=7))
    shares = summarize(shared, Results(made), "complete").growth.likely.batch_size
    assert shares == likely.batch_size // 7 * 7


def test_it_need_not_grow():
    header, made = ladder(200.0, 0.0, sigma=0.0005)
    found = summarize(header, Results(made), "complete").growth
    assert found.slope < 0.15
    assert found.predicted.low < within_tolerance(200.0) < found.predicted.high


def test_a_rung_searches_the_rate_of_the_smallest_size():
    """Shorter lengths end once they are known; the rest is the longest's, for the safe size."""
    header, made = usual()
    searches = {(run.samples, run.arm) for run in trainings(made) if run.seed in SEEDS}
    assert searches == {(samples, 0) for samples in header.plan.rungs}
    order = [run.samples for run in trainings(made)]
    assert order.index(TOP) > max(i for i, n in enumerate(order) if n == 4 * LENGTH)
    assert sum(order) > WORK * TOP / 1.2
    assert summarize(header, Results(made), "budget").recommendation.batch_size is not None


@pytest.mark.parametrize("drift", [-0.5, 1.0])
def test_rates_that_drift_with_the_length_are_followed(drift):
    header, made = ladder(200.0, 0.35, sigma=0.0005, drift=drift)
    compared = [run for run in trainings(made) if run.seed not in SEEDS]
    for samples in header.plan.rungs:
        best = 0.5 - drift * math.log(samples / TOP, 4)
        steps = {run.step for run in compared if run.samples == samples}
        assert all(abs(step - best) <= 0.5 for step in steps)
    summary = summarize(header, Results(made), "complete")
    found = summary.growth
    assert found.drift == pytest.approx(-2 * drift, abs=0.5)
    assert any("learning rate" in said for said in summary.remarks) == (abs(found.drift) >= 1)
    assert found.predicted.low < within_tolerance(200.0 * TIMES**0.35) < found.predicted.high


@pytest.mark.parametrize("at_once", [2, 5, 16])
def test_neither_workers_nor_kills_change_a_ladder(at_once):
    header, made = usual(sigma=0.004, lengths=1000, at_once=1)
    said = dumps(summarize(header, Results(made), "complete"))
    _, other = ladder(200.0, 0.35, header, sigma=0.004, at_once=at_once, lengths=1000)
    assert {run.key for run in other} == {run.key for run in made}
    assert dumps(summarize(header, Results(other), "complete")) == said
    draw = random.Random(at_once)
    for count in range(0, len(made), 7):
        results = Results(draw.sample(made[:count], count))
        following = [t.key for t in trials_of(header, results) if t.key not in results]
        assert following[0] == made[count].key


def test_where_no_size_is_beyond_the_tolerance_a_lower_end_is_predicted():
    header, made = ladder(1e6, 0.35, ladder_header({"batch_sizes": "128,512"}))
    found = summarize(header, Results(made), "complete")
    grown = found.growth
    assert found.recommendation.batch_size == 512
    assert [one.low for one in grown.lengths] == [128, 512, 512]  # the largest that were tried
    assert not any(one.is_closed for one in (*grown.lengths, grown.predicted))
    assert grown.predicted.low < grown.predicted.batch_size < grown.predicted.high == math.inf
    # No cost has a lower end, and the largest one no upper end: the size need not grow.
    costs = {cost.batch_size: cost for cost in grown.costs}
    assert {cost.low for cost in grown.costs} == {0}
    assert costs[128].high < found.tolerance < costs[512].high == math.inf
    assert "what batch 512 costs is not known" in found.answer
    assert "or more" in found.answer
    few = Results([run for run in trainings(made) if not run.arm])
    assert summarize(header, few, "budget").growth.why == "none"


def test_a_size_that_the_user_names_has_a_price():
    header = ladder_header({"batch_sizes": "64,128,1024"}, arms=(8, 64, 128))
    header, made = ladder(200.0, 0.35, header, sigma=0.0005)
    found = summarize(header, Results(made), "complete")
    assert {row.batch_size for row in found.checked} <= {64, 128}
    costs = {cost.batch_size: cost for cost in found.growth.costs}
    assert [*costs] == [64, 128, 1024] == sorted(costs)
    assert found.named == 1024
    # Of those that can be used the largest one below what is predicted.
    assert found.growth.likely.batch_size == 128 < found.growth.predicted.batch_size
    for size in (found.recommendation.batch_size, 1024):
        assert f"batch {size:,} " in found.answer
    # Sizes that were too large to be tried have a row, too.
    rows = {row[0]: row for row in found.table.rows}
    assert [*rows] == ["8", "64", "128", "1,024"]
    assert (rows["1,024"][2], rows["8"][4]) == ("–", "–")
    # What they truly cost over the whole run.
    grown = 200.0 * TIMES**0.35
    for size, cost in costs.items():
        truth = (1 + size / grown) / (1 + 8 / grown) - 1
        assert cost.low <= truth * 1.1
        assert truth <= cost.high


PROXY = {"stand_in": 40, "arms": SIZES * 2}  # a quarter of the parameters


def test_a_stand_in_that_agrees_predicts_for_the_real_model():
    header, made = ladder(200.0, 0.35, ladder_header(**PROXY))
    rungs, real = rungs_of(header, Results(made))
    assert (real.samples, real.weight) == (LENGTH, 4)
    assert real.critical.batch_size == pytest.approx(rungs[0].critical.batch_size, rel=0.2)
    found = summarize(header, Results(made), "complete")
    alone, others = usual()
    own = summarize(alone, Results(others), "complete")
    assert (found.stand_in, own.stand_in) == (40, 0)
    assert found.table.title != own.table.title
    assert all(isinstance(one, Training) for one in made)  # no noise scale is measured
    # The same lengths say it, a little less surely.
    assert found.growth.predicted.low < own.growth.predicted.low
    assert found.growth.predicted.high > own.growth.predicted.high
    # The real model is trained over the shortest length alone.
    assert {run.samples for run in made if run.arm >= len(header.plan.sizes)} == {LENGTH}


@pytest.mark.parametrize("times", [0.3, 4.0])
def test_a_stand_in_that_does_not_agree_predicts_nothing(times):
    header, made = ladder(200.0, 0.35, ladder_header(**PROXY), real=times)
    found = summarize(header, Results(made), "complete").growth
    assert (found.why, found.predicted, found.likely) == ("stand-in", None, None)
    assert len(found.lengths) == 3
    # What the stand-in passed is not safe for the real one.
    assert summarize(header, Results(made), "complete").recommendation.why == "undecided"
    # Neither does one that was not compared.
    few = [run for run in made if run.arm < len(header.plan.sizes)]
    assert summarize(header, Results(few), "budget").growth.why == "unchecked"


def test_the_rate_is_that_of_the_real_model():
    best = {**TUNED, **{("real", size): 2.0 for size in TUNED}}
    header, made = ladder(200.0, 0.35, ladder_header(**PROXY), best=best)
    found = summarize(header, Results(made), "complete")
    assert found.octaves == pytest.approx(2.0, abs=0.25)
    for one in (found.recommendation, found.growth.likely):
        rule = 0.001 * math.sqrt(one.batch_size / 8)
        assert one.lr == pytest.approx(4 * rule, rel=0.2)


def test_a_budget_that_ends_early_keeps_what_the_shorter_rungs_said():
    header, made = usual()
    few = [run for run in trainings(made) if run.samples < TOP / 2]
    found = summarize(header, Results(few), "budget")
    assert found.growth.predicted is not None
    assert found.recommendation.samples == 4 * LENGTH
    assert found.recommendation.batch_size <= within_tolerance(200.0 / 4**0.35)


def test_a_smallest_batch_that_diverged_tells_nothing():
    """Where the rate decays it is trained over each length."""
    header, made = ladder(200.0, 0.35, ladder_header(task={"lr_decay": "linear"}))
    shorter = next(run for run in made if run.arm == 0 and run.samples not in header.plan.rungs)
    lost = replace(shorter, loss=math.inf, curve=((shorter.curve[0][0], math.inf),))
    results = Results([lost if run.key == lost.key else run for run in trainings(made)])
    assert trials_of(header, results) is not None
    assert summarize(header, results, "budget").answer


def test_before_its_check_a_stand_in_has_no_noise_scale_measured():
    _, made = ladder(1e6, 0.35, ladder_header(**PROXY))
    assert all(isinstance(one, Training) for one in made)


@pytest.mark.parametrize(("size", "end"), [(120.0, 2), (200.0, 3)])
def test_a_larger_size_costs_as_much_as_a_smaller_one_at_least(size, end):
    named = ",".join(str(round(16 * 1.1**step)) for step in range(70))
    header, made = ladder(size, 0.2, ladder_header({"batch_sizes": named}), sigma=0.01)
    compared = longest(rungs_of(header, Results(made))[0]).overheads[end]
    assert [*compared] != sorted(compared)  # by chance
    costs = summarize(header, Results(made), "budget").growth.costs
    ends = [cost.low if end == 2 else cost.high for cost in costs]
    assert ends == sorted(ends)
    assert ends[0] < ends[-1]


def test_where_noise_hides_the_border_the_longest_rung_turns_to_the_safe_size():
    header, made = ladder(200.0, 0.35, sigma=0.03)
    top = rungs_of(header, Results(made))[0][-1]
    wanted = [trial.key for trial in trials_of(header, Results(made)) if trial.key[0] != "noise"]
    assert {arm for _, arm, *_ in wanted} == {0, _next_arm(top)}
    assert _next_arm(top) != _border_arm(top)
