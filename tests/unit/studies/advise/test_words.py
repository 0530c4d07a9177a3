"""Words for what a summary says: its numbers, in the right template, and none that is not known."""

import math

import pytest
from msgspec.structs import replace

from steadygrad.studies.advise import schema, words
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import make_header, studied

STAGES = tuple(schema.Stage(from_samples=at, batch_size=b, lr=0.001) for at, b in ((0, 8), (9, 24)))
INF = math.inf


@pytest.fixture(scope="module")
def summary() -> schema.Summary:
    """Batch 16 of 8 passes, 24 fails, and a growing batch passes."""
    header = make_header()
    return summarize(header, Results(studied(header, 45.0)), "budget")


def run(size=12, **fields) -> schema.Checked:
    """A batch size within the tolerance, unless fields say another."""
    told = {"overhead": 0.13, "low": 0.05, "high": 0.24, "within": True, "beyond": False}
    fixed = {"stages": STAGES[:1], "warmup_samples": 256, "steps": 4096 // size, "seeds": 3}
    return schema.Checked(**{"batch_size": size, "loss": 2.0, **fixed, **told, **fields})


FAILED = {"overhead": 0.45, "low": 0.3, "high": 0.6, "within": False, "beyond": True}
UNCERTAIN = {"overhead": 0.2004, "low": 0.0, "high": INF, "within": False, "beyond": False}


def advised(summary, size, *checked, larger=None, **fields) -> schema.Summary:
    """The summary with one advice, and what was trained."""
    settings = {"batch_size": size, "lr": 0.00122, "samples": 4096}
    found = schema.Recommendation(**{**settings, **fields})
    findings = (found, *([schema.Larger(run=larger)] if larger else []))
    return replace(summary, recommendation=found, findings=findings, checked=checked, rates=())


@pytest.mark.parametrize(
    ("fields", "parts", "verdict"),
    [
        (FAILED, ["needs 45% more", "(95% confidence interval 30% to 60%)"], "not within 20%"),
        ({**FAILED, "low": INF, "loss": INF}, ["batch 12 diverged."], "diverged"),
        ({**FAILED, "low": INF, "overhead": INF}, ["needs more than 60% more"], "not within 20%"),
        ({**FAILED, "overhead": 0.0, "low": 0.0}, ["needs no more rows"], "not within 20%"),
        # No rounding hides on which side of the tolerance it is.
        (UNCERTAIN, ["20.04%", "0% to more than 60%", "not certain"], "uncertain"),
    ],
)
def test_stay(summary, fields, parts, verdict):
    found = advised(summary, 8, run(**fields), larger=run(**fields))
    said = words.answer(found)
    assert all(part in said for part in ["stay at batch 8 with learning rate 0.00122", *parts])
    assert ("not certain" in said) == (fields is UNCERTAIN)
    # It is said once.
    assert words.remarks(found) == ()
    assert [row[-1] for row in words.table(found).rows[:2]] == ["reference, advised", verdict]


def test_train(summary):
    above = run(32, overhead=0.1)
    found = advised(summary, 12, run(), run(16, **FAILED), above, larger=run(16, **FAILED))
    said = words.answer(found)
    assert "train at batch 12 with learning rate 0.00122" in said
    # 1.13 times a third fewer steps.
    assert "needs 13% more" in said
    assert "25% fewer optimizer steps" in said
    # The table has the larger one.
    assert words.remarks(found) == ()
    assert [row[-1] for row in words.table(found).rows] == [
        "reference",
        "within 20%, advised",
        "not within 20%",
        "within 20%, above one beyond it",
        "within 20%",
    ]
    assert [row[0] for row in words.table(found).rows][-2:] == ["32", "growing"]


@pytest.mark.parametrize(("status", "part"), [("budget", "about 2 more minutes"), ("complete", "")])
def test_what_is_not_known_is_said_with_what_would_tell(summary, status, part):
    unknown = run(**UNCERTAIN)
    fields = {"larger": unknown, "why": "undecided", "minutes": 1.2, "lr": None}
    said = words.answer(replace(advised(summary, None, unknown, **fields), status=status))
    assert part in said
    assert ("--resume" in said) == bool(part)
    assert said.endswith("stay at batch 8.")


@pytest.mark.parametrize("why", ["unmeasured", "flat"])
def test_nothing(summary, why):
    found = replace(advised(summary, None), recommendation=schema.Recommendation(why=why))
    assert ("Task.lr" in words.answer(found)) == (why == "flat")
    assert words.table(found) is None
    assert (words.too_little(found) is not None) == (why == "unmeasured")


def verdict(what, size=8) -> schema.RateVerdict:
    known = {"seeds": 4, "mean": -0.02, "low": -0.03, "high": -0.01}
    others = tuple(schema.OtherRate(lr=lr, **known) for lr in (0.0005, 0.002))
    return schema.RateVerdict(verdict=what, batch_size=size, lr=0.001, samples=4096, others=others)


def test_an_answer_that_hangs_on_a_condition_opens_with_it(summary):
    found = replace(advised(summary, 12, run()), rates=(verdict("low"),))
    said = words.answer(found)
    assert said.startswith("The learning rate 0.001 is too low at batch 8, ")
    assert said.endswith("until then train at batch 12 with learning rate 0.00122.")
    cut = replace(found, status="interrupted")
    assert words.answer(cut).startswith("Preliminary: the learning rate 0.001")
    # A rate that is wrong at the recommended batch alone changes no answer.
    other = replace(found, rates=(verdict("fits"), verdict("high", 12)))
    assert words.answer(other).startswith("For 4,096 rows, train at batch 12 ")


def schedule(**fields) -> schema.Schedule:
    return schema.Schedule(stages=STAGES, steps=256, warmup_samples=0, megatron="", **fields)


PASSED = run(24, overhead=0.1, low=0.05)


@pytest.mark.parametrize(
    ("finding", "parts"),
    [
        (schema.Unfinished(), ["interrupted", "--resume"]),
        (verdict("low"), ["0.002 does better than 0.001", "by 0.02", "0.01 to 0.03"]),
        (verdict("high"), ["0.0005 does better than 0.001"]),
        (verdict(""), ["0.001 fits batch 8 over 4,096 rows is not known after 4 seeds"]),
        (verdict("fits"), None),
        (schema.Flat(points=(64, 256), epochs=3.2), ["64 and 256 rows (data seen 3 times"]),
        (schedule(advised=True, check=PASSED), ["8 from 0 and 24 from 9 rows", "10%", "17% fewer"]),
        (schedule(advised=False, check=PASSED), None),
        (schedule(advised=False, check=None), None),
    ],
)
def test_remarks(summary, finding, parts):
    found = replace(advised(summary, 12, run()), status="interrupted")
    found = replace(found, findings=(found.recommendation, finding))
    said = words.remarks(found)
    assert len(said) == (parts is not None)
    assert all(part in said[0] for part in parts or ())


@pytest.mark.parametrize(
    ("going_on", "critical", "parts"),
    [
        ({}, {}, ["is 43 (", "14 to 51"]),
        ({"known": False}, {"high": INF}, ["not known well enough", "14 or more"]),
        ({"diverged": 64}, {}, ["batch 64 diverged elsewhere"]),
        ({}, {"beyond": INF}, ["the largest that was tried", "at most 20% more"]),
    ],
)
def test_continuing(summary, going_on, critical, parts):
    going_on = replace(summary.going_on, batch_size=32, lr=0.002, **going_on)
    fields = {"value": 43.2, "low": 14.0, "high": 51.0, "beyond": 48.0, **critical}
    points = [point for point in summary.points if point.samples == going_on.from_samples]
    points = tuple(replace(each, critical=replace(each.critical, **fields)) for each in points)
    found = replace(summary, findings=(summary.recommendation, going_on), points=points)
    (said,) = words.remarks(found)
    assert all(part in said for part in ["batch 32 with learning rate 0.002", *parts])
