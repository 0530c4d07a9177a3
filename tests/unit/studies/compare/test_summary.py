"""The summary of a record; no sentence contradicts a number."""

import math
import random

import pytest

from steadygrad.studies.compare.summary import summarize
from tests.unit.studies.compare.runs import header_of, planned, record

PLAN = planned(seeds=5)


def summary(plan, loss_of, status="complete", **options):
    return summarize(header_of(plan), record(plan, loss_of, **options), status)


def row_of(found, optimizer, samples, multiple=1):
    return next(
        row
        for row in found["verdicts"]
        if (row["optimizer"], row["samples"], row["multiple"]) == (optimizer, samples, multiple)
    )


def noisy(shifts, spread=0.01, fall=0.2):
    """Losses that fall with the samples; ``shifts`` of an optimizer by horizon."""

    def loss_of(optimizer, multiple, samples, point, step, repeat):
        own = shifts.get(optimizer, {}).get(samples, 0.0)
        noise = random.Random(f"{optimizer}{samples}{repeat}{multiple}").gauss(0, spread)
        common = random.Random(f"{repeat}").gauss(0, 0.1)
        return 2 - fall * math.log2(samples) + own + noise + common + 0.05 * step**2

    return loss_of


def test_a_planted_flip_is_the_first_sentence():
    found = summary(PLAN, noisy({"lans": {64: -0.2, 128: 0.2}}))
    assert found["flips"] == [
        {"optimizer": "lans", "multiple": 1, "short": "better", "long": "worse"}
    ]
    assert found["words"][0] == (
        "The order changes with the length of the training: LANS is better than AdamW after 64 "
        "rows and worse after 128."
    )
    assert found["words"][1].startswith("LANS is worse than AdamW over 128 rows: loss ")


def test_verdicts_are_said_in_the_order_better_worse_cannot_tell():
    plan = planned(seeds=5, optimizers=("adamw", "lamb", "lans", "sgd"))
    shifts = {"lans": {64: 0.3, 128: 0.3}, "sgd": {64: -0.3, 128: -0.3}}
    found = summary(plan, noisy(shifts, spread=0.02))
    assert [word.partition(" AdamW ")[0] for word in found["words"][:3]] == [
        "SGD is better than",
        "LANS is worse than",
        "LAMB against",
    ]


def test_larger_batch_sizes_that_are_judged_alike_have_one_sentence():
    plan = planned(seeds=5, optimizers=("adamw", "lans", "sgd"), multiples=(1, 4, 16))
    shifts = {"lans": {64: -0.1, 128: -0.1}, "sgd": {64: 0.1, 128: 0.1}}

    def loss_of(**fields):
        # SGD at the middle batch size is not judged as at the others.
        odd = (fields["optimizer"], fields["multiple"]) == ("sgd", 4)
        return noisy({} if odd else shifts)(**fields)

    words = summary(plan, loss_of)["words"]
    lans, sgd = ([word for word in words if word.startswith(n)] for n in ("LANS ", "SGD "))
    assert [word.partition(": ")[0] for word in lans] == [
        "LANS is better than AdamW over 128 rows at batch size 4",
        "LANS is better than AdamW at batch sizes 16 and 64",
    ]
    rows = [row_of(summary(plan, loss_of), "lans", 128, multiple) for multiple in (4, 16)]
    ratios = [row["sample_ratio"]["value"] for row in rows]
    assert lans[1].endswith(
        f": differences {rows[0]['mean']:+.3g} and {rows[1]['mean']:+.3g}. AdamW would need "
        f"{ratios[0]:.2f} and {ratios[1]:.2f} times the samples for those losses."
    )
    assert [word.partition(": ")[0] for word in sgd] == [
        "SGD is worse than AdamW over 128 rows at batch size 4",
        "SGD is worse than AdamW over 128 rows at batch size 64",
        "SGD against AdamW over 128 rows at batch size 16",
    ]


@pytest.mark.parametrize("short", [0.0, -0.2])
def test_no_flip_where_the_order_stays_or_is_not_known(short):
    found = summary(PLAN, noisy({"lans": {64: short, 128: -0.2}}))
    assert found["flips"] == []
    said = found["words"][0]
    assert said.startswith("LANS is better than AdamW over 128 rows: loss ")
    assert said.endswith(" After 64: cannot tell.") == (not short)


