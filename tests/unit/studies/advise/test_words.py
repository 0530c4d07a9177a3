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


FAILED = run(overhead=0.45, low=0.3, high=0.6, within=False, beyond=True)
UNCERTAIN = run(overhead=0.2004, low=0.0, high=INF, within=False)
FLAT = {"recommendation": schema.Recommendation(why="flat")}


@pytest.mark.parametrize(
    ("size", "checked", "fields", "parts"),
    [
        (8, FAILED, {}, ["needs 45% more", "interval 30% to 60%)."]),
        (8, replace(FAILED, low=INF, loss=INF), {}, ["batch 12 diverged."]),
        # No rounding hides on which side of the tolerance it is.
        (8, UNCERTAIN, {}, ["20.04%", "0% to more than 60%", "not certain"]),
        (None, UNCERTAIN, {}, ["--resume may tell, till then stay"]),
        (None, UNCERTAIN, {"status": "complete"}, ["--resume with more --seeds may tell"]),
        # 1.13 times a third fewer steps.
        (12, run(), {}, ["train at batch 12", "it needs 13% more", "25% fewer optimizer"]),
        (None, run(), FLAT, ["validation loss of batch 8 does not"]),
        (12, run(), {"status": "interrupted"}, ["Preliminary: for", "--resume"]),
        # A search that ended at the last of its rates has not found the best one.
        (12, run(), {"octaves": -6.0}, ["0.016 times the task's"]),
    ],
)
def test_sentences(summary, size, checked, fields, parts):
    known = {"why": "" if size else "undecided", "lr": 0.00122, "samples": 4096}
    advice = schema.Recommendation(batch_size=size, **known)
    known = {"recommendation": advice, "findings": (advice,), "checked": (checked,)}
    found = replace(summary, **{**known, **fields})
    said = " ".join((words.answer(found), *words.remarks(found)))
    assert [part for part in parts if part not in said] == []
    # A larger batch is in the answer and in no remark.
    assert len(words.remarks(found)) == (found.status == "interrupted" or found.octaves == -6)


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
