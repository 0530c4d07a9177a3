"""Words for what a summary says: its numbers, in the right template, and none that is not known."""

import math
import re

import pytest
from msgspec.structs import replace

from steadygrad.studies.advise import schema, words
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.schema import Summary
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import make_header, studied
from tests.unit.studies.advise.random_records import random_record

STAGES = tuple(schema.Stage(from_samples=at, batch_size=b, lr=0.001) for at, b in ((0, 8), (9, 24)))
CI = "95% confidence interval"


@pytest.fixture(scope="module")
def summary() -> Summary:
    """Batch 16 of 8 passes, 24 fails."""
    header = make_header()
    return summarize(header, Results(studied(header, 45.0)), "budget")


def run(size=12, **fields) -> schema.Checked:
    told = {"overhead": 0.13, "low": 0.05, "high": 0.24, "within": True, "beyond": False}
    fixed = {"stages": STAGES[:1], "warmup_samples": 256, "steps": 4096 // size, "seeds": 3}
    return schema.Checked(**{"batch_size": size, "loss": 2.0, **fixed, **told, **fields})


def failed(size=12, **fields) -> schema.Checked:
    told = {"overhead": 0.45, "low": 0.3, "high": 0.6, "within": False, "beyond": True}
    return run(size, **{**told, **fields})


def advised(summary, size, *checked, larger=None, **fields) -> Summary:
    """The summary with one advice, and what was trained."""
    settings = {"batch_size": size, "lr": 0.00122, "samples": 4096}
    found = schema.Recommendation(**{**settings, **fields})
    findings = (found, *([schema.Larger(run=larger)] if larger else []))
    return replace(summary, recommendation=found, findings=findings, checked=checked, rates=())


UNCERTAIN = {"overhead": 0.2004, "low": 0.0, "high": math.inf, "within": False, "beyond": False}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (failed(), f"needs 45% more rows than batch 8 ({CI} 30% to 60%)"),
        (failed(low=math.inf, overhead=math.inf, high=math.inf, loss=math.inf), "diverged"),
        (failed(low=math.inf, overhead=math.inf), "needs more than 60% more rows than batch 8"),
        (
            failed(overhead=0.0, low=0.0, high=0.1),
            f"needs no more rows than batch 8 ({CI} 0% to 10%)",
        ),
        # No rounding hides on which side of the tolerance it is.
        (
            failed(**UNCERTAIN),
            (
                f"needs 20.04% more rows than batch 8 ({CI} 0% to more than 60%), so it is not "
                "certain whether it stays within 20%"
            ),
        ),
    ],
)  # fmt: skip
def test_stay(summary, run, expected):
    found = advised(summary, 8, run, larger=run)
    stay = "For 4,096 rows, stay at batch 8 with learning rate 0.00122"
    assert words.answer(found) == f"{stay}: batch 12 {expected}."
    # It is said once.
    assert words.remarks(found) == ()


def test_train(summary):
    found = advised(summary, 12, run(), failed(16), larger=failed(16))
    needs = f"it needs 13% more rows than batch 8 ({CI} 5% to 24%) and 25% fewer optimizer steps"
    said = f"For 4,096 rows, train at batch 12 with learning rate 0.00122: {needs} for the same "
    assert words.answer(found) == f"{said}loss."
    # The table has the larger one.
    assert words.remarks(found) == ()
    assert [row[-1] for row in words.table(found).rows[:3]] == [
        "reference",
        "within 20%, advised",
        "not within 20%",
    ]


@pytest.mark.parametrize(
    ("status", "then"),
    [
        ("budget", "--resume for about 2 more minutes would tell; till then stay at batch 8."),
        ("complete", "the study's seeds are used up, so stay at batch 8."),
    ],
)
def test_what_is_not_known_is_said_with_what_would_tell(summary, status, then):
    unknown = failed(**UNCERTAIN)
    fields = {"larger": unknown, "why": "undecided", "minutes": 1.2, "lr": None}
    found = replace(advised(summary, None, unknown, **fields), status=status)
    assert words.answer(found).startswith("For 4,096 rows it is not known whether a ")
    assert words.answer(found).endswith(then)
    assert words.table(found).rows[1][-1] == "uncertain"


@pytest.mark.parametrize("why", ["unmeasured", "flat"])
def test_nothing(summary, why):
    found = replace(advised(summary, None), recommendation=schema.Recommendation(why=why))
    assert re.search(r"Nothing can be said|No batch size can be advised", words.answer(found))
    assert words.table(found) is None
    assert (words.too_little(found) is not None) == (why == "unmeasured")


