"""The arithmetic of the verdict, on counts made by hand."""

import math

import pytest

from steadygrad.studies.inspect.verdict import HEADROOM, LOSS_HEADROOM, Proposal, judge, propose
from steadygrad.studies.inspect.words import Findings, code, sentences


def counts(low, *numbers, zero=0, over=0):
    return {"zero": zero, "low": low, "counts": list(numbers), "over": over}


def parts(phase, weights, largest, overflows=None, scale=8.0):
    """Eight equal parts of a phase; layers have gradients of weights only."""
    return [
        {
            "phase": phase,
            "part": part,
            "overflows": overflows or {},
            "scales": {"": scale, **dict.fromkeys(weights, 0.0)},
            "activations": {},
            "weights": weights,
            "largest": {"activations": {}, "weights": largest},
        }
        for part in range(8)
    ]


LARGEST = {"early": -18.0, "late": 5.0}
HUNGRY = [
    # A scale of 2**8: half of what is in the early layer is zero, a quarter subnormal.
    *parts("before", {"early": counts(-15, 25, 25, zero=50), "late": counts(10, 100)}, LARGEST),
    *parts("search", {"early": counts(-3, 100), "late": counts(9, 100)}, LARGEST),
]


def test_a_starving_layer_gets_the_room_it_has():
    verdict = judge(HUNGRY)
    assert verdict.starved == {"early": pytest.approx(0.75)}
    proposal = propose(HUNGRY, 2.0**8)
    # 15 is the largest exponent that float16 holds.
    loss, early = 15 - LOSS_HEADROOM - 5, 15 - HEADROOM + 18
    assert proposal == Proposal(2.0**loss, {"early": 2.0 ** (early - loss)})
    assert not judge([]).fault


@pytest.mark.parametrize(("zero", "starved"), [(9, False), (12, True)])
def test_a_tenth_is_the_bound(zero, starved):
    """Zeros that are there with a scale for each layer as well do not count."""
    before = parts("before", {"a": counts(0, 60 - zero, zero=40 + zero)}, {"a": 0.0})
    search = parts("search", {"a": counts(4, 60, zero=40)}, {"a": 0.0})
    assert bool(judge(before + search).starved) is starved


def test_without_hunger_an_overflow_is_no_fault():
    calm = {"a": counts(0, 100)}
    first = parts("before", calm, {"a": 0.0}, {"a": 1})
    both = first + parts("search", calm, {"a": 0.0})
    assert not judge(both).fault
    assert propose(both, 2.0**9) == Proposal(2.0**9, {})
    assert propose(both, 2.0**20) == Proposal(2.0 ** (15 - LOSS_HEADROOM), {})


def test_who_holds_the_scale_down():
    before = parts("before", HUNGRY[0]["weights"], LARGEST, {"late": 2})
    verdict = judge(before + HUNGRY[8:])
    assert verdict.ceiling == {"late": 16}


def test_an_overflow_at_any_scale_is_named():
    both = parts("before", {"a": counts(0, 9)}, {"a": 0.0}, {"a": 1, "b": 1})
    both += parts("after", {"a": counts(0, 9)}, {"a": 0.0}, {"a": 1, "c": 1})
    assert judge(both).broken == {"a": 8}


def test_what_the_proposal_costs():
    after = parts("after", {"early": counts(-3, 100), "late": counts(-15, 30, 70)}, LARGEST)
    verdict = judge(HUNGRY + after)
    assert verdict.price == {"late": pytest.approx(0.3)}
    phases = {"before": {"loss_scale": 8.0}}
    said = sentences(Findings("complete", phases, verdict, propose(HUNGRY, 2.0**8)))
    assert "At the scales proposed digits are lost in late (30%) instead." in said


def test_a_layer_that_was_never_finite_does_not_decide():
    broken = parts(
        "before", {"a": counts(0, 9), "b": counts(0, over=9)}, {"a": 0.0, "b": -math.inf}
    )
    assert propose(broken, 2.0**4) == Proposal(2.0**4, {})


def test_the_words_name_everything():
    phases = {
        "before": {"steps": 50, "skipped": 3, "loss_scale": 256.0, "valid_loss": 2.0},
        "after": {"steps": 50, "skipped": 0, "loss_scale": 64.0, "valid_loss": 1.0},
    }
    before = parts("before", HUNGRY[0]["weights"], LARGEST, {"late": 2})
    proposal = propose(HUNGRY, 2.0**8)
    said = sentences(Findings("complete", phases, judge(before + HUNGRY[8:]), proposal))
    assert said[0] == (
        "No single loss scale serves all layers. At 2^8, where it settled, gradients vanish or "
        "lose digits that need not: in early (75%)."
    )
    assert said[1:3] == [
        "It cannot be larger because of overflow in late (16 steps).",
        "Validation loss after 50 steps: 2 with one loss scale, 1 with the scales proposed.",
    ]
    assert said[3:] == [f'Train with {code(proposal)}, or with "auto" in place of the scales.']
    assert code(proposal) == 'LayerwiseGradScaler(model, {"early": 2.0**21}, init_scale=2.0**8)'
    assert code(Proposal(0.25, {})) == "LayerwiseGradScaler(model, {}, init_scale=2.0**(-2))"


def test_the_words_of_a_run_cut_short():
    said = sentences(Findings("budget", {}, judge([]), None))
    assert said[0].startswith("The time budget was over")
    assert "--resume" in said[1]
