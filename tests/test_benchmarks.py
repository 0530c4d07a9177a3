"""`make bench` runs every benchmark there is."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from steadygrad.studies.strict_json import dumps
from tests.unit.studies.compare.runs import planned
from tests.unit.studies.compare.test_summary import by_batch, summary

ROOT = Path(__file__).parents[1]


def test_all_that_can_be_saved_are_in_the_makefile():
    scripts = {p.name for p in (ROOT / "benchmarks").glob("*.py") if '"--save"' in p.read_text()}
    run = set(re.findall(r"/python benchmarks/(\w+\.py)", (ROOT / "Makefile").read_text()))
    assert len(scripts) > 5
    assert run == scripts


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (64, "recommends **64** (trained),\n4 times the sweep's, NOT within a factor of two."),
        (32, "2 times the sweep's, within a factor of two.\n- In words."),
        (None, "recommends no batch size."),
    ],
)
def test_advice_is_held_against_the_largest_batch_that_is_good(monkeypatch, size, said):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    report = import_module("advise_vs_sweep").report
    plan = planned(optimizers=("adamw", "task"), multiples=(1, 4, 16), horizons=(256, 512, 1024))
    extra = {"adamw": {}, "task": {4: 0.05, 16: 0.8}}
    swept = json.loads(dumps(summary(plan, by_batch(extra))))
    advice = {
        "recommendation": {"batch_size": size, "basis": "trained"},
        "answer": "In words.",
        "remarks": [],
    }
    text = report(advice, swept, 4, "`advise`")
    assert "Largest batch with at most 20% more samples: **16**." in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["| 4", "| 16", "| 64"]
    # The curve's exponent is 0, an end of what the interval allows: 5 % is shown as 4 to 6 %.
    assert float(rows[1][3].rstrip("%")) == pytest.approx(5, abs=1.5)
    assert said in text
    assert "cut short" in report(advice, {**swept, "critical": []}, 4, "`advise`")
