"""The arithmetic of the diagnosis, on counts made by hand."""

import math

import pytest
from msgspec.structs import replace

from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import analysis, schema
from steadygrad.studies.inspect.analysis import HEADROOM, LOSS_HEADROOM, by_phase
from tests.unit.studies.inspect.runs import (
    FED,
    LARGEST,
    STARVED,
    UNDERFLOWING,
    counts,
    parts,
    spread,
)


def Proposal(loss_scale, layer_scales):
    return schema.Proposal(loss_scale=loss_scale, layer_scales=layer_scales)


def diagnose(parts):
    return analysis.diagnose(by_phase(Results(parts)))


def propose(parts):
    return analysis.propose(by_phase(Results(parts)))


def test_an_underflowing_layer_gets_the_room_it_has():
    diagnosis = diagnose(UNDERFLOWING)
    assert diagnosis.underflowing == {"early": pytest.approx(0.75)}
    proposal = propose(UNDERFLOWING)
    # 15 is the largest exponent that float16 holds.
    loss, early = 15 - LOSS_HEADROOM - 5, 15 - HEADROOM + 18
    assert proposal == Proposal(2.0**loss, {"early": 2.0 ** (early - loss)})


@pytest.mark.parametrize(("zero", "starved"), [(9, False), (12, True)])
def test_a_tenth_is_the_bound(zero, starved):
    """Zeros that are there with a scale for each layer as well do not count."""
    before = parts("before", {"a": counts(0, 60 - zero, zero=40 + zero)}, {"a": 0.0})
    search = parts("search", {"a": counts(4, 60, zero=40)}, {"a": 0.0})
    assert bool(diagnose(before + search).underflowing) is starved


def test_without_underflow_an_overflow_is_no_fault():
    calm = {"a": counts(0, 100)}
    for settled, proposed in ((9.0, 9), (20.0, 15 - LOSS_HEADROOM)):
        first = parts("before", calm, {"a": 0.0}, {"a": 1}, settled=settled)
        both = first + parts("search", calm, {"a": 0.0})
        assert not diagnose(both).fault
        assert diagnose(both).limiting == {}
        assert propose(both) == Proposal(2.0**proposed, {})


def test_parts_may_arrive_in_any_order():
    """Workers end them in another order; the scale that settled is that of the last part."""
    calm = {"a": counts(0, 100)}
    first = [
        replace(event, scales={**event.scales, "": 12.0 - event.part})
        for event in parts("before", calm, {"a": 0.0})
    ]
    both = first + parts("search", calm, {"a": 0.0})
    assert propose(both[::-1]) == propose(both) == Proposal(2.0**5, {})
    # Those of the last training, which the proposal is for, do not count.
    assert propose(both + parts("after", calm, {"a": 14.0})) == propose(both)


def test_who_overflows_near_the_scale_limits_it():
    """At most two binades above it."""
    at = {"late": 8.0 + 2, "once": 8.0 + 3}
    before = parts("before", STARVED, LARGEST, {"late": 2, "once": 1}, overflowed_at=at)
    assert diagnose(before + UNDERFLOWING[8:]).limiting == {"late": 16}


def test_an_overflow_at_any_scale_is_named():
    calm, zero = {"a": counts(0, 9)}, {"a": 0.0}
    before = parts("before", calm, zero, {"a": 2, "b": 1}, at_any_scale={"a": 1})
    after = parts("after", calm, zero, {"a": 1, "c": 2}, at_any_scale={"a": 1})
    assert diagnose(before).nonfinite_at_any_scale == {"a": 8}
    diagnosis = diagnose(before + after)
    assert diagnosis.nonfinite_at_any_scale == {"a": 8}
    assert diagnosis.fault
    # It limits no scale.
    both = parts("before", STARVED, LARGEST, {"x": 3}, at_any_scale={"x": 3}) + UNDERFLOWING[8:]
    assert diagnose(both).limiting == {}
    # Other overflows with the proposed scales are named, and are no fault.
    assert diagnosis.overflowed_after == {"c": 16}
    rare = diagnose(parts("before", calm, zero) + parts("after", calm, zero, {"c": 2}))
    assert (rare.fault, rare.overflowed_after) == (False, {"c": 16})


def test_gradients_at_boundaries_count_as_those_of_weights():
    underflowing = parts("before", STARVED, LARGEST, kind="activations")
    underflowing += parts("search", FED, LARGEST, kind="activations")
    assert diagnose(underflowing) == diagnose(UNDERFLOWING)
    assert propose(underflowing) == propose(UNDERFLOWING)


def test_few_values_among_many_zeros():
    """One in forty is not zero to begin with; at the one scale all of these vanish."""
    largest = {"table": -30.0, "late": 5.0}
    before = {"table": counts(0, zero=4000), "late": counts(10, 100)}
    search = {"table": counts(5, 100, zero=3900), "late": counts(9, 100)}
    plain = {"table": counts(-34, 100, zero=3900), "late": counts(1, 100)}
    events = parts("before", before, largest) + parts("search", search, largest, plain=plain)
    assert diagnose(events).underflowing == {"table": 1.0}
    # At 2**8 what is at 2**-22 is normal, at 2**-23 it is not.
    for low, starved in ((-22, False), (-23, True)):
        plain["table"] = counts(low, 100, zero=3900)
        events[8:] = parts("search", search, largest, plain=plain)
        assert bool(diagnose(events).underflowing) is starved


