"""The numbers of a study, what is found in them, and how that is said."""

import math
import random

import numpy as np
import pytest
from msgspec.structs import replace

from steadygrad.studies.compare import words
from steadygrad.studies.compare.findings import choice_variance, sample_ratio, summarize
from steadygrad.studies.compare.schema import Edge, Ratio, Traits, Verdict
from steadygrad.studies.folder import Results
from steadygrad.studies.paired import half_width, intervals, pairs_needed
from steadygrad.studies.schema import Trial
from tests.unit.studies.compare.runs import header_of, noisy, planned, record, result_of, summary

PLAN = planned()


def but(curve, failing=lambda **fields: False, **lost):
    """The losses but where all these fields are so, which diverged."""
    is_lost = lambda fields: failing(**fields) or (lost and lost.items() <= fields.items())
    return lambda **fields: math.inf if is_lost(fields) else curve(**fields)


def findings(found, kind):
    return [each for each in found.findings if isinstance(each, kind)]


def test_a_planted_difference_is_told_early_and_an_equal_one_is_not():
    found = summary(PLAN, noisy(lans=-0.3))
    lans, sgd = found.verdicts
    assert (lans.optimizer, lans.verdict, lans.pairs, found.confidence) == (
        "lans",
        "better",
        5,
        0.975,
    )
    assert (sgd.verdict, sgd.high > 0 > sgd.low) == ("cannot tell", True)
    assert lans.mean == pytest.approx(-0.3, abs=0.05)
    assert found.findings[0] == lans
    assert "LANS (learning rate 0.001) is better than AdamW" in found.answer
    # A loss that falls by 0.2 an octave: at most 4 times.
    assert lans.sample_ratio.low > 1.5
    # By the median seconds of its trainings, 1.25 of AdamW's.
    assert lans.time_ratio.value == pytest.approx(1.25 / lans.sample_ratio.value)
    # One answer for as many comparisons as there are.
    (alone,) = summary(planned(("adamw", "lans")), noisy(lans=-0.3)).verdicts
    assert (alone.pairs, alone.high < 0) == (4, True)


def test_an_interval_is_that_of_the_looks_with_the_choice_of_rates():
    found = summary(PLAN, noisy(lans=-0.3))
    row = found.verdicts[0]
    apart = np.array([row.losses[seed] - row.baseline_losses[seed] for seed in row.losses])
    losses = {own.optimizer: own.tried for own in found.tuned}
    bends = [losses[name][-1] - 2 * losses[name][0] + losses[name][1] for name in losses]
    noise = apart.var(ddof=1) / 2 / 2  # of two seeds of the search
    choice = sum(choice_variance(bend, noise) for bend in bends[:2])
    mean, half = intervals(apart, 0.025, choice)
    assert (row.low, row.high) == pytest.approx((mean[-1] - half[-1], mean[-1] + half[-1]))
    # Without a rate that was chosen, none of its error.
    traits = {"lans": Traits(own_rate=True)}
    fixed = summary(planned(traits=traits), noisy(lans=-0.3)).verdicts[0]
    assert (fixed.losses, fixed.high < row.high) == (row.losses, True)


def test_the_variance_of_a_choice_by_hand():
    # As many standard errors of a mean that has it too; the pairs that it asks for, too.
    alone, both = (half_width(np.float64(8), 4.0, 0.05, choice=x) for x in (0.0, 1.5))
    assert both == pytest.approx(alone * math.sqrt((4 / 8 + 1.5) / (4 / 8)))
    assert pairs_needed(both * 1.001, 4.0, 0.05, choice=1.5) == 8
    # An error of a quarter of an octave alone; with noise; with more than the ladder leaves.
    assert choice_variance(2.0, 0.0) == 2 * (1 / 16) ** 2
    assert choice_variance(2.0, 8.0) == pytest.approx(2 * (1 + 1 / 16) ** 2)
    assert choice_variance(2.0, 1e9) == pytest.approx(2 * (4 / 3 + 1 / 16) ** 2)
    assert choice_variance(0.0, 1.0) == choice_variance(math.inf, 1.0) == 0


