"""One example of each template of words, and the run of the pages, word by word."""

import re

import pytest
from msgspec.structs import replace

from steadygrad.studies.advise import schema, words
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.schema import Summary
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import make_header, measured, studied
from tests.unit.studies.advise.random_records import random_record

STAGES = tuple(schema.Stage(from_samples=at, batch_size=b, lr=0.001) for at, b in ((0, 8), (9, 24)))


@pytest.fixture(scope="module")
def summary() -> Summary:
    """Branches that predict, and nothing trained."""
    header = make_header(candidates=0, seeds=0)
    return summarize(header, Results(measured(header, (1e3, 1e4))), "complete")


def run(size=12, **fields) -> schema.Checked:
    told = {"overhead": 0.13, "low": 0.05, "high": 0.28, "upper": 0.2, "within": True, "loss": 2.0}
    steps = 4096 // size
    return schema.Checked(
        **{"batch_size": size, "stages": STAGES[:1], "warmup_samples": 1024, "steps": steps}
        | {"seeds": 3} | told | fields
    )  # fmt: skip


def failed(size=12, **fields) -> schema.Checked:
    return run(size, **{"overhead": 0.45, "low": 0.3, "high": 0.6, "within": False, **fields})


def with_runs(summary, *checked, advised, **larger) -> Summary:
    """The summary with runs that were checked."""
    basis = {"batch_size": advised, "lr": 0.00122, "warmup_samples": 0, "basis": "trained"}
    found = replace(summary.recommendation, **basis)
    fields = {"run": None, "gap": False, "diverged": None, **larger}
    findings = (found, schema.Larger(**fields))
    return replace(summary, recommendation=found, findings=findings, checked=checked)


CI = "95% confidence interval"


@pytest.mark.parametrize(
    ("checked", "expected"),
    [
        (failed(), f"batch 12 needs 45% more rows than batch 8 ({CI} 30% to 60%)."),
        (failed(loss=float("inf")), "batch 12 diverged."),
        (failed(overhead=3.0, high=3.0), "batch 12 needs at least 300% more rows than batch 8."),
        # What is a bound is said as one, and no rounding hides on which side it is.
        (
            failed(overhead=0.2004, low=-1 / 3, high=3.0),
            (
                "whether batch 12 stays within 20% is not certain, for it needs 20.04% more rows "
                f"than batch 8 ({CI} below −33% to 300% or more)."
            ),
        ),
    ],
)
def test_stay(summary, checked, expected):
    found = with_runs(summary, checked, advised=8, run=checked)
    assert words.answer(found) == f"Stay at batch 8: {expected}"


def test_train(summary):
    found = with_runs(summary, run(), failed(16), advised=12, run=failed(16))
    needs = f"it needs 13% more rows than batch 8 ({CI} 5% to 28%) and 25% fewer optimizer steps"
    said = f"Train at batch 12 with learning rate 0.00122: {needs} for the same loss."
    assert words.answer(found) == said
    assert words.remarks(found) == (
        f"Batch 16 needs 45% more rows than batch 8 ({CI} 30% to 60%).",
    )


def test_predicted_and_own(summary):
    size = summary.recommendation.batch_size
    assert words.answer(summary) == (
        f"Batch {size} with learning rate {summary.recommendation.lr:.3g} should need at most 20% "
        "more rows than batch 8: predicted, not trained."
    )
    own = replace(summary.recommendation, batch_size=8, basis="own", warmup_samples=0)
    assert words.answer(replace(summary, recommendation=own)) == (
        "Stay at batch 8: no larger batch was shown to need at most 20% more rows."
    )


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ("unmeasured", "Nothing can be said yet: no point of training was measured."),
        (
            "runs",
            (
                "No batch size can be advised: the validation loss of batch 8 did not fall "
                "significantly over the second half of the run up to any point; try a lower "
                "Task.lr, more data, or another --budget."
            ),
        ),
        (
            "flat",
            (
                "No batch size can be advised: the validation loss of batch 8 does not fall along "
                "its branches; try another Task.lr, more data, or a longer --budget."
            ),
        ),
    ],
)
def test_nothing(summary, why, expected):
    found = replace(summary, recommendation=schema.Recommendation(why=why), status="budget")
    assert words.answer(found) == expected
    assert words.table(found) is None


def test_an_answer_that_hangs_on_a_condition_opens_with_it(summary):
    rate = replace(summary.rate, verdict="low", first=True)
    tune = "he learning rate 0.001 looks too low, so tune it first; until then"
    for found, then in (
        (with_runs(summary, run(), advised=12), "train at batch 12 with learning rate 0.00122"),
        (with_runs(summary, failed(), advised=8, run=failed()), "stay at batch 8"),
        (
            replace(summary, recommendation=schema.Recommendation(why="flat")),
            "no batch size can be advised",
        ),
    ):
        assert words.answer(replace(found, rate=rate)) == f"T{tune} {then}."
    cut = replace(with_runs(summary, run(), advised=12), rate=rate, status="interrupted")
    assert words.answer(cut).startswith(f"Preliminary: t{tune} train at")


