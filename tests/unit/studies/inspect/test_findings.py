"""Steps that a budget has time for; what is concluded of made-up records, and that it is said."""

import math
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import analysis, words
from steadygrad.studies.inspect.analysis import HEADROOM, LOSS_HEADROOM, by_phase
from steadygrad.studies.inspect.schema import Effect, Forward, Remedy, Settings, Verdict
from steadygrad.studies.inspect.trials import REPEATED, plan_for
from tests.unit.studies.inspect.runs import (
    FED,
    LARGEST,
    STARVED,
    UNDERFLOWING,
    counts,
    phase,
    summary_of,
    with_parts,
)

# The plan


def planned(budget, speed, workers=1, **settings):
    settings = Settings(budget=budget, **settings)
    trainer = SimpleNamespace(task=SimpleNamespace(batch_size=4, valid=range(300)))
    return plan_for(settings, trainer, speed=speed, workers=workers)


def test_a_budget_is_kept():
    plan = planned(300.0, 1e4)
    assert (plan.steps, plan.work) == (200, 3 * 200 * 4 + 2 * 100)
    for budget in (30.0, 60.0):
        plan = planned(budget, 40.0)
        assert 16 < plan.steps < 200
        assert 0.6 * budget < REPEATED * plan.work / 40.0 + 4 < budget
        # The steps that are given stay.
        assert planned(budget, 40.0, steps=200).steps == 200
    assert planned(5.0, 1.0).steps == 16
    # Two workers train two phases at a time.
    assert planned(60.0, 40.0).steps < planned(60.0, 40.0, workers=2).steps < 200


# The diagnosis and the proposal, on counts made by hand

# The largest exponent that float16 holds.
MOST = 15
ALIKE = {"a": counts(0, 100)}


def diagnose(results):
    return analysis.diagnose(by_phase(Results(results)))


def propose(results):
    """Base-2 logarithms of the loss scale, and of the layers' own ones."""
    found = analysis.propose(by_phase(Results(results)))
    scales = {name: math.log2(scale) for name, scale in found.layer_scales.items()}
    return math.log2(found.loss_scale), scales


def test_an_underflowing_layer_gets_the_room_it_has():
    assert diagnose(UNDERFLOWING)["underflowing"] == {"early": pytest.approx(0.75)}
    loss, early = MOST - LOSS_HEADROOM - 5, MOST - HEADROOM + 18
    assert propose(UNDERFLOWING) == (loss, {"early": early - loss})
    # Gradients at boundaries count as those of weights.
    both = phase("before", STARVED, LARGEST, kind="activations")
    both += phase("search", FED, LARGEST, kind="activations")
    assert (diagnose(both), propose(both)) == (diagnose(UNDERFLOWING), propose(UNDERFLOWING))


@pytest.mark.parametrize(("zero", "starved"), [(9, False), (12, True)])
def test_a_tenth_is_the_bound(zero, starved):
    """Zeros that are there with a scale for each layer as well do not count."""
    before = phase("before", {"a": counts(0, 60 - zero, zero=40 + zero)}, {"a": 0.0})
    search = phase("search", {"a": counts(4, 60, zero=40)}, {"a": 0.0})
    assert bool(diagnose(before + search)["underflowing"]) is starved


@pytest.mark.parametrize(("settled", "proposed"), [(9.0, 9), (20.0, MOST - LOSS_HEADROOM)])
def test_without_underflow_an_overflow_is_no_fault(settled, proposed):
    both = phase("before", ALIKE, {"a": 0.0}, {"a": 1}, settled=settled)
    both += phase("search", ALIKE, {"a": 0.0})
    found = diagnose(both)
    assert (found["underflowing"], found["limiting"]) == ({}, {})
    assert propose(both) == (proposed, {})
    # What happens in the last training, which the proposal is for, does not count.
    assert propose(both + phase("after", ALIKE, {"a": 14.0})) == (proposed, {})