def test_a_verdict_in_units_that_people_use():
    found = summary(PLAN, noisy({"lans": {64: -0.05, 128: -0.05}}, spread=0.002))
    row = row_of(found, "lans", 128)
    # A quarter of an octave; the interval knows that both rates are known to a quarter octave only.
    assert row["sample_ratio"]["value"] == pytest.approx(1.2, abs=0.05)
    assert 1.05 < row["sample_ratio"]["low"] < 2**0.25 < row["sample_ratio"]["high"]
    # A step takes 1.25 of AdamW's time in the made record.
    assert row["time_ratio"]["value"] == pytest.approx(1.25 / row["sample_ratio"]["value"])
    assert row["time_ratio"]["low"] <= row["time_ratio"]["value"] <= row["time_ratio"]["high"]
    said = next(word for word in found["words"] if word.startswith("LANS"))
    shown = {name: f"{row['sample_ratio'][name]:.2f}" for name in ("value", "low", "high")}
    assert (
        f" AdamW would need {shown['value']} times the samples for that loss ({shown['low']} to "
        f"{shown['high']}). A step takes 1.25 times as long as AdamW's: that loss takes " in said
    )
    assert found["costs"]["lans"] == {"time_ratio": 1.25, "state_bytes": 7.0}


@pytest.mark.parametrize("exponent", [1 / 3, 1.0])
def test_samples_saved_are_covered_at_both_lengths(exponent):
    """LANS is as good as AdamW with 1.3 times the samples, on two power laws."""

    def loss_of(optimizer, samples, step, repeat, **fields):
        seen = samples * (1.3 if optimizer == "lans" else 1.0)
        noise = random.Random(f"{optimizer} {samples} {repeat}").gauss(0, 1e-5)
        return 1 + 5 * seen**-exponent + 0.05 * step**2 + 0.1 * repeat + noise

    found = summary(PLAN, loss_of)
    for samples in (64, 128):
        ratio = row_of(found, "lans", samples)["sample_ratio"]
        assert ratio["low"] <= 1.3 <= ratio["high"]
        # The value takes the exponent to be a third; the rest is noise.
        assert ratio["value"] == pytest.approx(1.3, rel=0.01 if exponent < 1 else 0.1)


def test_steps_are_timed_at_the_tasks_batch_size_only():
    plan = planned(seeds=5, multiples=(1, 4))
    found = summary(plan, noisy({"lans": {64: -0.05, 128: -0.05}}, spread=0.002))
    times = {row["multiple"]: row["time_ratio"] for row in found["verdicts"]}
    assert times[1] is not None
    assert times[4] is None
    said = [word for word in found["words"] if "at batch size 16" in word]
    assert said
    assert not any("A step takes" in word for word in said)


def test_a_plateau_is_that_of_its_own_length():
    """An octave beside the best rate costs a tenth more samples: two octaves, at any length."""

    def loss_of(samples, step, **fields):
        return 1 + 5 * (samples / (1 + 0.1 * step**2)) ** (-1 / 3)

    assert summary(PLAN, loss_of)["tuned"][0]["plateau"] == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(("shift", "said"), [(-3.0, "more than 4"), (3.0, "less than 0.25")])
def test_a_ratio_that_is_out_of_sight_is_said_to_be_beyond(shift, said):
    found = summary(PLAN, noisy({"lans": {64: shift, 128: shift}}))
    assert (
        f"AdamW would need {said} times the samples for that loss ({said} to {said})."
        in (found["words"][0])
    )
    # No time to a loss follows from a bound.
    assert "of AdamW's time" not in found["words"][0]


def test_a_diverging_optimizer_is_not_hidden():
    def loss_of(**fields):
        return math.inf if fields["optimizer"] == "sgd" else noisy({})(**fields)

    found = summary(PLAN, loss_of)
    row = row_of(found, "sgd", 128)
    assert row["verdict"] == "worse"
    assert row["mean"] == math.inf
    assert row["losses"] == dict.fromkeys("12345", math.inf)
    assert row["sample_ratio"] is None
    runs = found["diverged_by"]["sgd"]
    # Its ladder grew downwards: 5 + 4, 3 + 1 and 3 + 1 rates; 5 seeds twice, and 2 at the default.
    assert found["diverged"] == runs == 9 + 4 + 4 + 10 + 2
    words = found["words"]
    assert (
        "SGD is worse than AdamW over 128 rows: it diverged on 5 of 5 seeds, AdamW on 0." in words
    )
    assert f"{runs} of {found['trained']} trainings diverged: SGD {runs}." in words
    assert "SGD diverged at every learning rate that was tried." in words
    assert "inf" not in " ".join(words)


