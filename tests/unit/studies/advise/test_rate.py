"""The verdict on the learning rate."""

import math

import msgspec
import pytest

from steadygrad.studies.advise.plan import averaged_end
from steadygrad.studies.advise.runs import judge_rate
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import make_header, point, scratch

LENGTH = 4096


def verdict(**slower):
    """Judges runs at half and twice the rate that need so many times the samples."""
    rates = {"half": 0.5, "twice": 2.0}
    runs = [
        scratch(8, 0, LENGTH, rate=rates[name], slower=factor) for name, factor in slower.items()
    ]
    events = [point(0, 1024), point(1, LENGTH), *runs]
    return judge_rate(make_header((1024, LENGTH)).plan, Results(events), LENGTH)


@pytest.mark.parametrize(
    ("half", "twice", "expected"),
    [
        (1.5, 0.6, "low"),
        (0.6, 1.5, "high"),
        (1.5, 1.5, "fits"),
        (1.0, 1.0, ""),
        (1.05, 0.95, "fits"),
        (0.8, 0.6, "low"),
        (0.6, 0.8, "high"),
    ],
)
def test_the_better_rate_by_more_than_a_tenth_of_the_samples(half, twice, expected):
    assert verdict(half=half, twice=twice).verdict == expected


def changed(place, by):
    """A verdict on twice the rate, whose run has one loss of its curve changed."""
    run = scratch(8, 0, LENGTH, rate=2.0, slower=0.6)
    curve = list(run.curve)
    curve[place] = (curve[place][0], curve[place][1] + by)
    run = msgspec.structs.replace(run, curve=tuple(curve), loss=curve[-1][1])
    events = [point(0, 1024), point(1, LENGTH), run]
    return judge_rate(make_header((1024, LENGTH)).plan, Results(events), LENGTH)


@pytest.mark.parametrize("place", [-5, -4, -3, -2, -1])
def test_a_better_rate_is_better_at_each_of_the_last_five_evaluations(place):
    found = changed(place, 0.2)
    # It would save more than a tenth of the samples all the same.
    assert found.overheads["2"] < -0.15
    assert found.verdict == "fits"
    assert changed(place, 0.0).verdict == changed(place, -0.2).verdict == "low"


def test_what_was_before_does_not_count():
    assert changed(-6, 1.0).verdict == "low"


@pytest.mark.parametrize(("slower", "expected"), [(0.93, "fits"), (0.88, "low")])
def test_a_better_rate_saves_more_than_a_tenth_of_the_samples(slower, expected):
    found = verdict(twice=slower)
    assert (-found.overheads["2"] / (1 + found.overheads["2"]) > 0.1) == (expected == "low")
    assert found.verdict == expected


def test_losses_and_overheads_are_kept():
    found = verdict(half=1.25, twice=0.8)
    assert list(found.losses) == ["0.5", "1", "2"]
    assert found.losses["2"] < found.losses["1"] < found.losses["0.5"]
    # The curve is a fit through ten losses.
    assert found.overheads["0.5"] == pytest.approx(0.25, abs=0.02)
    assert found.overheads["2"] == pytest.approx(-0.2, abs=0.02)


@pytest.mark.parametrize("slower", [0.3, 1.5])
def test_a_rate_that_diverges_is_not_better(slower):
    """A diverged run has one loss, infinite, or losses that were low until then."""
    lost = scratch(8, 0, LENGTH, rate=2.0, slower=slower, noise=math.inf)
    for run in (lost, msgspec.structs.replace(lost, curve=((LENGTH, math.inf),))):
        events = [point(0, 1024), point(1, LENGTH), run]
        found = judge_rate(make_header((1024, LENGTH)).plan, Results(events), LENGTH)
        assert found.verdict == "fits"
        assert math.isinf(found.losses["2"])


def test_a_decaying_rate_is_compared_with_a_run_of_the_same_length_that_decays():
    plan, length = make_header((1024, LENGTH)).plan, 1024
    # The main trajectory leaves the decay out.
    main = [point(0, 1024), point(1, LENGTH, losses=lambda s: 9.0)]
    twice = scratch(8, 0, length, rate=2.0, slower=0.6)
    for own, expected in ((scratch(8, 0, LENGTH), ""), (scratch(8, 0, length), "low")):
        found = judge_rate(plan, Results([*main, twice, own]), length, decays=True)
        assert (found.verdict, found.samples) == (expected, length * bool(expected))
    # Neither another length nor another seed of the other rate.
    longer = scratch(8, 0, LENGTH, rate=2.0, slower=0.6)
    for run in (longer, msgspec.structs.replace(twice, repeat=1)):
        journal = Results([*main, scratch(8, 0, length), run])
        assert judge_rate(plan, journal, length, decays=True).losses == {}


def test_one_rate_whose_losses_are_the_same_is_not_all_of_them():
    assert verdict(half=1.0, twice=0.6).verdict == "low"
    assert verdict(half=1.0, twice=1.0).why == "same"


def test_without_runs_there_is_no_verdict():
    assert verdict().verdict == ""


def test_a_validation_loss_that_rises_has_no_verdict():
    """A rate that trains less is ahead there, because the data have ended."""

    def rising(samples):
        return 1.0 + samples / 1e5

    ahead = scratch(8, 0, LENGTH, rate=0.5)
    curve = tuple((place, rising(place) - 0.004) for place, _ in ahead.curve)
    ahead = msgspec.structs.replace(ahead, curve=curve, loss=curve[-1][1])
    events = [point(0, 1024, losses=rising), point(1, LENGTH, losses=rising), ahead]
    found = judge_rate(make_header((1024, LENGTH)).plan, Results(events), LENGTH)
    assert (found.verdict, found.overheads, found.why) == ("", {}, "rising")
    assert found.losses["0.5"] < found.losses["1"]


@pytest.mark.parametrize(("loss", "why"), [(9.0, "same"), (0.0, "zero")])
def test_losses_that_do_not_depend_on_the_rate_give_no_verdict(loss, why):
    """An optimizer that leaves its rate aside, and a margin that every rate reaches."""

    def still(samples):
        return loss

    runs = [scratch(8, 0, LENGTH, rate=rate) for rate in (0.5, 2.0)]
    runs = [
        msgspec.structs.replace(
            run, curve=tuple((place, loss) for place, _ in run.curve), loss=loss
        )
        for run in runs
    ]
    events = [point(0, 1024, losses=still), point(1, LENGTH, losses=still), *runs]
    found = judge_rate(make_header((1024, LENGTH)).plan, Results(events), LENGTH)
    assert (found.verdict, found.overheads, found.why) == ("", {}, why)


def test_the_losses_are_those_that_are_compared():
    """A rate that is ahead until shortly before the end, and saves samples by the mean."""
    run = scratch(8, 0, LENGTH, rate=2.0, slower=0.6)
    own = point(1, LENGTH)
    end = averaged_end(own.curve)[-1][1] + 0.01
    run = msgspec.structs.replace(run, curve=(*run.curve[:-1], (run.samples, end)), loss=end)
    found = judge_rate(
        make_header((1024, LENGTH)).plan, Results([point(0, 1024), own, run]), LENGTH
    )
    assert run.loss > averaged_end(own.curve)[-1][1]
    assert found.overheads["2"] < 0
    assert found.losses["2"] < found.losses["1"]
    late = {"1": averaged_end(own.curve)[-5:], "2": run.curve[-5:]}
    for rate, curve in late.items():
        assert found.losses[rate] == pytest.approx(sum(loss for _, loss in curve) / 5)
