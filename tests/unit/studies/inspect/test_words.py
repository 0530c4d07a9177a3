"""One example of each template of words, and the run of the pages, word by word."""

import pytest
from msgspec.structs import replace

from steadygrad.studies.inspect import schema, words
from tests.unit.studies.inspect.runs import (
    LARGEST,
    STARVED,
    UNDERFLOWING,
    counts,
    parts,
    spread,
    summary_of,
)

CALM = {"early": counts(0, 9), "late": counts(0, 9)}
FINE = [part for phase in ("before", "search") for part in parts(phase, CALM, LARGEST)]
AFTER = parts("after", CALM, LARGEST)
LOSSES = [schema.Phase(phase="before", valid_loss=2.0), schema.Phase(phase="after", valid_loss=1.0)]
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


OWN = "No single loss scale fits all layers: {} scales of their own for early"
BOTH = OWN + " the validation loss after 8 optimizer steps is {}, with one loss scale 2."
GUESS = " (predicted, not trained)"
HIGHER = (
    "One loss scale is enough if it starts at 2^51{}: at 2^8, where it settled, gradients "
    "underflow in a (100%)."
)
SPREAD = (
    "Gradients underflow in early (50%), and no scale prevents it: one loss scale settled at 2^8, "
    "and their exponents are too widely spread."
)
ENOUGH = "One loss scale is enough for every layer (torch.amp.GradScaler): it settled at 2^8{}."
ZERO = "The training loss is exactly 0 at the end, and so are its gradients."
UNSEEN = "Nothing can be said of the gradients: none was finite, down to a scale of 2^8."
EARLY = "No layer can be judged yet: the study was interrupted before scales were found."


@pytest.mark.parametrize(
    ("results", "status", "expected"),
    [
        ([*UNDERFLOWING, *AFTER, *LOSSES], "complete", BOTH.format("with", 1)),
        ([*UNDERFLOWING, *AFTER, *LOST], "complete", BOTH.format("with", "not finite")),
        ([*UNDERFLOWING, *AFTER], "budget", OWN.format("try") + "."),
        (UNDERFLOWING, "budget", OWN.format("try") + f"{GUESS}."),
        ([*tiny(), *parts("after", {"a": counts(5, 9)}, {})], "complete", HIGHER.format("")),
        (tiny(), "budget", HIGHER.format(GUESS)),
        (spread(), "complete", SPREAD),
        (FINE, "complete", ENOUGH.format("")),
        (fine(skipped=1), "complete", ENOUGH.format(" after 8 steps with an overflow")),
        (fine(loss=0.0), "complete", ZERO),
        (never_finite(), "complete", UNSEEN),
        (UNDERFLOWING[:8], "interrupted", EARLY),
    ],
)
def test_answers(results, status, expected):
    assert summary_of(results, status).answer == expected


CAUSE = "the forward pass of 'a' made the first values that are not finite"


def test_an_answer_that_hangs_on_a_condition_opens_with_it():
    fault = [replace(UNDERFLOWING[0], forward={CAUSE: 3}), *UNDERFLOWING[1:]]
    # What came later is not the first fault.
    found = summary_of([*fault, replace(AFTER[0], forward={"later": 1}), *AFTER[1:]])
    assert found.answer == (
        "The forward pass is not finite in 3 of 8 steps, where no loss scale helps, so mend that "
        "first; in the other steps no single loss scale fits all layers."
    )
    assert found.remarks[0] == (
        f"In 3 steps {CAUSE}: train this part in bfloat16 or float32, or look for what makes its "
        "values so large."
    )
    found = summary_of(
        parts("before", CALM, LARGEST, {"late": 1}, at_any_scale={"late": 1}) + FINE[8:]
    )
    assert found.answer == (
        "Gradients are not finite at any scale in late (8 steps), so mend that first; in the other "
        "steps one loss scale is enough for every layer (torch.amp.GradScaler)."
    )
    assert found.remarks[0].startswith("Look for the cause in the backward pass of late (8 steps),")


def test_nothing_is_proposed_where_nothing_can_be_said():
    none = {"activations": {}, "weights": {}, "largest": {"weights": {}}, "forward": {CAUSE: 1}}
    found = summary_of([replace(part, **none) for part in UNDERFLOWING])
    assert found.answer == (
        "The forward pass is not finite in 8 of 8 steps, where no loss scale helps, so mend that "
        "first: nothing can be said of the gradients."
    )
    assert (found.proposal, found.table) == (None, None)
    assert found.diagnosis.forward == {CAUSE: 8}