def test_the_ratio_of_samples_by_hand():
    # Half an octave of the baseline's own fall, with exponents of a third, 0 and 1.
    third = (1 - 0.5 * (2 ** (1 / 3) - 1)) ** -3
    assert sample_ratio(-0.1, (-0.1, -0.1), 0.2, 0.0) == pytest.approx(Ratio(third, 2**0.5, 2))
    third = (1 + 0.5 * (2 ** (1 / 3) - 1)) ** -3
    assert sample_ratio(0.1, (0.0, 0.2), 0.2, 0.0) == pytest.approx(Ratio(third, 0.5, 1))
    # Bounds; where the fall itself is not clear, nothing.
    assert sample_ratio(-9.0, (-10, -8), 0.2, 0.1) == Ratio(4, 4, 4)
    assert sample_ratio(9.0, (8, 10), 0.2, 0.1) == Ratio(0.25, 0.25, 0.25)
    assert sample_ratio(-0.1, (-0.2, 0.0), 0.2, 0.2) is None
    assert sample_ratio(0.0, (-math.inf, math.inf), 0.2, 0.1) is None


def test_a_difference_within_the_error_of_the_rates_ends_the_pairs():
    def loss_of(step, optimizer, seed, **fields):
        away = 0.4 * (optimizer == "lans")
        return 1 + 0.2 * (step - away) ** 2 + 1e-4 * random.Random(f"{optimizer}{seed}").random()

    found = summary(planned(("adamw", "lans")), loss_of)
    (row,) = found.verdicts
    assert (row.verdict, row.rates_limit, row.pairs, row.needed) == ("cannot tell", True, 4, None)
    assert "more seeds would not help" in found.remarks[0]


def test_a_diverging_optimizer_is_not_hidden():
    found = summary(PLAN, but(noisy(), optimizer="sgd"))
    (row,) = findings(found, Verdict)[:1]
    assert (row.optimizer, row.verdict, row.mean, row.lost) == ("sgd", "worse", 1, 5)
    assert (row.losses, row.sample_ratio) == (dict.fromkeys(range(5), math.inf), None)
    # No better rate is in sight.
    assert findings(found, Edge) == []


def test_one_pair_that_diverged_does_not_move_the_rate():
    lost = but(noisy(lans=-0.3), optimizer="lans", seed=1, step=0)
    row = summary(PLAN, lost).verdicts[0]
    assert (row.lr, row.lost, row.baseline_lost, row.verdict) == (1e-3, 1, 0, "cannot tell")
    assert row.mean == pytest.approx(1 / 16)
    # As often as AdamW, which it beats where neither does.
    both = but(noisy(lans=-0.3), lambda seed, step, **fields: seed == 1 and step == 0)
    found = summary(PLAN, both)
    assert {(row.verdict, row.lost, row.mean) for row in found.verdicts} == {("cannot tell", 1, 0)}
    assert found.answer.startswith("AdamW diverged on 1 of 16 seeds")


def test_an_evaluation_that_falls_in_no_training_is_not_judged():
    header = replace(header_of(PLAN), first_value=0.0)
    found = summarize(header, record(PLAN, noisy(lans=-0.1)), "budget")
    assert (found.findings, found.answer, words.too_little(found)) == ((), found.rise, None)


@pytest.mark.parametrize(
    ("name", "size", "shifts", "hangs"),
    [
        # It is behind, and may be better.
        ("sgd", 16, {"sgd": 19}, True),
        # It is behind, but another one is ahead of both.
        ("sgd", 16, {"sgd": 19, "lans": -9}, False),
        ("adamw", 4, {"lans": -9}, True),
        # It is ahead.
        ("lans", 4, {}, False),
    ],
)
def test_the_best_rate_at_the_end_of_those_tried(name, size, shifts, hangs):
    own = noisy(**shifts)

    def loss_of(step, **fields):
        at_end = (fields["optimizer"], fields["size"]) == (name, size)
        return own(step=step, **fields) - (0.3 * step + 0.05 * step**2) * at_end

    found = summary(planned(sizes=(4, 16)), loss_of)
    assert findings(found, Edge) == [Edge(optimizer=name, batch_size=size, hangs=hangs)]
    (row,) = (row for row in found.tuned if not row.interior)
    assert (row.step, row.lr) == (6, 1e-3 * 2**6)
    # An answer that hangs on it opens with it.
    assert ("so far, " in found.answer) == hangs