def test_who_overflows_near_the_scale_limits_it():
    """At most two binades above it, and not where it would overflow at any scale."""
    at = {"late": 8.0 + 2, "once": 8.0 + 3}
    before = phase("before", STARVED, LARGEST, {"late": 2, "once": 1}, overflowed_at=at)
    assert diagnose(before + UNDERFLOWING[1:])["limiting"] == {"late": 16}
    before = phase("before", STARVED, LARGEST, {"x": 3}, at_any_scale={"x": 3})
    assert diagnose(before + UNDERFLOWING[1:])["limiting"] == {}


def test_an_overflow_at_any_scale_is_named():
    before = phase("before", ALIKE, {"a": 0.0}, {"a": 2, "b": 1}, at_any_scale={"a": 1})
    after = phase("after", ALIKE, {"a": 0.0}, {"a": 1, "c": 2}, at_any_scale={"a": 1})
    assert diagnose(before + after)["nonfinite_at_any_scale"] == {"a": 8}


def test_few_values_among_many_zeros():
    """One in forty is not zero to begin with; at the one scale all of these vanish."""
    largest = {"table": -30.0, "late": 5.0}
    before = {"table": counts(0, zero=4000), "late": counts(10, 100)}
    search = {"table": counts(5, 100, zero=3900), "late": counts(9, 100)}
    # At 2**8 what is at 2**-22 is normal, at 2**-23 it is not.
    for low, starved in ((-34, {"table": 1.0}), (-23, {"table": 1.0}), (-22, {})):
        plain = {"table": counts(low, 100, zero=3900), "late": counts(1, 100)}
        both = phase("before", before, largest) + phase("search", search, largest, plain=plain)
        assert diagnose(both)["underflowing"] == starved


@pytest.mark.parametrize(("before", "low"), [(3, -5), (6, -40)])
def test_zeros_of_convergence(before, low):
    """More samples have no gradient any more; what there is float16 holds."""
    calm = phase("before", {"a": counts(3, before, zero=100 - before)}, {"a": -5.0})
    plain = {"a": counts(low, 6, zero=94)}
    calm += phase("search", {"a": counts(3, 6, zero=94)}, {"a": -5.0}, plain=plain)
    assert diagnose(calm)["underflowing"] == {}


def test_one_scale_that_begins_higher_is_enough():
    """All gradients are small alike, and nothing overflowed."""
    tiny = {"a": counts(0, zero=100), "b": counts(-23, 100)}
    fed = {name: counts(5, 100) for name in tiny}
    plain = {"a": counts(-38, 100), "b": counts(-31, 100)}
    largest = {"a": -38.0, "b": -31.0}
    before = phase("before", tiny, largest)
    search = phase("search", fed, largest, plain=plain)
    assert diagnose(before + search)["underflowing"] == {"a": 1.0, "b": 1.0}
    proposal = MOST - LOSS_HEADROOM + 31, {}
    assert propose(before + search) == proposal
    # A layer loses half of its values with a scale of its own as well: that says nothing of this.
    spread = fed | {"b": counts(-20, 50, *[0] * 30, 50)}
    wide = plain | {"b": counts(-65, 50, *[0] * 30, 50)}
    lost = phase("before", tiny | {"b": counts(-24, 100)}, largest)
    assert propose(lost + phase("search", spread, largest, plain=wide)) == proposal
    # Not where there was overflow at such a scale.
    high = with_parts(before, overflowed_at={"b": 44.0})
    assert [*propose(high + search)[1]] == ["a"]
    # Nor where another layer has no room for it.
    plain["b"], largest["b"] = counts(2, 100), 2.0
    before = phase("before", tiny | {"b": counts(10, 100)}, largest)
    assert [*propose(before + phase("search", fed, largest, plain=plain))[1]] == ["a"]


@pytest.mark.parametrize(("more", "own"), [(3, False), (4, True)])
def test_a_scale_of_its_own_is_for_so_much_room(more, own):
    # Above the loss's scale, which leaves the late layer less headroom.
    largest = {"early": 5.0 - (HEADROOM - LOSS_HEADROOM) - more, "late": 5.0}
    both = phase("before", STARVED, largest) + phase("search", FED, largest)
    assert ("early" in propose(both)[1]) is own


