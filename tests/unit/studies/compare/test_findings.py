"""The numbers of a study, what is found in them, and how that is said."""

import math
import random

import pytest
from msgspec.structs import replace

from steadygrad.studies.compare import words
from steadygrad.studies.compare.findings import summarize
from steadygrad.studies.compare.schema import Brackets, Edge, Flip, Run, Traits, Verdict
from tests.unit.studies.compare.runs import by, header_of, noisy, planned, record, summary

PLAN = planned(seeds=5)


def but(curve, **lost):
    """The losses but where all these fields are so, which diverged."""
    return lambda **fields: math.inf if lost.items() <= fields.items() else curve(**fields)


def findings(found, kind):
    return [each for each in found.findings if isinstance(each, kind)]


def test_a_planted_flip_is_found_first():
    found = summary(PLAN, noisy({"lans": {64: -0.2, 128: 0.2}, "sgd": {64: -0.2, 128: -0.2}}))
    flip = Flip(optimizer="lans", multiple=1, short="better", long="worse", samples=(64, 128))
    assert found.flips == found.findings[:1] == (flip,)
    # What is better at both lengths is said first of all.
    assert "SGD (learning rate 0.001) is better" in found.remarks[0]
    found = summary(PLAN, noisy({name: {64: -0.2, 128: 0.2} for name in ("lans", "sgd")}))
    assert [each.optimizer for each in found.flips] == ["lans", "sgd"]
    # There is none where the order is not known.
    found = summary(PLAN, noisy({"lans": {128: -0.2}}))
    rows = [row.verdict for row in found.verdicts if row.optimizer == "lans"]
    assert (found.flips, rows) == ((), ["cannot tell", "better"])


def test_a_diverging_optimizer_is_not_hidden():
    found = summary(PLAN, but(by(), optimizer="sgd"))
    row = found.verdicts[-1]
    assert (row.verdict, row.mean, row.lost, row.baseline_lost) == ("worse", math.inf, 5, 0)
    assert row.losses == dict.fromkeys("12345", math.inf)
    assert row.sample_ratio is None
    # Its ladder grew downwards: 5 + 4, 3 + 1 and 3 + 1 rates; 5 seeds twice.
    assert found.diverged == found.diverged_by["sgd"] == 9 + 4 + 4 + 10
    # No rate beyond those tried is in sight.
    assert findings(found, Edge) == []


def test_a_baseline_that_diverges_gives_no_verdict():
    curve = but(but(by(lans=-0.5), optimizer="adamw", repeat=2), optimizer="adamw", repeat=3)
    found = summary(PLAN, curve)
    rows = {(row.verdict, row.baseline_lost) for row in found.verdicts}
    assert rows == {("cannot tell", 2)}


def test_an_evaluation_that_falls_in_no_training_is_not_judged():
    header = replace(header_of(PLAN), first_value=0.0)
    found = summarize(header, record(PLAN, by(lans=-0.1)), "budget")
    assert (found.findings, found.answer, words.too_little(found)) == ((), found.rise, None)


@pytest.mark.parametrize(
    ("name", "multiple", "shifts", "hangs"),
    [
        # It is behind, and may be better.
        ("sgd", 4, {"sgd": 9}, True),
        # It is behind, but another one is ahead of both.
        ("sgd", 4, {"sgd": 9, "lans": -9}, False),
        ("adamw", 1, {"lans": -9}, True),
        # It is ahead.
        ("lans", 1, {}, False),
    ],
)
def test_the_best_rate_at_the_end_of_those_tried(name, multiple, shifts, hangs):
    plan, own = planned(seeds=5, multiples=(1, 4)), by(**shifts)

    def loss_of(step, **fields):
        at_end = (fields["optimizer"], fields["multiple"]) == (name, multiple)
        return own(step=step, **fields) - (0.3 * step + 0.05 * step**2) * at_end

    found = summary(plan, loss_of)
    assert findings(found, Edge) == [Edge(optimizer=name, multiple=multiple, hangs=hangs)]
    assert [(t.optimizer, t.multiple) for t in found.tuned if not t.interior] == [(name, multiple)]
    # An answer that hangs on it opens with it.
    assert ("so far, " in found.answer) == hangs


def test_tuned_settings_by_hand():
    best = {"adamw": 0, "lans": 1, "sgd": -1}

    def loss_of(optimizer, step, samples, repeat, **fields):
        return 1 - 0.2 * math.log2(samples) + abs(step - best[optimizer]) + repeat

    found = summary(PLAN, loss_of)
    row = found.tuned[1]
    assert (row.step, row.lr, row.interior) == (1, 2e-3, True)
    assert row.tried["0"] == {str(step): pytest.approx(abs(step - 1)) for step in (-2, -1, 0, 1, 2)}


def test_one_with_a_rate_of_its_own_has_no_end_of_rates():
    found = summary(planned(seeds=5, traits={"lans": Traits(own_rate=True)}), by())
    assert [row.interior for row in found.tuned] == [True, None, True]


