"""Steps that a budget has time for; what is concluded of made-up records, and that it is said."""

import pytest
from msgspec.structs import replace

from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import schema, words
from steadygrad.studies.inspect.findings import summarize
from steadygrad.studies.inspect.plan import REPEATED, make_plan
from steadygrad.studies.inspect.schema import Settings, Shortened
from tests.unit.studies.inspect.runs import (
    HEADER,
    LARGEST,
    STARVED,
    UNDERFLOWING,
    counts,
    parts,
    spread,
    summary_of,
)

# The plan


def planned(budget, speed, workers=1, **settings):
    settings, plan = Settings(budget=budget, **settings), replace(HEADER.plan, steps=200)
    return make_plan(settings, plan, 300, speed=speed, workers=workers)


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


@pytest.mark.parametrize(
    ("given", "planned", "said"), [(None, 64, True), (64, 64, False), (None, 200, False)]
)
def test_fewer_steps_than_usual_are_said(given, planned, said):
    settings = Settings(task="tiny", steps=given)
    header = replace(HEADER, settings=settings, plan=replace(HEADER.plan, steps=planned))
    found = summarize(header, Results([]), "budget")
    assert (Shortened(steps=64) in found.findings) == said


# The verdict

CALM = {"early": counts(0, 9), "late": counts(0, 9)}
FINE = [part for phase in ("before", "search") for part in parts(phase, CALM, LARGEST)]
AFTER = parts("after", CALM, LARGEST)
LOSSES = [
    schema.Phase(phase="before", valid_loss=2.25), schema.Phase(phase="after", valid_loss=1.75)
]  # fmt: skip
LOST = [LOSSES[0], replace(LOSSES[1], valid_loss=None)]


def tiny():
    """All gradients are small alike, and nothing overflowed."""
    plain, largest = {"a": counts(-38, 100)}, {"a": -38.0}
    before = parts("before", {"a": counts(0, zero=100)}, largest)
    return before + parts("search", {"a": counts(5, 100)}, largest, plain=plain)


def never_finite():
    before = parts("before", {"a": counts(0, over=9)}, {}, {"a": 1}, skipped=1)
    return before + parts("search", {"a": counts(0, 9)}, {"a": 0.0})


def fine(**fields):
    return [replace(part, **fields) for part in FINE]


@pytest.mark.parametrize(
    ("results", "status", "verdict", "shown"),
    [
        ([*UNDERFLOWING, *AFTER, *LOSSES], "complete", "layers", ["early", "1.75", "2.25"]),
        ([*UNDERFLOWING, *AFTER, *LOST], "complete", "layers", ["early", "not finite", "2.25"]),
        ([*UNDERFLOWING, *AFTER], "budget", "layers", ["early"]),
        (UNDERFLOWING, "budget", "layers", ["early", "predicted"]),
        ([*tiny(), *parts("after", {"a": counts(5, 9)}, {})], "complete", "higher", ["2^51"]),
        (tiny(), "budget", "higher", ["2^51", "predicted", "2^8", "a (100%)"]),
        (spread(), "complete", "spread", ["early (50%)", "2^8"]),
        (FINE, "complete", "enough", ["2^8"]),
        (fine(skipped=1), "complete", "enough", ["2^8", "8 steps"]),
        (fine(loss=0.0), "complete", "zero", []),
        (never_finite(), "complete", "unseen", ["2^8"]),
        (UNDERFLOWING[:8], "interrupted", "unmeasured", ["interrupted"]),
    ],
)
def test_verdicts(results, status, verdict, shown):
    found = summary_of(results, status)
    assert found.findings[0] == schema.Verdict(verdict=verdict)
    assert all(value in found.answer for value in shown)
    assert ("predicted" in found.answer) == ("predicted" in shown)
    # Where nothing can be judged the study says nothing at all.
    assert bool(words.too_little(found)) == (verdict == "unmeasured")


CAUSE = "the forward pass of 'a' made the first values that are not finite"


