"""The sentences about a diagnosis."""

import pytest
from msgspec.structs import replace

from steadygrad.studies.inspect.diagnosis import Proposal, diagnose, propose
from steadygrad.studies.inspect.explain import code, explain
from tests.unit.studies.inspect.test_diagnosis import LARGEST, UNDERFLOWING, counts, parts


def test_the_words_name_everything():
    phases = {
        "before": {"steps": 50, "skipped": 3, "loss_scale": 256.0, "valid_loss": 2.0},
        "after": {"steps": 50, "skipped": 0, "loss_scale": 64.0, "valid_loss": 1.0},
    }
    before = parts("before", UNDERFLOWING[0].weights, LARGEST, {"late": 2})
    proposal = propose(UNDERFLOWING)
    said = explain("complete", phases, diagnose(before + UNDERFLOWING[8:]), proposal)
    assert said[0] == (
        "No single loss scale fits all layers. At 2^8, where it settled, gradients underflow in "
        "early (75%)."
    )
    assert said[1:3] == [
        "Overflow in late (16 steps) keeps the loss scale from being larger.",
        "Validation loss after 50 steps: 2 with one loss scale, 1 with the proposed scales.",
    ]
    assert said[3:] == [f'Train with {code(proposal)}, or with "auto" in place of the scales.']
    assert code(proposal) == 'LayerwiseGradScaler(model, {"early": 2.0**21}, init_scale=2.0**8)'
    assert code(Proposal(0.25, {})) == "LayerwiseGradScaler(model, {}, init_scale=2.0**(-2))"


def test_the_words_of_a_run_cut_short():
    said = explain("budget", {}, diagnose([]), None)
    assert said == [
        "The time budget ended before all measurements were made.",
        "No layer can be judged yet. --resume continues the study.",
    ]
    # What failed would fail again.
    assert explain("failed", {}, diagnose([]), None)[1] == "No layer can be judged yet."


@pytest.mark.parametrize(("zero", "lost"), [(95, True), (85, False)])
def test_what_vanishes_inside_of_a_layer_is_not_called_well(zero, lost):
    """Whatever the scale its weights' gradients are zero, and those that come to it are not."""
    weights = {"a": counts(0, 100 - zero, zero=zero)}
    coming = {"a": counts(0, 80, zero=20)}
    both = [
        replace(event, activations=coming)
        for phase in ("before", "search")
        for event in parts(phase, weights, {"a": 0.0})
    ]
    diagnosis = diagnose(both)
    assert diagnosis.internal_underflow == ({"a": pytest.approx(0.95)} if lost else {})
    assert not diagnosis.fault
    phases = {"before": {"skipped": 0, "loss_scale": 2.0**9, "valid_loss": None}}
    said = " ".join(explain("complete", phases, diagnosis, Proposal(2.0**9, {})))
    assert ("in a (95%)" in said) is lost
    assert ("GradScaler is enough" in said) is not lost


def test_gradients_of_a_loss_that_is_zero_are_no_fault_of_float16():
    both = parts("before", UNDERFLOWING[0].weights, LARGEST) + UNDERFLOWING[8:]
    diagnosis = diagnose(both)
    assert diagnosis.underflowing
    phases = {"before": {"steps": 50, "skipped": 0, "loss": 0.0, "loss_scale": 2.0**9}}
    (said,) = explain("complete", phases, diagnosis, Proposal(2.0**9, {}))
    assert "exactly 0" in said


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a"], "The proposed scales overflowed in a (8 steps)."),
        (["", "a"], "The proposed scales overflowed in the rest of the model (8 steps) and a"),
        (["a", "b", "c"], "The proposed scales overflowed in a (8 steps), b (8 steps) and c"),
    ],
)
def test_a_sentence_agrees_with_any_number_of_layers(names, said):
    calm = dict.fromkeys(names, counts(0, 9))
    after = parts("after", calm, dict.fromkeys(names, 0.0), dict.fromkeys(names, 1))
    phases = {"before": {"loss_scale": 8.0, "skipped": 1}}
    words = explain("complete", phases, diagnose(after), Proposal(8.0, {}))
    assert words[0].endswith("It settled at 2^3 after 1 step with an overflow.")
    assert words[1].startswith(said)
