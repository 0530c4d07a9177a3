"""The verdict on the learning rate."""

import math

import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.plan import averaged_end
from steadygrad.studies.advise.runs import judge_rate
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import law, make_header, point, relabelled, scratch

LENGTH = 4096
PLAN = make_header((1024, LENGTH)).plan


def judged(*runs, losses=law):
    """The verdict on runs beside a main trajectory."""
    main = [point(0, 1024, losses=losses), point(1, LENGTH, losses=losses)]
    return judge_rate(PLAN, Results([*main, *runs]), LENGTH)


def run(rate, slower=1.0, samples=LENGTH, **more):
    return scratch(8, 0, samples, rate=rate, slower=slower, **more)


@pytest.mark.parametrize(
    ("half", "twice", "expected"),
    [
        (1.5, 0.6, "low"),
        (0.6, 1.5, "high"),
        (1.5, 1.5, "fits"),
        (1.0, 1.0, ""),
        (1.0, 0.6, "low"),  # one rate whose losses are the same is not all of them
        (1.05, 0.95, "fits"),
        (0.8, 0.6, "low"),
        (0.6, 0.8, "high"),
    ],
)
def test_the_better_rate_by_more_than_a_tenth_of_the_samples(half, twice, expected):
    assert judged(run(0.5, half), run(2.0, twice)).verdict == expected


def changed(place, by):
    """A verdict on twice the rate, whose run has one loss of its curve changed."""
    twice = run(2.0, 0.6)
    curve = list(twice.curve)
    curve[place] = (curve[place][0], curve[place][1] + by)
    return judged(replace(twice, curve=tuple(curve), loss=curve[-1][1]))


@pytest.mark.parametrize("place", [-5, -4, -3, -2, -1])
def test_a_better_rate_is_better_at_each_of_the_last_five_evaluations(place):
    found = changed(place, 0.2)
    # It would save more than a tenth of the samples all the same.
    assert found.overheads["2"] < -0.15
    assert found.verdict == "fits"
    assert changed(place, 0.0).verdict == changed(place, -0.2).verdict == "low"
    # What was before does not count.
    assert changed(-6, 1.0).verdict == "low"


@pytest.mark.parametrize(("slower", "expected"), [(0.93, "fits"), (0.88, "low")])
def test_a_better_rate_saves_more_than_a_tenth_of_the_samples(slower, expected):
    found = judged(run(2.0, slower))
    assert (-found.overheads["2"] / (1 + found.overheads["2"]) > 0.1) == (expected == "low")
    assert found.verdict == expected


def test_losses_and_overheads_are_kept():
    found = judged(run(0.5, 1.25), run(2.0, 0.8))
    assert list(found.losses) == ["0.5", "1", "2"]
    assert found.losses["2"] < found.losses["1"] < found.losses["0.5"]
    # The curve is a fit through ten losses.
    assert found.overheads["0.5"] == pytest.approx(0.25, abs=0.02)
    assert found.overheads["2"] == pytest.approx(-0.2, abs=0.02)


@pytest.mark.parametrize("slower", [0.3, 1.5])
def test_a_rate_that_diverges_is_not_better(slower):
    """A diverged run has one loss, infinite, or losses that were low until then."""
    lost = run(2.0, slower, noise=math.inf)
    for twice in (lost, replace(lost, curve=((LENGTH, math.inf),))):
        found = judged(twice)
        assert found.verdict == "fits"
        assert math.isinf(found.losses["2"])


def test_a_decaying_rate_is_compared_with_a_run_of_the_same_length_that_decays():
    # The main trajectory leaves the decay out.
    main = [point(0, 1024), point(1, LENGTH, losses=lambda s: 9.0)]
    twice = run(2.0, 0.6, samples=1024)

    def decaying(*runs):
        return judge_rate(PLAN, Results([*main, *runs]), 1024, decays=True)

    for own, expected in ((run(1.0), ""), (run(1.0, samples=1024), "low")):
        found = decaying(twice, own)
        assert (found.verdict, found.samples) == (expected, 1024 * bool(expected))
    # Neither another length nor another seed of the other rate.
    for other in (run(2.0, 0.6), replace(twice, repeat=1)):
        assert decaying(run(1.0, samples=1024), other).losses == {}


def test_without_runs_there_is_no_verdict():
    assert judged().verdict == ""


def test_a_validation_loss_that_rises_has_no_verdict():
    """A rate that trains less is ahead there, because the data have ended."""

    def rising(samples):
        return 1.0 + samples / 1e5

    found = judged(relabelled(run(0.5), lambda s: rising(s) - 0.004), losses=rising)
    assert (found.verdict, found.overheads, found.why) == ("", {}, "rising")
    assert found.losses["0.5"] < found.losses["1"]


@pytest.mark.parametrize(("loss", "why"), [(9.0, "same"), (0.0, "zero")])
def test_losses_that_do_not_depend_on_the_rate_give_no_verdict(loss, why):
    """An optimizer that leaves its rate aside, and a margin that every rate reaches."""

    def still(samples):
        return loss

    found = judged(*(relabelled(run(rate), still) for rate in (0.5, 2.0)), losses=still)
    assert (found.verdict, found.overheads, found.why) == ("", {}, why)


def test_the_losses_are_those_that_are_compared():
    """A rate that is ahead until shortly before the end, and saves samples by the mean."""
    own, twice = averaged_end(point(1, LENGTH).curve), run(2.0, 0.6)
    end = own[-1][1] + 0.01
    twice = replace(twice, curve=(*twice.curve[:-1], (twice.samples, end)), loss=end)
    found = judged(twice)
    assert found.overheads["2"] < 0
    assert found.losses["2"] < found.losses["1"]
    for rate, curve in {"1": own, "2": twice.curve}.items():
        assert found.losses[rate] == pytest.approx(sum(loss for _, loss in curve[-5:]) / 5)