@pytest.mark.parametrize("name", ["early", ""])
def test_an_underflowing_layer_with_less_room_than_the_others(name):
    """It is not raised into overflow: by a scale below one, or by the loss's."""
    before = {name: counts(-15, 50, 50, zero=100), "late": counts(-2, 100)}
    search = {name: counts(-3, 100), "late": counts(-2, 100)}
    largest = {name: 3.0, "late": -10.0}
    both = phase("before", before, largest, settled=4.0) + phase("search", search, largest)
    loss, own, late = MOST - LOSS_HEADROOM - 3, MOST - HEADROOM - 3 - 23, MOST - HEADROOM + 10
    assert propose(both) == ((23, {"early": own}) if name else (loss, {"late": late - loss}))


def test_scales_stay_where_float32_holds_them():
    far = {"early": -300.0, "late": -140.0}
    both = phase("before", STARVED, far) + phase("search", FED, far)
    assert propose(both) == (100, {"early": 100, "late": 151 - 100})


@pytest.mark.parametrize(("zero", "lost"), [(95, {"a": 0.95}), (85, {})])
def test_what_vanishes_inside_of_a_layer_is_not_called_well(zero, lost):
    """Whatever the scale its weights' gradients are zero, and those that come to it are not."""
    fields = {"activations": {"a": counts(0, 80, zero=20)}}
    weights = {"a": counts(0, 100 - zero, zero=zero)}
    first, second = (phase(name, weights, {}, **fields) for name in ("before", "search"))
    found = diagnose(first + second)
    assert (found["internal_underflow"], found["underflowing"]) == (pytest.approx(lost), {})


# The verdict

CALM = {"early": counts(0, 9), "late": counts(0, 9)}
VANISHED = dict.fromkeys(CALM, counts(0, 5, zero=95))
FINE = phase("before", CALM, LARGEST) + phase("search", CALM, LARGEST)
AFTER = phase("after", CALM, LARGEST)
# All gradients are small alike, and nothing overflowed.
TINY = [
    *phase("before", {"a": counts(0, zero=100)}, {"a": -38.0}),
    *phase("search", {"a": counts(5, 100)}, {"a": -38.0}, plain={"a": counts(-38, 100)}),
]
# The early layer loses what others do not, but has no more room than they have.
SPREAD = [
    *phase("before", STARVED | {"early": counts(-15, 50, 50)}, {"early": 4.0, "late": 5.0}),
    *phase("search", FED, {"early": 4.0, "late": 5.0}),
]
NEVER_FINITE = [
    *phase("before", {"a": counts(0, over=9)}, {}, {"a": 1}, skipped=1),
    *phase("search", {"a": counts(0, 9)}, {"a": 0.0}),
]


def ended(results, loss, one=2.25):
    """Phases with the validation losses of both trainings."""
    losses = {"before": one, "after": loss}
    return [replace(end, valid_loss=losses.get(end.phase)) for end in results]


def fine(**fields):
    return with_parts(FINE, **fields)


@pytest.mark.parametrize(
    ("results", "status", "verdict", "shown"),
    [
        (ended(UNDERFLOWING + AFTER, 1.75), "complete", "layers", ["early", "1.75", "2.25"]),
        (ended(UNDERFLOWING + AFTER, None), "complete", "layers", ["early", "not finite"]),
        (UNDERFLOWING, "budget", "layers", ["early", "predicted"]),
        ([*TINY, *phase("after", {"a": counts(5, 9)}, {})], "complete", "higher", ["2^51"]),
        (TINY, "budget", "higher", ["2^51", "predicted", "2^8", "a (100%)"]),
        (SPREAD, "complete", "spread", ["early (50%)", "2^8"]),
        (FINE, "complete", "enough", ["every layer (torch.amp.GradScaler)", "2^8"]),
        (fine(weights=VANISHED, activations=CALM), "complete", "enough", ["at the boundaries"]),
        (fine(skipped=1), "complete", "enough", ["2^8", "8 steps"]),
        (fine(loss=0.0), "complete", "zero", []),
        (NEVER_FINITE, "complete", "unseen", ["2^8"]),
        (UNDERFLOWING[:1], "interrupted", "unmeasured", ["interrupted"]),
    ],
)
def test_verdicts(results, status, verdict, shown):
    found = summary_of(results, status)
    assert found.findings[0] == Verdict(verdict=verdict)
    assert all(value in found.answer for value in shown)
    assert ("predicted" in found.answer) == ("predicted" in shown)
    # Where nothing can be judged the study says nothing at all.
    assert bool(words.too_little(found)) == (verdict == "unmeasured")