def test_critical_batch_sizes():
    plan = planned(multiples=(1, 4, 16), seeds=5, horizons=(256, 512, 1024))
    extra = {"adamw": {4: 0.05, 16: 0.8}, "lans": {4: 0.0, 16: 0.1}, "sgd": {4: 0.3, 16: 1.0}}

    def loss_of(optimizer, multiple, samples, repeat, step, **fields):
        """As after so many times fewer samples, on a curve of 0.2 an octave."""
        effective = samples / (1 + extra[optimizer].get(multiple, 0.0))
        shift = 0.001 * random.Random(f"{optimizer}{multiple}{repeat}{samples}").gauss(0, 1)
        off = step - {1: 0, 4: 1, 16: 2}[multiple]
        return 2 - 0.2 * math.log2(effective) + shift + 0.1 * repeat + 0.1 * off**2

    found = summary(plan, loss_of)
    brackets = {row.optimizer: (row.within, row.beyond) for row in found.critical}
    assert brackets == {"adamw": (16, 64), "lans": (64, None), "sgd": (4, 16)}
    assert findings(found, Brackets) == [Brackets(sizes=brackets)]
    for row in found.critical:
        for multiple, true in extra[row.optimizer].items():
            low, high = row.intervals[str(multiple)]
            assert low <= row.overheads[str(multiple)] <= high
            # The curve's exponent is 0 here: one end of those that the interval allows.
            assert low - 0.02 <= true <= high + 0.02
    # One that diverges is beyond; a larger one that is fine does not count.
    (_, row, _) = summary(plan, but(loss_of, optimizer="lans", multiple=4)).critical
    assert (row.within, row.beyond, row.overheads["4"]) == (4, 16, math.inf)


@pytest.mark.parametrize(
    ("keep", "verdicts"),
    [
        (lambda e: False, 0),
        (lambda e: e.key[0] == "speed" or e.repeat < 2, 0),
        (lambda e: not getattr(e, "repeat", 0) or (e.repeat < 3 and e.samples == 128), 2),
        (lambda e: e.key[-1] != 5 or e.samples == 128, 4),
    ],
    ids=["nothing", "one seed", "two long seeds", "all but the last"],
)
def test_parts_of_a_record(keep, verdicts):
    found = summary(PLAN, noisy({"lans": {128: -0.2}}), "interrupted", keep=keep)
    assert len(found.verdicts) == verdicts
    assert len(findings(found, Verdict)) == min(verdicts, 2)
    assert (found.table is None) == bool(words.too_little(found)) == (not verdicts)
    assert found.answer.startswith("Preliminary: " if verdicts else "No optimizer can be judged")
    assert "--resume" in found.remarks[0]
    # The search that is not done has no result.
    assert all((row.lr is None) == (row.interior is None) for row in found.tuned)
    assert (found.tuned[0].lr is not None) == (found.trained >= 33)


def twins(seeds, curvature, number):
    """Verdict on AdamW with its ladder half an octave aside."""
    generator = random.Random(number)

    def loss_of(optimizer, samples, step, repeat, **fields):
        twin = optimizer == "twin"
        noise = generator.gauss(0, 1) + 10 * repeat
        return 2 - 0.2 * math.log2(samples) + 0.01 * (curvature * (step - 0.5 * twin) ** 2 + noise)

    plan = planned(optimizers=("adamw", "twin"), seeds=seeds)
    return summary(plan, loss_of).verdicts[-1].verdict


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "curvature"), [(5, 0.2), (10, 1.0)])
def test_twins_are_told_apart_in_one_study_of_twenty_at_most(seeds, curvature):
    """Although each rate is tried on one seed, and the rates of their ladders differ."""
    told = sum(twins(seeds, curvature, number) != "cannot tell" for number in range(250))
    # 5 %, and three standard deviations; 7 to 12 % if the choice of rates were taken to be exact.
    assert told <= 0.0914 * 250


@pytest.mark.few(10)
@pytest.mark.parametrize("seed", range(20))
def test_no_finding_contradicts_another(seed):
    """In studies with losses at random, divergence, and missing trials."""
    generator = random.Random(seed)
    shifts = {n: {s: generator.gauss(0, 0.05) for s in (64, 128)} for n in ("lans", "sgd")}
    curve = noisy(shifts, spread=generator.choice([0.001, 0.03]), fall=generator.choice([0.2, 0]))
    lost, part = generator.choice([0.0, 0.05]), generator.choice([0.0, 0.3])

    def loss_of(**fields):
        return math.inf if random.Random(f"{seed}{fields}").random() < lost else curve(**fields)

    plan = planned(seeds=generator.choice([2, 5, 10]))
    kept = lambda event: random.Random(f"{seed}{event.key}").random() >= part
    found = summary(plan, loss_of, keep=kept)
    for row in found.verdicts:
        assert (row.verdict == "better") == (row.high < 0)
        assert (row.verdict == "worse") == (row.low > 0)
        assert (row.needed is None) or row.needed > len(row.losses)
        assert not row.rates_limit or (row.verdict == "cannot tell" and row.needed is None)
        if math.isfinite(row.mean):
            assert row.low <= row.mean <= row.high
        if ratio := row.sample_ratio:
            assert (ratio.low > 1) == (row.verdict == "better")
            assert (ratio.high < 1) == (row.verdict == "worse")
    assert "nan" not in " ".join((found.answer, *found.remarks))
    assert len(found.remarks) <= 3


def test_an_optimizer_without_pairs_takes_its_share_of_the_chance_of_error():
    plan, own = planned(seeds=5, optimizers=("adamw", "lans", "lamb")), by(lans=-0.3)
    whole = summary(plan, own)
    unpaired = lambda r: not isinstance(r, Run) or r.optimizer != "lamb" or r.repeat == 0
    cut = summary(plan, own, status="interrupted", keep=unpaired)
    first = [next(f for f in s.findings if isinstance(f, Verdict)) for s in (whole, cut)]
    assert [(f.optimizer, f.confidence) for f in first] == [("lans", 0.975)] * 2
