"""What a study says, in its sentences, its table and its page, where the recorded run is silent."""

import html
import math
import re

import pytest
from msgspec.structs import replace

from steadygrad.studies.advise import schema, words
from steadygrad.studies.folder import summarize
from steadygrad.studies.page import render
from tests.unit.report.conftest import made_run, no_charts  # noqa: F401

INF = math.inf
NASTY = "<script>document.title='x'</script><img src=x onerror=alert(1)>\x00$a_b$"
quick = pytest.mark.usefixtures("no_charts")


@pytest.fixture(scope="module")
def summary() -> schema.Summary:
    """Batch 16 of 8 passes, and 24 fails."""
    run = made_run()
    return summarize(run.header, run.results, "budget")


def run(size=12, **fields) -> schema.Checked:
    """A batch size within the tolerance, unless fields say another."""
    told = {"overhead": 0.13, "low": 0.05, "high": 0.24, "within": True, "beyond": False}
    fixed = {"lr": 0.001, "warmup_samples": 256, "steps": 4096 // size, "seeds": 3}
    return schema.Checked(**{"batch_size": size, "loss": 2.0, **fixed, **told, **fields})


def rate(verdict) -> schema.RateVerdict:
    known = {"seeds": 4, "mean": -0.02, "low": -0.03, "high": -0.01, "verdict": "better"}
    fields = {"batch_size": 8, "lr": 0.001, "samples": 4096}
    others = tuple(schema.OtherRate(lr=lr, **known) for lr in (0.0005, 0.002))
    return schema.RateVerdict(verdict=verdict, others=others, **fields)


FAILED = run(overhead=0.45, low=0.3, high=0.6, within=False, beyond=True)
UNCERTAIN = run(overhead=0.2004, low=0.0, high=INF, within=False)
FLAT = {"recommendation": schema.Recommendation(why="flat")}


@pytest.mark.parametrize(
    ("size", "finding", "fields", "parts"),
    [
        (8, FAILED, {}, ["needs 45% more", "interval 30% to 60%)."]),
        (8, replace(FAILED, low=INF, loss=INF), {}, ["batch 12 diverged."]),
        # No rounding hides on which side of the tolerance it is.
        (8, UNCERTAIN, {}, ["20.04%", "0% to more than 60%", "not certain"]),
        (None, UNCERTAIN, {}, ["--resume may tell, till then stay"]),
        (None, UNCERTAIN, {"status": "complete"}, ["--resume with more --seeds may tell"]),
        # 1.13 times a third fewer steps.
        (12, rate("fits"), {}, ["train at batch 12", "it needs 13% more", "25% fewer optimizer"]),
        (12, rate("low"), {}, ["Learning rate 0.002 does better", "by 0.02", "0.01 to 0.03"]),
        (12, rate("high"), {}, ["Learning rate 0.0005 does better than 0.001 at batch 8 over"]),
        (12, rate(""), {}, ["0.001 fits batch 8 over 4,096 sequences is not known after 4 seeds"]),
        # An answer that hangs on a condition opens with it.
        (12, rate("low"), {"rates": (rate("low"),)}, ["until then train at batch 12 with"]),
        (None, None, FLAT, ["validation loss of batch 8 does not"]),
        (12, None, {"status": "interrupted"}, ["Preliminary: for", "--resume"]),
    ],
)
def test_sentences(summary, size, finding, fields, parts):
    known = {"why": "" if size else "undecided", "lr": 0.00122, "samples": 4096}
    advice = schema.Recommendation(batch_size=size, **known)
    rates = (finding,) if isinstance(finding, schema.RateVerdict) else ()
    checked = (finding,) if isinstance(finding, schema.Checked) else (run(),)
    found = replace(summary, recommendation=advice, findings=(advice, *rates), rates=rates)
    found = replace(found, checked=checked, **fields)
    said = " ".join((words.answer(found), *words.remarks(found)))
    assert [part for part in parts if part not in said] == []
    # A larger batch is in the answer and in no remark.
    assert not (isinstance(finding, schema.Checked) and words.remarks(found))


@quick
def test_a_run_without_a_summary_is_drawn():
    assert "no result yet" in render(made_run(status=None))


@quick
def test_every_string_is_escaped(monkeypatch):
    def changed(*run):
        return replace(summarize(*run), answer=NASTY, remarks=(NASTY,))

    monkeypatch.setattr("steadygrad.studies.page.summarize", changed)
    task = {"name": NASTY, "sample": NASTY, "spec": NASTY, "provenance": {NASTY: NASTY}}
    drawn = render(made_run(task=task, settings={"dask": NASTY}))
    assert not re.search("<script|<img", drawn)
    assert "<script>document.title='x'</script>" in html.unescape(drawn)