def verdict(what, size=8) -> schema.RateVerdict:
    others = tuple(
        schema.OtherRate(lr=lr, seeds=4, mean=-0.02, low=-0.03, high=-0.01)
        for lr in (0.0005, 0.002)
    )
    return schema.RateVerdict(verdict=what, batch_size=size, lr=0.001, samples=4096, others=others)


def test_an_answer_that_hangs_on_a_condition_opens_with_it(summary):
    tune = "he learning rate 0.001 is too low at batch 8, so tune it first; until then"
    for found, then in (
        (advised(summary, 12, run()), "train at batch 12 with learning rate 0.00122"),
        (advised(summary, 8, failed(), larger=failed()), "stay at batch 8"),
        (advised(summary, None, why="flat"), "no batch size can be advised"),
    ):
        assert words.answer(replace(found, rates=(verdict("low"),))) == f"T{tune} {then}."
    cut = replace(advised(summary, 12, run()), rates=(verdict("low"),), status="interrupted")
    assert words.answer(cut).startswith(f"Preliminary: t{tune} train at")
    # A rate that is wrong at the recommended batch alone changes no answer.
    other = replace(advised(summary, 12, run()), rates=(verdict("fits"), verdict("high", 12)))
    assert words.answer(other).startswith("For 4,096 rows, train at batch 12 ")


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (schema.Unfinished(), ["was interrupted", "--resume"]),
        (verdict("low"), ["Learning rate 0.002 does better than 0.001", "0.02", "0.01 to 0.03"]),
        (verdict("high"), ["Learning rate 0.0005 does better than 0.001"]),
        (verdict(""), ["0.001 fits batch 8 over 4,096 rows is not known after 4 seeds"]),
        (verdict("fits"), None),
        (
            schema.Flat(points=(64, 256), epochs=3.2),
            ["after 64 and 256 rows (data seen 3 times by then)", "three standard errors"],
        ),
        (
            schema.Schedule(
                stages=STAGES, steps=256, warmup_samples=0, advised=True,
                check=run(24, overhead=0.1, low=0.05), megatron="",
            ),
            [
                "8 from 0 and 24 from 9 rows on, needs 10% more rows",
                "17% fewer optimizer steps than batch 12",
            ],
        ),
        (
            schema.Schedule(
                stages=STAGES, steps=256, warmup_samples=0, advised=False, check=None, megatron="",
            ),
            None,
        ),
    ],
)  # fmt: skip
def test_remarks(summary, finding, expected):
    found = replace(advised(summary, 12, run()), status="interrupted")
    found = replace(found, findings=(found.recommendation, finding))
    said = words.remarks(found)
    assert len(said) == (expected is not None)
    assert all(part in said[0] for part in expected or ())


def test_continuing(summary):
    def said(going_on=None, critical=None):
        going_on = replace(summary.going_on, batch_size=32, lr=0.002, **(going_on or {}))
        fields = {"value": 43.2, "low": 14.0, "high": 51.0, "beyond": 48.0, **(critical or {})}
        points = tuple(
            replace(point, critical=point.critical and replace(point.critical, **fields))
            for point in summary.points
        )
        findings = (summary.recommendation, going_on)
        (text,) = words.remarks(replace(summary, findings=findings, points=points))
        return text.partition(" can continue at batch 32 with learning rate 0.002")[2]

    assert said() == f": the critical batch size there is 43 ({CI} 14 to 51)."
    unknown = said({"known": False}, {"high": math.inf})
    assert "not known well enough" in unknown
    assert "14 or more" in unknown
    assert "batch 64 diverged elsewhere" in said({"diverged": 64})
    assert ", the largest that was tried" in said(None, {"beyond": math.inf})


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_one_sentence_one_table_three_remarks(first):
    for seed in range(first, first + 50):
        _, _, summary = random_record(seed)
        size, tune = summary.recommendation.batch_size, words.tune_first(summary)
        assert len(summary.remarks) <= 3
        said = "\n".join((summary.answer, *summary.remarks))
        assert not re.search(r"from scratch|resolved|\bnan\b|\binf\b|None", said)
        assert summary.answer.count(". ") == 0
        rows = summary.table.rows if summary.table else []
        advised = [row[0] for row in rows if row[-1].split(", ")[-1] == "advised"]
        if rows:
            assert advised == ([f"{size:,}"] if size else [])
        # Command and doubt do not stand side by side.
        assert ("so tune it first; until then" in summary.answer) == bool(tune)
        assert summary.answer.startswith("Preliminary") == (
            summary.status in ("interrupted", "failed") and size is not None
        )


def test_the_whole_study_in_words(summary):
    """A growing batch that passed has a row and a remark."""
    assert [row[0] for row in summary.table.rows] == ["8", "16", "24", "32", "growing"]
    assert any(remark.startswith("A growing batch, ") for remark in summary.remarks)