def test_one_with_a_rate_of_its_own_has_no_ladder():
    plan = planned(traits={"lans": Traits(own_rate=True)})
    found = summary(plan, noisy())
    assert [row.interior for row in found.tuned] == [True, None, True]
    assert (found.tuned[1].tried, found.tuned[1].lr) == ({}, 1e-3)


# The search has 18 trials; five pairs have 3 + 1 trainings each.
@pytest.mark.parametrize(("most", "verdicts"), [(0, 0), (1, 0), (18, 0), (35, 0), (38, 2)])
def test_parts_of_a_record(most, verdicts):
    found = summary(PLAN, noisy(lans=-0.2), "interrupted", most=most)
    assert len(found.verdicts) == verdicts
    assert (found.table is None) == bool(words.too_little(found)) == (not verdicts)
    assert found.answer.startswith("Preliminary: " if verdicts else "No optimizer can be judged")
    assert "--resume" in found.remarks[0]
    # The search that is not done has no result.
    assert all((row.lr is None) == (most < 18) == (row.interior is None) for row in found.tuned)


def test_the_order_in_which_trials_end_changes_nothing():
    """Nor does a number of workers, or an end on the way: what is asked for is all that counts."""
    plan, losses = planned(seeds=12), noisy(0.1, lans=-0.2, sgd=0.05)
    whole = record(plan, losses)
    expected = {result.key: result for result in whole}
    assert len({run.seed for run in whole if run.key[0] == "training"}) > 6
    for number in range(4):
        generator = random.Random(number)
        found = record(plan, losses, workers=generator.choice([1, 2, 5]), generator=generator)
        assert {result.key: result for result in found} == expected


def test_trainings_that_ran_ahead_change_nothing():
    losses = noisy(lans=-0.3)
    whole = record(PLAN, losses)
    keys = [("training", 1, 128, 0.0, seed) for seed in range(16)]
    ahead = [result_of(PLAN, Trial(key, 1, ""), losses) for key in keys]
    assert sum(run.key not in whole for run in ahead) == 11
    both = (
        summarize(header_of(PLAN), Results(own), "complete") for own in (whole, [*whole, *ahead])
    )
    assert len({repr(found) for found in both}) == 1


@pytest.mark.few(10)
@pytest.mark.parametrize("number", range(20))
def test_no_finding_contradicts_another(number):
    """In studies with losses at random, divergence, and missing trials."""
    generator = random.Random(number)
    shifts = {name: generator.gauss(0, 0.05) for name in ("lans", "sgd")}
    curve = noisy(generator.choice([0.001, 0.03]), generator.choice([0.2, 0]), **shifts)
    lost = generator.choice([0.0, 0.02])
    failing = lambda **fields: random.Random(f"{number}{fields}").random() < lost
    most = generator.choice([None, 40, 80])
    found = summary(planned(seeds=generator.choice([5, 12])), but(curve, failing), most=most)
    for row in found.verdicts:
        assert (row.verdict == "better") == (row.high < 0)
        assert (row.verdict == "worse") == (row.low > 0)
        assert row.low <= row.mean <= row.high
        assert row.needed is None or row.needed > row.pairs
        assert not row.rates_limit or row.verdict == "cannot tell"
        if ratio := row.sample_ratio:
            assert ratio.low <= ratio.value <= ratio.high
            assert (ratio.low > 1) == (row.verdict == "better")
            assert (ratio.high < 1) == (row.verdict == "worse")
    assert "nan" not in " ".join((found.answer, *found.remarks))
    assert len(found.remarks) <= 3