LOSSES = {"0.5": 2.3, "1": 2.2, "2": 2.1}


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (
            schema.Unfinished(measured=1, planned=2),
            ("The study ran out of its budget before all trainings were done (1 of 2 points of "
            "training measured); --resume continues it."),
        ),
        (
            schema.RateVerdict(verdict="low", samples=4096, losses=LOSSES, first=True),
            ("Learning rate 0.002 does better: validation loss 2.1 against 2.2 at 0.001, both "
            "means over the last 40% of a run of 4,096 rows. Every batch size here was measured at "
            "0.001, so take it as an upper bound."),
        ),
        (
            schema.RateVerdict(verdict="high", samples=9000, losses=LOSSES, elsewhere=True),
            ("The learning rate 0.001 looks too high for a run of 9,000 rows, which says nothing "
            "of one of 4,096 rows."),
        ),
        (
            schema.RateVerdict(why="same", samples=4096, losses=LOSSES),
            ("No verdict on the learning rate 0.001: over the last 40% of a run of 4,096 rows, the "
            "validation losses at 0.0005 and 0.002 are the same; check that Task.make_optimizer "
            "uses its learning rate."),
        ),
        (schema.RateVerdict(verdict="fits", samples=4096, losses=LOSSES), ""),
        (
            schema.Larger(run=None, gap=False, diverged=64),
            "Batch 64 diverged elsewhere in this study, which bounds the advice.",
        ),
        (
            schema.Larger(run=failed(32), gap=True, diverged=None),
            (f"Batch 32 needs 45% more rows than batch 8 ({CI} 30% to 60%). No size between 8 and "
            "32 was tried."),
        ),
        (
            schema.Unplanned(),
            ("The budget was too short for a run from the initial weights, and --resume adds none: "
            "start a new study with a longer --budget."),
        ),
        (
            schema.Flat(points=(64, 256), epochs=3.2, how="flat"),
            ("No batch size can be judged after 64 and 256 rows (data seen 3 times by then): along "
            "the branches there, the validation loss of batch 8 does not fall."),
        ),
        (
            schema.Schedule(
                stages=STAGES, steps=32, warmup_samples=0, basis="trained", advised=True,
                check=run(24), megatron="",
            ),
            ("A growing batch, 8 from 0 and 24 from 9 rows on, needs 13% more rows than batch 8 "
            f"({CI} 5% to 28%) and 44% fewer optimizer steps than batch 64, for the same loss."),
        ),
    ],
)  # fmt: skip
def test_remarks(summary, finding, expected):
    recommendation = replace(summary.recommendation, batch_size=64)
    found = replace(summary, recommendation=recommendation, status="budget")
    said = words.remarks(replace(found, findings=(recommendation, finding)))
    assert said == ((expected,) if expected else ())


def test_continuing(summary):
    def said(going_on=None, critical=None):
        going_on = replace(summary.going_on, batch_size=32, lr=0.002, **(going_on or {}))
        fields = {"value": 43.2, "low": 14.0, "high": 51.0, "beyond": 48.0, **(critical or {})}
        last = replace(summary.points[-1], critical=replace(summary.points[-1].critical, **fields))
        findings = (summary.recommendation, going_on)
        (text,) = words.remarks(replace(summary, findings=findings, points=(last,)))
        return text.removeprefix("A run that has seen 4,096 rows can continue at ")

    use = "batch 32 with learning rate 0.002"
    assert said() == f"{use}: the critical batch size there is 43 ({CI} 14 to 51)."
    unknown = said({"known": False}, {"high": float("inf")})
    why = "the critical batch size there is not known well enough for more"
    assert unknown == f"{use}: {why} ({CI} 14 or more)."
    assert said({"diverged": 64}) == f"{use}: batch 64 diverged elsewhere in this study."
    every = said(None, {"beyond": float("inf")})
    assert (
        every == f"{use}, the largest that was tried: all need at most 20% more rows than the best."
    )


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_one_sentence_one_table_three_remarks(first):
    for seed in range(first, first + 50):
        _, _, summary = random_record(seed)
        assert len(summary.remarks) <= 3
        said = "\n".join((summary.answer, *summary.remarks))
        assert not re.search(r"from scratch|resolved|\bnan\b|\binf\b|None", said)
        assert summary.answer.count(". ") == 0
        advised = [row for row in summary.table.rows if row[-1].split(", ")[-1] == "advised"] if (
            summary.table) else []  # fmt: skip
        basis = summary.recommendation.basis
        assert len(advised) == (basis in ("trained", "own"))
        if advised:
            assert int(advised[0][0].replace(",", "")) == summary.recommendation.batch_size
        # Command and doubt do not stand side by side.
        if summary.rate.first:
            assert "so tune it first; until then" in summary.answer
        assert ("predicted" in summary.answer) == (basis == "predicted")
        assert summary.answer.startswith("Preliminary") == (
            summary.status != "complete" and basis != "none"
        )


def test_the_whole_study_in_words():
    """A growing batch that passed has a row and a remark."""
    header = make_header()
    results, _ = studied(header, 45.0, grown=1e5)
    summary = summarize(header, Results(results), "complete")
    assert [row[0] for row in summary.table.rows][-1] == "growing"
    assert any(remark.startswith("A growing batch, ") for remark in summary.remarks)