CUT = {"sizes": (2, 2), "ratio": 1.0, "cosine": 1.0}
BUG = schema.Cut(name="2 + 2", bug="batch", words="it depends on the other samples.", **CUT)
REMARKS = {
    "The study ran out of its budget before all steps were trained; --resume continues it.":
        schema.Unfinished(),
    "The budget has time for about 64 optimizer steps in each training, not 200; --steps sets "
    "their number.": schema.Shortened(steps=64),
    "In 2 steps the loss is not finite, and NaN is there; in 1 step x: look for NaN in inputs and "
    "labels.": schema.Forward(
        causes={"x": 1, "the loss is not finite, and NaN is there": 2}, count=3, steps=9
    ),
    "Accumulated over micro-batches of any size, the gradient is that of the whole batch.":
        schema.Accumulated(bugs=()),
    "Accumulation over 2 + 2: it depends on the other samples.": schema.Accumulated(bugs=(BUG,)),
    'Train with LayerwiseGradScaler(model, {"early": 2.0**21}, init_scale=2.0**8), or with "auto" '
    "in place of the scales.": schema.Remedy(loss="lower"),
    "With the proposed scales more gradients underflow than with one loss scale in a (75%).":
        schema.Effect(name="regressed", layers={"a": 0.75}),
    "The proposed scales overflowed in a (3 steps): leave dynamic scaling on (the default), for "
    "occasional gradients are far larger than the rest.":
        schema.Effect(name="overflowed_after", layers={"a": 3}),
    "Whatever the scale, over 90% of the weight gradients are zero or subnormal in a (95%): they "
    "are truly zero, or they underflow inside, where scaling smaller parts or bfloat16 helps.":
        schema.Effect(name="internal_underflow", layers={"a": 0.95}),
    "Overflow in a (3 steps) keeps the loss scale from being larger.":
        schema.Effect(name="limiting", layers={"a": 3}),
}  # fmt: skip


@pytest.mark.parametrize("expected", REMARKS)
def test_remarks(expected):
    found = summary_of(UNDERFLOWING, "budget")
    said = words.remarks(replace(found, findings=(found.findings[0], REMARKS[expected])))
    assert said == (expected,)


def test_one_scale_as_a_remedy():
    found = summary_of(tiny())
    assert found.findings[1:] == (schema.Remedy(loss="unknown"),)
    assert found.remarks == ("Try to train with torch.amp.GradScaler(init_scale=2.0**51).",)
    found = summary_of([*tiny(), LOSSES[0], replace(LOSSES[1], valid_loss=2.5)])
    assert found.findings[1] == schema.Remedy(loss="not lower")
    assert found.remarks[0].startswith("The validation loss was not lower with torch.amp.GradSc")
    proposal = schema.Proposal(loss_scale=0.25, layer_scales={})
    assert words.code(proposal) == "LayerwiseGradScaler(model, {}, init_scale=2.0**(-2))"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["", "a"], "the rest of the model (3 steps) and a (3 steps)"),
        ([*"abcd"], "a (3 steps), b (3 steps), c (3 steps) and d (3 steps)"),
        ([*"abcdef"], "a (3 steps), b (3 steps), c (3 steps) and 3 more layers"),
    ],
)
def test_a_sentence_agrees_with_any_number_of_layers(names, said):
    limiting = schema.Effect(name="limiting", layers=dict.fromkeys(names, 3))
    found = summary_of(FINE)
    (text,) = words.remarks(replace(found, findings=(found.findings[0], limiting)))
    assert text == f"Overflow in {said} keeps the loss scale from being larger."


def test_the_table():
    after = parts("after", {"early": counts(-3, 100), "late": counts(-15, 30, 70)}, LARGEST)
    before = parts("before", STARVED, LARGEST, {"late": 2})
    found = summary_of([*before, *UNDERFLOWING[8:], *after])
    assert found.table.title == "tiny: one loss scale (2^8) / the proposed scales (2^8)"
    assert found.table.rows == (
        ("early", "75.0% / 0.0%", "0 / 0", "2^21", "underflows"),
        ("late", "0.0% / 30.0%", "16 / 0", "–", "limiting, regressed"),
    )
    assert summary_of([], "budget").table is None
