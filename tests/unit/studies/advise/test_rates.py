"""The verdict on the learning rate."""

import math

import pytest

from steadygrad.studies.advise.rates import judge_rate
from steadygrad.studies.journal import Journal
from tests.unit.studies.advise.events import make_header, point, scratch

LENGTH = 4096


def verdict(variance=1e-6, **slower):
    """Judges runs at half and twice the rate that need so many times the samples."""
    rates = {"half": 0.5, "twice": 2.0}
    runs = [
        scratch(8, 0, LENGTH, rate=rates[name], slower=factor) for name, factor in slower.items()
    ]
    events = [point(0, 1024), point(1, LENGTH), *runs]
    return judge_rate(make_header((1024, LENGTH)).plan, Journal(events=events), variance)


@pytest.mark.parametrize(
    ("half", "twice", "expected"),
    [
        (1.5, 0.6, "low"),
        (0.6, 1.5, "high"),
        (1.5, 1.5, "fits"),
        (1.0, 1.0, "fits"),
        (1.05, 0.95, "fits"),
        (0.8, 0.6, "low"),
        (0.6, 0.8, "high"),
    ],
)
def test_the_better_rate_by_more_than_a_tenth_of_the_samples(half, twice, expected):
    assert verdict(half=half, twice=twice).verdict == expected


def test_a_difference_within_the_noise_is_none():
    assert verdict(variance=1e-6, half=1.5, twice=0.8).verdict == "low"
    # Its loss is lower by 0.054: less than two deviations of a difference of two runs.
    assert verdict(variance=0.03**2, half=1.5, twice=0.8).verdict == "fits"


def test_losses_and_overheads_are_kept():
    found = verdict(half=1.25, twice=0.8)
    assert list(found.losses) == [0.5, 1.0, 2.0]
    assert found.losses[2.0] < found.losses[1.0] < found.losses[0.5]
    # The curve is a fit through ten losses.
    assert found.overheads[0.5] == pytest.approx(0.25, abs=0.02)
    assert found.overheads[2.0] == pytest.approx(-0.2, abs=0.02)
    assert found.as_dict()["losses"].keys() == {"0.5", "1", "2"}


def test_a_rate_that_diverges_is_not_better():
    runs = [scratch(8, 0, LENGTH, rate=2.0, noise=math.inf)]
    events = [point(0, 1024), point(1, LENGTH), *runs]
    found = judge_rate(make_header((1024, LENGTH)).plan, Journal(events=events), 1e-6)
    assert found.verdict == "fits"
    assert math.isinf(found.losses[2.0])


def test_without_runs_there_is_no_verdict():
    assert verdict().verdict == ""