def test_an_answer_that_hangs_on_a_condition_opens_with_it():
    fault = [replace(UNDERFLOWING[0], forward={CAUSE: 3}), *UNDERFLOWING[1:]]
    # What came later is not the first fault.
    found = summary_of([*fault, replace(AFTER[0], forward={"later": 1}), *AFTER[1:]])
    assert found.findings[:2] == (
        schema.Verdict(verdict="layers"), schema.Forward(causes={CAUSE: 3}, count=3, steps=8)
    )  # fmt: skip
    assert "3 of 8 steps" in found.answer
    large = parts("before", CALM, LARGEST, {"late": 1}, at_any_scale={"late": 1})
    found = summary_of(large + FINE[8:])
    assert found.findings == (
        schema.Verdict(verdict="enough"),
        schema.Effect(name="nonfinite_at_any_scale", layers={"late": 8}),
    )
    assert "late (8 steps)" in found.answer
    assert "late (8 steps)" in found.remarks[0]


def test_nothing_is_proposed_where_nothing_can_be_said():
    none = {"activations": {}, "weights": {}, "largest": {"weights": {}}, "forward": {CAUSE: 1}}
    found = summary_of([replace(part, **none) for part in UNDERFLOWING])
    assert found.findings[0] == schema.Verdict(verdict="unseen")
    assert "8 of 8 steps" in found.answer
    assert (found.proposal, found.table) == (None, None)
    assert found.diagnosis.forward == {CAUSE: 8}
    assert summary_of([], "budget").table is None


# Remarks

CUT = {"sizes": (2, 2), "ratio": 1.0, "cosine": 1.0}
BUG = schema.Cut(name="2 + 2", bug="batch", words="it depends on the other samples.", **CUT)
NAN = "the loss is not finite, and NaN is there"


@pytest.mark.parametrize(
    ("finding", "shown"),
    [
        (schema.Unfinished(), ["budget", "--resume"]),
        (Shortened(steps=64), ["64", "200", "--steps"]),
        (schema.Forward(causes={"x": 1, NAN: 2}, count=3, steps=9), [f"n 2 steps {NAN}; in 1 s"]),
        (schema.Forward(causes={"x": 3}, count=3, steps=9), ["3 steps x", "bfloat16"]),
        (schema.Accumulated(bugs=()), []),
        (schema.Accumulated(bugs=(BUG,)), ["2 + 2", BUG.words]),
        (
            schema.Remedy(loss="lower"),
            ['LayerwiseGradScaler(model, {"early": 2.0**21}, init_scale=2.0**8)'],
        ),
        (schema.Effect(name="regressed", layers={"a": 0.75}), ["a (75%)"]),
        (schema.Effect(name="overflowed_after", layers={"a": 3}), ["a (3 steps)"]),
        (schema.Effect(name="internal_underflow", layers={"a": 0.95}), ["a (95%)"]),
        (
            schema.Effect(name="limiting", layers=dict.fromkeys([*"abcdef"], 3)),
            ["a (3 steps), b (3 steps), c (3 steps) and 3 more layers"],
        ),
        (
            schema.Effect(name="limiting", layers={"": 3, "a": 1}),
            ["the rest of the model (3 steps) and a (1 step)"],
        ),
    ],
)
def test_every_finding_has_a_remark_with_its_values(finding, shown):
    found = summary_of(UNDERFLOWING, "budget")
    (said,) = words.remarks(replace(found, findings=(found.findings[0], finding)))
    assert all(value in said for value in shown), said


def test_one_scale_as_a_remedy():
    for losses, loss in (
        ([], "unknown"),
        (LOSSES, "lower"),
        ([LOSSES[0], replace(LOSSES[1], valid_loss=2.5)], "not lower"),
    ):
        found = summary_of([*tiny(), *losses])
        assert found.findings[1:] == (schema.Remedy(loss=loss),)
        assert "GradScaler(init_scale=2.0**51)" in found.remarks[0]
    proposal = schema.Proposal(loss_scale=0.25, layer_scales={})
    assert words.code(proposal) == "LayerwiseGradScaler(model, {}, init_scale=2.0**(-2))"


def test_the_table():
    after = parts("after", {"early": counts(-3, 100), "late": counts(-15, 30, 70)}, LARGEST)
    before = parts("before", STARVED, LARGEST, {"late": 2})
    found = summary_of([*before, *UNDERFLOWING[8:], *after])
    assert found.table.rows == (
        ("early", "75.0% / 0.0%", "0 / 0", "2^21", "underflows"),
        ("late", "0.0% / 30.0%", "16 / 0", "–", "limiting, regressed"),
    )
