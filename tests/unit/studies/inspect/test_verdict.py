"""The arithmetic of the verdict, on counts made by hand."""

import math

import pytest

from steadygrad.studies.inspect.verdict import (
    HEADROOM,
    LOSS_HEADROOM,
    Proposal,
    judge,
    propose,
)
from steadygrad.studies.inspect.words import Findings, code, sentences


def counts(low, *numbers, zero=0, over=0):
    return {"zero": zero, "low": low, "counts": list(numbers), "over": over}


def parts(phase, weights, largest, overflows=None, *, kind="weights", plain=None, **fields):
    """Eight equal parts of a phase; layers have gradients of one kind only."""
    other = {"weights": "activations", "activations": "weights"}[kind]
    return [
        {
            "phase": phase,
            "part": part,
            "overflows": overflows or {},
            "at_any_scale": {},
            "overflowed_at": dict.fromkeys(overflows or {}, 9.0),
            "scales": {"": 8.0, **dict.fromkeys(weights, 0.0)},
            kind: weights,
            other: {},
            "largest": {kind: largest, other: {}},
            "plain": {kind: plain or {}, other: {}},
            **fields,
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
    calm, zero = {"a": counts(0, 9)}, {"a": 0.0}
    before = parts("before", calm, zero, {"a": 2, "b": 1}, at_any_scale={"a": 1})
    after = parts("after", calm, zero, {"a": 1, "c": 2}, at_any_scale={"a": 1})
    assert judge(before).broken == {"a": 8}
    verdict = judge(before + after)
    assert verdict.broken == {"a": 8}
    assert verdict.fault
    # Of the rest, what happens at the scales proposed is named, and is no fault.
    assert verdict.spilled == {"c": 16}
    spilled = judge(parts("after", calm, zero, {"c": 2}))
    assert (spilled.fault, spilled.spilled) == (False, {"c": 16})
    phases = {"before": {"loss_scale": 8.0, "skipped": 0}}
    said = sentences(Findings("complete", phases, spilled, Proposal(8.0, {})))
    assert said[0].startswith("Nothing is at fault")
    assert said[1].startswith("At the scales proposed there was overflow in c (16 steps):")


def test_what_is_broken_comes_first():
    before = parts("before", HUNGRY[0]["weights"], LARGEST, {"x": 3}, at_any_scale={"x": 3})
    verdict = judge(before + HUNGRY[8:])
    assert (verdict.broken, verdict.ceiling, list(verdict.starved)) == ({"x": 24}, {}, ["early"])
    proposal = propose(before + HUNGRY[8:], 2.0**8)
    said = sentences(Findings("complete", {"before": {"loss_scale": 256.0}}, verdict, proposal))
    assert said[0].startswith("x made values that are not finite in 24 steps, and would at any")
    assert said[1].startswith("No single loss scale serves all layers.")


def test_gradients_at_boundaries_count_as_those_of_weights():
    hungry = [
        *parts("before", HUNGRY[0]["weights"], LARGEST, kind="activations"),
        *parts("search", HUNGRY[8]["weights"], LARGEST, kind="activations"),
    ]
    assert judge(hungry) == judge(HUNGRY)
    assert propose(hungry, 2.0**8) == propose(HUNGRY, 2.0**8)


def test_few_values_among_many_zeros():
    """One in forty is not zero to begin with; at the one scale all of these vanish."""
    largest = {"table": -30.0, "late": 5.0}
    before = {"table": counts(0, zero=4000), "late": counts(10, 100)}
    search = {"table": counts(5, 100, zero=3900), "late": counts(9, 100)}
    plain = {"table": counts(-34, 100, zero=3900), "late": counts(1, 100)}
    events = parts("before", before, largest) + parts("search", search, largest, plain=plain)
    assert judge(events).starved == {"table": 1.0}
    # At 2**8 what is at 2**-22 is normal, at 2**-23 it is not.
    for low, starved in ((-22, False), (-23, True)):
        plain["table"] = counts(low, 100, zero=3900)
        events[8:] = parts("search", search, largest, plain=plain)
        assert bool(judge(events).starved) is starved


def test_zeros_of_convergence():
    """Twice as many samples have no gradient any more; what there is float16 holds."""
    before, search = {"a": counts(3, 3, zero=97)}, {"a": counts(3, 6, zero=94)}
    plain = {"a": counts(-5, 6, zero=94)}
    calm = parts("before", before, {"a": -5.0}) + parts("search", search, {"a": -5.0}, plain=plain)
    assert judge(calm).starved == {}
    # Nor does what would be lost later, but is there.
    plain["a"] = counts(-40, 6, zero=94)
    calm = parts("before", search, {"a": -5.0}) + parts("search", search, {"a": -5.0}, plain=plain)
    assert judge(calm).starved == {}


def test_one_scale_that_begins_higher_is_enough():
    """All gradients are small alike, and nothing overflowed."""
    tiny = {"a": counts(0, zero=100), "b": counts(-23, 100)}
    plain = {"a": counts(-38, 100), "b": counts(-31, 100)}
    largest = {"a": -38.0, "b": -31.0}
    events = parts("before", tiny, largest)
    events += parts("search", {n: counts(5, 100) for n in tiny}, largest, plain=plain)
    verdict, proposal = judge(events), propose(events, 2.0**8)
    assert verdict.starved == {"a": 1.0, "b": 1.0}
    assert proposal == Proposal(2.0 ** (15 - LOSS_HEADROOM + 31), {})
    said = sentences(Findings("complete", {"before": {"loss_scale": 256.0}}, verdict, proposal))
    assert said[0].startswith(
        "One loss scale seems to be enough, but 2^8 is too small: gradients vanish"
    )
    assert said[-1] == "Train with torch.amp.GradScaler(init_scale=2.0**44)."
    # A layer loses half of its values with a scale of its own as well: that says nothing of this.
    spread = counts(-20, 50, *[0] * 30, 50)
    search = {"a": counts(5, 100), "b": spread}
    lost = {"a": tiny["a"], "b": counts(-24, 100)}
    wide = {"a": plain["a"], "b": counts(-65, 50, *[0] * 30, 50)}
    events = parts("before", lost, largest) + parts("search", search, largest, plain=wide)
    assert propose(events, 2.0**8) == proposal
    # Not where there was overflow at such a scale.
    overflow = {"overflowed_at": {"b": 44.0}}
    one = [{**event, **overflow} if event["phase"] == "before" else event for event in events]
    assert list(propose(one, 2.0**8).layer_scales) == ["a"]
    # Nor where another layer has no room for it.
    plain["b"], largest["b"] = counts(2, 100), 2.0
    events = parts("before", {**tiny, "b": counts(10, 100)}, largest)
    events += parts("search", {n: counts(5, 100) for n in tiny}, largest, plain=plain)
    assert list(propose(events, 2.0**8).layer_scales) == ["a"]


def test_no_scale_in_sight():
    """It loses what others do not, but has no more room than they have."""
    before = {"early": counts(-15, 50, 50), "late": counts(10, 100)}
    largest = {"early": 4.0, "late": 5.0}
    events = parts("before", before, largest) + parts("search", HUNGRY[8]["weights"], largest)
    proposal = propose(events, 2.0**8)
    assert proposal == Proposal(2.0**8, {})
    phases = {"before": {"loss_scale": 256.0}}
    said = sentences(Findings("complete", phases, judge(events), proposal))
    assert said[0].startswith("At 2^8, where the one loss scale settled, gradients vanish")
    assert said[-1] == said[0]
    # What overflowed is not proposed without a word.
    overflowed = parts("before", before, largest, {"late": 1}) + events[8:]
    said = sentences(Findings("complete", phases, judge(overflowed), Proposal(2.0**9, {})))
    assert said[0].startswith("At 2^8, where the one loss scale settled, gradients vanish")
    assert said[1:] == ["It cannot be larger because of overflow in late (8 steps)."]


@pytest.mark.parametrize(("more", "own"), [(3, False), (4, True)])
def test_a_scale_of_its_own_is_for_so_much_room(more, own):
    # Above the loss's scale, which leaves the late layer less headroom.
    largest = {"early": 5.0 - (HEADROOM - LOSS_HEADROOM) - more, "late": 5.0}
    before, search = (HUNGRY[i]["weights"] for i in (0, 8))
    events = parts("before", before, largest) + parts("search", search, largest)
    assert ("early" in propose(events, 2.0**8).layer_scales) is own


@pytest.mark.parametrize("name", ["early", ""])
def test_a_starving_layer_with_less_room_than_the_others(name):
    """It is not raised into overflow: by a scale below one, or by the loss's."""
    before = {name: counts(-15, 50, 50, zero=100), "late": counts(-2, 100)}
    search = {name: counts(-3, 100), "late": counts(-2, 100)}
    largest = {name: 3.0, "late": -10.0}
    events = parts("before", before, largest) + parts("search", search, largest)
    proposal = propose(events, 2.0**4)
    if name:
        assert proposal == Proposal(2.0**23, {"early": 2.0 ** (15 - HEADROOM - 3 - 23)})
    else:
        own = 15 - HEADROOM + 10 - (15 - LOSS_HEADROOM - 3)
        assert proposal == Proposal(2.0 ** (15 - LOSS_HEADROOM - 3), {"late": 2.0**own})


def test_scales_stay_where_float32_holds_them():
    far = {"early": -300.0, "late": -140.0}
    before, search = (HUNGRY[i]["weights"] for i in (0, 8))
    proposal = propose(parts("before", before, far) + parts("search", search, far), 2.0**8)
    assert proposal == Proposal(2.0**100, {"early": 2.0**100, "late": 2.0 ** (151 - 100)})


def test_who_overflowed_far_above_does_not_hold_the_scale_down():
    overflows = {"late": 1, "once": 2}
    at = {"late": 8.0 + 2, "once": 8.0 + 3}
    before = parts("before", HUNGRY[0]["weights"], LARGEST, overflows, overflowed_at=at)
    assert judge(before + HUNGRY[8:]).ceiling == {"late": 8}


def test_what_the_proposal_costs():
    after = parts("after", {"early": counts(-3, 100), "late": counts(-15, 30, 70)}, LARGEST)
    verdict = judge(HUNGRY + after)
    assert verdict.price == {"late": pytest.approx(0.3)}
    phases = {"before": {"loss_scale": 8.0}}
    said = sentences(Findings("complete", phases, verdict, propose(HUNGRY, 2.0**8)))
    assert "At the scales proposed digits are lost in late (30%) instead." in said


def test_the_price_is_what_one_scale_did_not_take():
    """The late layer loses as much with one scale already."""
    lossy = {"early": counts(-3, 100), "late": counts(-15, 30, 70)}
    search = parts("search", {name: counts(-3, 100) for name in lossy}, LARGEST)
    events = parts("before", lossy, LARGEST) + search + parts("after", lossy, LARGEST)
    assert judge(events).price == {}


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


@pytest.mark.parametrize(("zero", "lost"), [(95, True), (85, False)])
def test_what_vanishes_inside_of_a_layer_is_not_called_well(zero, lost):
    """Whatever the scale its weights' gradients are zero, and those that come to it are not."""
    weights = {"a": counts(0, 100 - zero, zero=zero)}
    coming = {"a": counts(0, 80, zero=20)}
    both = [
        {**event, "activations": coming}
        for phase in ("before", "search")
        for event in parts(phase, weights, {"a": 0.0})
    ]
    verdict = judge(both)
    assert verdict.inside == ({"a": pytest.approx(0.95)} if lost else {})
    assert not verdict.fault
    phases = {"before": {"skipped": 0, "loss_scale": 2.0**9, "valid_loss": None}}
    said = " ".join(sentences(Findings("complete", phases, verdict, Proposal(2.0**9, {}))))
    assert ("in a (95%)" in said) is lost
    assert ("GradScaler is enough" in said) is not lost