def test_zeros_of_convergence():
    """Twice as many samples have no gradient any more; what there is float16 holds."""
    before, search = {"a": counts(3, 3, zero=97)}, {"a": counts(3, 6, zero=94)}
    plain = {"a": counts(-5, 6, zero=94)}
    calm = parts("before", before, {"a": -5.0}) + parts("search", search, {"a": -5.0}, plain=plain)
    assert diagnose(calm).underflowing == {}
    # Nor does what would be lost later, but is there.
    plain["a"] = counts(-40, 6, zero=94)
    calm = parts("before", search, {"a": -5.0}) + parts("search", search, {"a": -5.0}, plain=plain)
    assert diagnose(calm).underflowing == {}


def test_one_scale_that_begins_higher_is_enough():
    """All gradients are small alike, and nothing overflowed."""
    tiny = {"a": counts(0, zero=100), "b": counts(-23, 100)}
    plain = {"a": counts(-38, 100), "b": counts(-31, 100)}
    largest = {"a": -38.0, "b": -31.0}
    events = parts("before", tiny, largest)
    events += parts("search", {n: counts(5, 100) for n in tiny}, largest, plain=plain)
    diagnosis, proposal = diagnose(events), propose(events)
    assert diagnosis.underflowing == {"a": 1.0, "b": 1.0}
    assert proposal == Proposal(2.0 ** (15 - LOSS_HEADROOM + 31), {})
    # A layer loses half of its values with a scale of its own as well: that says nothing of this.
    spread = counts(-20, 50, *[0] * 30, 50)
    search = {"a": counts(5, 100), "b": spread}
    lost = {"a": tiny["a"], "b": counts(-24, 100)}
    wide = {"a": plain["a"], "b": counts(-65, 50, *[0] * 30, 50)}
    events = parts("before", lost, largest) + parts("search", search, largest, plain=wide)
    assert propose(events) == proposal
    # Not where there was overflow at such a scale.
    high = {"b": 44.0}
    one = [replace(e, overflowed_at=high) if e.phase == "before" else e for e in events]
    assert list(propose(one).layer_scales) == ["a"]
    # Nor where another layer has no room for it.
    plain["b"], largest["b"] = counts(2, 100), 2.0
    events = parts("before", {**tiny, "b": counts(10, 100)}, largest)
    events += parts("search", {n: counts(5, 100) for n in tiny}, largest, plain=plain)
    assert list(propose(events).layer_scales) == ["a"]


def test_no_scale_in_sight():
    assert propose(spread()) == Proposal(2.0**8, {})


@pytest.mark.parametrize(("more", "own"), [(3, False), (4, True)])
def test_a_scale_of_its_own_is_for_so_much_room(more, own):
    # Above the loss's scale, which leaves the late layer less headroom.
    largest = {"early": 5.0 - (HEADROOM - LOSS_HEADROOM) - more, "late": 5.0}
    events = parts("before", STARVED, largest) + parts("search", FED, largest)
    assert ("early" in propose(events).layer_scales) is own


@pytest.mark.parametrize("name", ["early", ""])
def test_an_underflowing_layer_with_less_room_than_the_others(name):
    """It is not raised into overflow: by a scale below one, or by the loss's."""
    before = {name: counts(-15, 50, 50, zero=100), "late": counts(-2, 100)}
    search = {name: counts(-3, 100), "late": counts(-2, 100)}
    largest = {name: 3.0, "late": -10.0}
    events = parts("before", before, largest, settled=4.0) + parts("search", search, largest)
    loss, own, late = 15 - LOSS_HEADROOM - 3, 15 - HEADROOM - 3 - 23, 15 - HEADROOM + 10
    small, large = Proposal(2.0**loss, {"late": 2.0 ** (late - loss)}), {"early": 2.0**own}
    assert propose(events) == (Proposal(2.0**23, large) if name else small)


def test_scales_stay_where_float32_holds_them():
    far = {"early": -300.0, "late": -140.0}
    proposal = propose(parts("before", STARVED, far) + parts("search", FED, far))
    assert proposal == Proposal(2.0**100, {"early": 2.0**100, "late": 2.0 ** (151 - 100)})


def test_what_the_proposal_costs():
    lossy = {"early": counts(-3, 100), "late": counts(-15, 30, 70)}
    after = parts("after", lossy, LARGEST)
    assert diagnose(UNDERFLOWING + after).regressed == {"late": pytest.approx(0.3)}
    # Not what the late layer loses with one scale already.
    assert diagnose(parts("before", lossy, LARGEST) + UNDERFLOWING[8:] + after).regressed == {}


def test_a_layer_that_was_never_finite_does_not_decide():
    held, largest = {"a": counts(0, 9), "b": counts(0, over=9)}, {"a": 0.0, "b": -math.inf}
    broken = parts("before", held, largest, settled=4.0)
    assert propose(broken) == Proposal(2.0**4, {})


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