@pytest.mark.parametrize(
    ("lost", "verdict"), [((3,), "cannot tell"), ((1, 2, 4, 5), "worse")], ids=["one", "four"]
)
def test_diverged_seeds_are_said_with_their_count(lost, verdict):
    def loss_of(**fields):
        own = fields["optimizer"] == "lans" and fields["repeat"] in lost
        return math.inf if own and fields["samples"] == 128 else noisy({})(**fields)

    found = summary(PLAN, loss_of)
    assert row_of(found, "lans", 128)["verdict"] == verdict
    count = f"it diverged on {len(lost)} of 5 seeds, AdamW on 0."
    said = {
        "worse": f"LANS is worse than AdamW over 128 rows: {count}",
        "cannot tell": f"LANS against AdamW over 128 rows: cannot tell, as {count}",
    }
    assert any(words.startswith(said[verdict]) for words in found["words"][:2])


def test_a_baseline_that_diverges_gives_no_verdict():
    def loss_of(**fields):
        lost = fields["optimizer"] == "adamw" and fields["repeat"] in (2, 3)
        return math.inf if lost else noisy({"lans": {128: -0.5}})(**fields)

    found = summary(PLAN, loss_of)
    assert {row["verdict"] for row in found["verdicts"]} == {"cannot tell"}
    assert found["words"][0] == (
        "LANS against AdamW over 128 rows: cannot tell, as it diverged on 0 of 5 seeds, AdamW on 2."
    )


def test_the_best_rate_at_the_end_of_those_tried_is_said():
    def loss_of(**fields):
        push = -0.3 * fields["step"] - 0.05 * fields["step"] ** 2
        return noisy({})(**fields) + push * (fields["optimizer"] == "lans")

    found = summary(PLAN, loss_of)
    assert [row["interior"] for row in found["tuned"]] == [True, False, True]
    assert "The best rate of LANS is at the end of those tried: it may be better." in found["words"]


def test_the_best_rate_of_a_larger_batch_at_the_end_is_said_too():
    plan = planned(multiples=(1, 4))

    def loss_of(**fields):
        slope = -0.3 if (fields["optimizer"], fields["multiple"]) == ("sgd", 4) else 0.0
        return (
            noisy({})(**fields) + slope * fields["step"] - 0.05 * bool(slope) * fields["step"] ** 2
        )

    words = summary(plan, loss_of)["words"]
    said = "The best rate of SGD at batch size 16 is at the end of those tried: it may be better."
    assert said in words


def test_tuned_settings_by_hand():
    found = summary(PLAN, lambda step, samples, **f: 1 - 0.2 * math.log2(samples) + abs(step - 1))
    row = found["tuned"][1]
    assert (row["step"], row["lr"], row["interior"]) == (1, 2e-3, True)
    tried = {str(step): pytest.approx(abs(step - 1)) for step in (-2, -1, 0, 1, 2)}
    assert row["tried"]["0"] == tried
    # An octave of samples is 0.2 of loss, and a tenth more is 0.157 of that, on both sides.
    assert row["plateau"] == pytest.approx(2 * 0.2 * (1.1 ** (1 / 3) - 1) / (1 - 0.5 ** (1 / 3)))
    # Losses 0, 1, 1, 2, 3: their mean; of three drawn, the least is 0 in 6 of 10 and else 1.
    assert row["effort"] == pytest.approx({"1": 7 / 5, "3": 4 / 10, "9": 0.0})
    # At step 0, an octave from the best, over 128 samples.
    assert row["default_loss"] == pytest.approx(1 - 0.2 * 7 + 1)


def test_default_rates_are_compared_on_the_same_seeds():
    """AdamW's best rate is its default, so that all of its seeds are known there."""

    def loss_of(optimizer, step, repeat, **fields):
        best = {"adamw": 0, "lans": 1, "sgd": -1}[optimizer]
        return 1 + 0.1 * abs(step - best) + repeat

    found = summary(PLAN, loss_of)
    values = {row["optimizer"]: row["default_loss"] for row in found["tuned"]}
    assert values == pytest.approx({"adamw": 2.5, "lans": 2.6, "sgd": 2.6})
    assert (
        "Without tuning, at the default rates: AdamW 2.5, LANS 2.6 and SGD 2.6." in (found["words"])
    )


def by_batch(extra):
    """Losses as after so many times fewer samples, by multiple, on a curve of 0.2 an octave."""

    def loss_of(optimizer, multiple, samples, repeat, step, **fields):
        effective = samples / (1 + extra[optimizer].get(multiple, 0.0))
        shift = 0.001 * random.Random(f"{optimizer}{multiple}{repeat}{samples}").gauss(0, 1)
        off = step - {1: 0, 4: 1, 16: 2}[multiple]
        return 2 - 0.2 * math.log2(effective) + shift + 0.1 * repeat + 0.1 * off**2

    return loss_of


