"""`make bench` runs every benchmark there is."""

import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


def test_all_that_can_be_saved_are_in_the_makefile():
    scripts = {p.name for p in (ROOT / "benchmarks").glob("*.py") if '"--save"' in p.read_text()}
    run = set(re.findall(r"/python benchmarks/(\w+\.py).* --save", (ROOT / "Makefile").read_text()))
    assert len(scripts) > 5
    assert run == scripts


@pytest.fixture
def referee(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("advise_referee")


# Overheads and errors of batch sizes. 16 is free, 32 costs 15 % and 64 too much; 24 is not told
# from 30 %.
SIZES = {8: (0.0, 0.0), 16: (0.02, 0.01), 24: (0.1, 0.1), 32: (0.15, 0.02), 64: (0.6, 0.05)}


@pytest.mark.parametrize(
    ("size", "bold", "timid", "steps", "samples"),
    [
        (32, False, False, 0.0, 0.0),
        (24, False, False, (1.1 / 3) / (1.15 / 4) - 1, 0.0),
        (16, False, True, (1.02 / 2) / (1.15 / 4) - 1, 0.0),
        (64, True, False, 0.0, 0.4 / 1.2),
        (None, False, False, 1 / (1.15 / 4) - 1, 0.0),
    ],
)
def test_the_referee_tells_a_bold_a_timid_and_a_right_study_apart(
    referee, size, bold, timid, steps, samples
):
    truth = {batch: referee.Truth(*row) for batch, row in SIZES.items()}
    found = referee.judge(size, truth, 0.2)
    assert (found["bold"], found["timid"], found["known"]) == (bold, timid, size is not None)
    assert found["best"] == 32
    assert found["steps"] == pytest.approx(steps)
    assert found["samples"] == pytest.approx(samples)
    assert found["regret"] == pytest.approx(steps + samples)


def test_the_referee_allows_two_standard_errors_and_no_more(referee):
    row = {"low": 0.2, "high": float("inf")}
    held = [
        referee.is_covered(row, referee.Truth(0.15, error), (-0.3, 3.0), referee.ERRORS)
        for error in (0.02, 0.03)
    ]
    assert held == [False, True]


def test_the_referee_finds_an_overhead_that_is_known(referee):
    # The loss is one over the samples; the other batch size is where 800 samples lead, noise
    # that it shares with the smallest batch included.
    lengths = np.array([250.0, 500, 800, 1000, 1300])
    noise = np.random.default_rng(0).normal(size=(12, 1))
    found = referee.overhead_of(lengths, 1 / lengths + noise, 1 / 800 + noise[:, 0], 1000)
    assert found.overhead == pytest.approx(0.25)
    assert found.error == pytest.approx(0, abs=1e-9)
    ends = np.where(np.arange(12) == 3, np.inf, 1 / 800)
    assert referee.overhead_of(lengths, 1 / lengths + noise, ends, 1000).overhead == 3
