"""Words for what a summary says: its numbers, in the right template, and none that is not known."""

import math

import pytest
from msgspec.structs import replace

from steadygrad.studies.compare import words
from steadygrad.studies.compare.findings import find
from steadygrad.studies.compare.schema import Brackets, Edge, Flip, Ratio, Summary
from tests.unit.studies.compare.runs import noisy, planned, summary


@pytest.fixture(scope="module")
def found() -> Summary:
    """LANS and SGD against AdamW, at one batch size."""
    return summary(planned(seeds=5), noisy({}))


@pytest.fixture(scope="module")
def several() -> Summary:
    """The same, at three batch sizes."""
    return summary(planned(seeds=5, multiples=(1, 4, 16)), noisy({}))


def told(s: Summary, *first, **verdicts) -> Summary:
    """The summary with other verdicts, by optimizer or by optimizer and batch size; no edges.

    ``first`` are findings before these.
    """
    rows = []
    for row in s.verdicts:
        size = row.multiple * s.batch_size
        verdict = verdicts.get(f"{row.optimizer}_{size}", verdicts.get(row.optimizer))
        rows.append(replace(row, verdict=verdict or "cannot tell", lr=0.002))
    tuned = tuple(replace(row, interior=True) for row in s.tuned)
    flips = tuple(each for each in first if isinstance(each, Flip))
    s = replace(s, verdicts=tuple(rows), tuned=tuned, flips=())
    return replace(s, flips=flips, findings=(*first, *find(s)))


WORSE = {"lans": "worse", "sgd": "worse"}
EDGE = Edge(optimizer="sgd", multiple=1, hangs=True)


@pytest.mark.parametrize(
    ("first", "verdicts", "start", "parts"),
    [
        ((), {"lans": "better"}, "LANS (learning rate 0.002) is better", ["AdamW (0.001)", "loss"]),
        ((), {"lans": "worse"}, "Stay with AdamW at learning rate 0.001", ["no other optimizer"]),
        ((), WORSE, "Stay with AdamW at learning rate 0.001", ["it is better than LANS and SGD"]),
        ((EDGE,), WORSE, "SGD may be better than shown", ["so far, stay with AdamW at"]),
    ],
)
def test_the_answer_at_one_batch_size(found, first, verdicts, start, parts):
    s = told(found, *first, **verdicts)
    said = words.answer(s)
    assert said.startswith(start)
    assert all(part in said for part in (*parts, "after 128 rows"))
    # The answer has said what it hangs on.
    assert not [remark for remark in words.remarks(s) if "last one tried" in remark]
    cut = replace(s, status="budget")
    assert words.answer(cut) == f"Preliminary: {said.replace('Stay', 'stay')}"
    assert "--resume" in words.remarks(cut)[0]


def test_the_answer_names_the_batch_sizes(several):
    said = words.answer(told(several, lans_16="better", lans_64="better"))
    assert said.startswith("LANS (batch size 16 and 64) is better than AdamW")
    assert words.answer(told(several, **WORSE)).startswith("Stay with AdamW: it is better")


def test_an_answer_without_a_verdict_or_a_baseline(found):
    rows = tuple(replace(row, baseline_lost=2) for row in told(found, **WORSE).verdicts)
    lost = replace(found, verdicts=rows, findings=rows[-2:], flips=())
    assert words.answer(lost).startswith("AdamW diverged on 2 of 5 seeds, and no other optimizer")
    nothing = replace(found, findings=(), flips=(), verdicts=())
    assert words.answer(nothing).startswith("No optimizer can be judged")
    assert words.too_little(nothing)
    assert words.table(nothing) is words.too_little(found) is None


def test_a_flip_is_the_answer(several):
    known = {"multiple": 4, "short": "better", "long": "worse", "samples": (64, 128)}
    flips = [Flip(optimizer=name, **known) for name in ("lans", "sgd")]
    s = told(several, *flips, **WORSE)
    said = [words.answer(s), words.remarks(s)[0]]
    for name, text in zip(("LANS", "SGD"), said, strict=True):
        assert f"{name} is better than AdamW after 64 rows, and worse after 128 at batch" in text
    # What is better at both lengths is said as well.
    s = told(several, flips[0], lans="worse", sgd_4="better")
    assert words.answer(s) == said[0]
    assert words.remarks(s)[0].startswith("SGD (batch size 4) is better than AdamW")


def better(samples, time):
    """A verdict with a ratio of samples and of time, each with its interval."""
    return {"verdict": "better", "sample_ratio": Ratio(*samples), "time_ratio": Ratio(*time)}


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"needed": 23}, ["on 5 seeds", "about 23 ", "true difference is −0.02."]),
        ({}, ["not even 8,000 ", "true difference is −0.02."]),
        ({"rates_limit": True}, ["more seeds would not help"]),
        ({"lost": 4, "verdict": "worse"}, ["diverged on 4 of 5 seeds, AdamW on 0."]),
        ({"baseline_lost": 2}, None),
        ({"verdict": "worse"}, None),
        (
            better((1.1, 1.05, 4.0), (1.1, 0.3, 1.2)),
            ["perhaps time", "1.25 times as long", "1.10 (≤ 0.30 to 1.20) times."],
        ),
        (better((1.1, 1.05, 1.2), (1.1, 1.0, 1.2)), ["no time", "1.10 (1.00 to 1.20)"]),
        (better((1.5, 1.4, 1.6), (0.8, 0.7, 0.9)), ["rows and time", "0.80 (0.70 to 0.90)"]),
    ],
)
def test_a_verdict_in_words(found, fields, parts):
    plain = {"verdict": "cannot tell", "mean": -0.02, "needed": None, "rates_limit": False}
    said = words.said(replace(found.verdicts[-2], **{**plain, **fields}), found)
    assert said.startswith("LANS " if parts else "")
    assert bool(said) == bool(parts)
    assert all(part in said for part in parts or ())


def test_other_findings_in_words(several):
    edge = Edge(optimizer="sgd", multiple=4, hangs=False)
    assert "SGD at batch size 16" in words.said(edge, several)
    said = words.said(Brackets(sizes={"adamw": (4, 16), "lans": (64, None)}), several)
    assert "(20% more rows than at 4): AdamW 4 to 16 and LANS at least 64" in said


@pytest.mark.parametrize(
    ("fields", "cell"),
    [
        ({"mean": -0.02, "low": -0.031, "high": 0.009}, "−0.02 (−0.031 to +0.009)"),
        ({"mean": math.inf, "lost": 3}, "diverged on 3 of 5 seeds"),
        ({"mean": math.nan, "baseline_lost": 2}, "AdamW diverged on 2 of 5 seeds"),
    ],
)
def test_cells_of_a_table(found, fields, cell):
    row = replace(found.verdicts[-2], **fields)
    assert words.difference(row) == cell
    # A bound is said as one.
    row = replace(row, sample_ratio=Ratio(0.25, 0.25, 0.5), time_ratio=Ratio(5.0, 2.5, 5.0))
    assert words.ratios(row) == ("≤ 0.25 (≤ 0.25 to 0.50)", "≥ 5.00 (2.50 to ≥ 5.00)")
    assert words.ratios(replace(row, sample_ratio=None, time_ratio=None)) == ("–", "–")