def twins(seeds, curvature, number, better=0.0):
    """Verdict on AdamW with its ladder half an octave aside, ``better`` by so much noise."""
    generator = random.Random(number)

    def loss_of(optimizer, samples, step, repeat, **fields):
        twin = optimizer == "twin"
        noise = generator.gauss(0, 1) + 10 * repeat - better * twin
        return 2 - 0.2 * math.log2(samples) + 0.01 * (curvature * (step - 0.5 * twin) ** 2 + noise)

    plan = planned(optimizers=("adamw", "twin"), seeds=seeds)
    return row_of(summary(plan, loss_of), "twin", 128)["verdict"]


@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize("curvature", [0.2, 1.0, 5.0])
def test_twins_are_told_apart_in_one_study_of_twenty_at_most(seeds, curvature):
    """Although each rate is tried on one seed, and the rates of their ladders differ."""
    told = sum(twins(seeds, curvature, number) != "cannot tell" for number in range(250))
    # 5 %, and three standard deviations; 7 to 12 % if the choice of rates were taken to be exact.
    assert told <= 0.0914 * 250


@pytest.mark.slow
def test_a_difference_of_three_standard_deviations_is_found():
    assert sum(twins(5, 1.0, number, better=3.0) == "better" for number in range(100)) >= 80


def test_critical_batch_sizes():
    plan = planned(multiples=(1, 4, 16), seeds=5, horizons=(256, 512, 1024))
    extra = {"adamw": {4: 0.05, 16: 0.8}, "lans": {4: 0.0, 16: 0.1}, "sgd": {4: 0.3, 16: 1.0}}
    found = summary(plan, by_batch(extra))
    rows = {row["optimizer"]: row for row in found["critical"]}
    brackets = {name: (row["within"], row["beyond"]) for name, row in rows.items()}
    assert brackets == {"adamw": (16, 64), "lans": (64, None), "sgd": (4, 16)}
    for name, row in rows.items():
        for multiple, true in extra[name].items():
            low, high = row["intervals"][str(multiple)]
            assert low <= row["overheads"][str(multiple)] <= high
            # The curve's exponent is 0 here: one end of those that the interval allows.
            assert low - 0.02 <= true <= high + 0.02
    assert (
        "Critical batch size, a fifth more rows: AdamW 16 to 64, LANS at least 64 and SGD 4 to 16."
        in found["words"]
    )


def test_a_batch_size_that_diverges_is_beyond_the_critical_one():
    plan = planned(multiples=(1, 4, 16), horizons=(256, 512, 1024))
    curve = by_batch({"adamw": {}, "lans": {}, "sgd": {}})

    def loss_of(**fields):
        lost = fields["optimizer"] == "lans" and fields["multiple"] == 4
        return math.inf if lost else curve(**fields)

    found = summary(plan, loss_of)
    row = next(row for row in found["critical"] if row["optimizer"] == "lans")
    # One that is fine beyond it does not count.
    assert (row["within"], row["beyond"]) == (4, 16)
    assert row["overheads"]["4"] == math.inf


@pytest.mark.parametrize(
    ("keep", "verdicts"),
    {
        "nothing": (lambda e: False, 0),
        "the step's time": (lambda e: e.key[0] == "speed", 0),
        "the search": (lambda e: e.key[0] == "speed" or not e.repeat, 0),
        "one seed": (lambda e: e.key[0] == "speed" or e.repeat < 2, 0),
        "two long seeds": (
            lambda e: e.key[0] == "speed" or not e.repeat or (e.repeat < 3 and e.samples == 128),
            2,
        ),
        "all but the last": (lambda e: e.key[-1] != 5 or e.samples == 128, 4),
    }.values(),
)
def test_parts_of_a_record(keep, verdicts):
    found = summary(PLAN, noisy({"lans": {128: -0.2}}), "interrupted", keep=keep)
    assert len(found["verdicts"]) == verdicts
    assert found["words"][-1] == "The study was stopped; --resume continues it."
    none = "No optimizer could be judged yet: a verdict needs two seeds of each."
    assert (found["words"][0] == none) == (not verdicts)
    assert "nan" not in " ".join(found["words"])
    # The search that is not done has no result.
    tuned = any("Best learning rates" in word for word in found["words"])
    assert tuned == (found["trained"] >= 33)
    assert all((row["lr"] is None) == (row["interior"] is None) for row in found["tuned"])