CAUSE = "the forward pass of 'a' made the first values that are not finite"


def test_an_answer_that_hangs_on_a_condition_opens_with_it():
    before, search = UNDERFLOWING
    first, *rest = before.parts
    fault = replace(before, parts=(replace(first, forward={CAUSE: 3}), *rest))
    # What came later is not the first fault.
    found = summary_of([fault, search, *with_parts(AFTER, forward={"later": 1})])
    said = Forward(causes={CAUSE: 3}, count=3, steps=8)
    assert found.findings[:2] == (Verdict(verdict="layers"), said)
    assert "3 of 8 steps" in found.answer
    large = phase("before", CALM, LARGEST, {"late": 1}, at_any_scale={"late": 1})
    found = summary_of(large + FINE[1:])
    effect = Effect(name="nonfinite_at_any_scale", layers={"late": 8})
    assert found.findings == (Verdict(verdict="enough"), effect)
    assert "late (8 steps)" in found.answer
    assert "late (8 steps)" in found.remarks[0]


def test_nothing_is_proposed_where_nothing_can_be_said():
    none = {"activations": {}, "weights": {}, "largest": {"weights": {}}, "forward": {CAUSE: 1}}
    found = summary_of(with_parts(UNDERFLOWING, **none))
    assert found.findings[0] == Verdict(verdict="unseen")
    assert "8 of 8 steps" in found.answer
    assert (found.proposal, found.table) == (None, None)
    assert found.findings[1] == Forward(causes={CAUSE: 8}, count=8, steps=8)
    # Of two workers the one that finds scales may have ended first.
    for results in ([], phase("search", FED, LARGEST)):
        assert summary_of(results, "interrupted").table is None


# Remarks

NAN = "the loss is not finite, and NaN is there"


def effect(name, **layers):
    return Effect(name=name, layers=layers)


@pytest.mark.parametrize(
    ("finding", "shown"),
    [
        (Forward(causes={"x": 1, NAN: 2}, count=3, steps=9), [f"n 2 steps {NAN}; in 1 s"]),
        (
            Remedy(loss="lower"),
            ['LayerwiseGradScaler(model, {"early": 2.0**21}, init_scale=2.0**8)'],
        ),
        (effect("regressed", a=0.75), ["a (75%)"]),
        (
            effect("limiting", **dict.fromkeys("abcdef", 3)),
            ["a (3 steps), b (3 steps), c (3 steps) and 3 more layers"],
        ),
    ],
)
def test_every_finding_has_a_remark_with_its_values(finding, shown):
    found = summary_of(UNDERFLOWING, "budget")
    findings = (found.findings[0], finding)
    (said,) = words.remarks(replace(found, status="complete", findings=findings))
    assert all(value in said for value in shown), said


@pytest.mark.parametrize(
    ("results", "loss"),
    [
        (TINY, "unknown"),
        (ended(TINY + AFTER, 1.75), "lower"),
        (ended(TINY + AFTER, 2.5), "not lower"),
        (ended(TINY + AFTER, 2.5, None), "lower"),
    ],
)
def test_one_scale_as_a_remedy(results, loss):
    found = summary_of(results)
    assert found.findings[1:] == (Remedy(loss=loss), effect("underflowing", a=1.0))
    assert "GradScaler(init_scale=2.0**51)" in found.remarks[0]


def test_the_table():
    after = phase("after", {"early": counts(-3, 100), "late": counts(-15, 30, 70)}, LARGEST)
    before = phase("before", STARVED, LARGEST, {"late": 2})
    found = summary_of([*before, *UNDERFLOWING[1:], *after])
    assert found.table.rows == (
        ("early", "underflows", "75.0% / 0.0%", "0 / 0", "2^21"),
        ("late", "limiting, regressed", "0.0% / 30.0%", "16 / 0", "–"),
    )
