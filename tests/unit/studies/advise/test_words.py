"""What a study says, in its sentences, its table and its page, where the recorded run is silent."""

import html
import math
import re

import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from steadygrad.noise import BatchSizeSchedule
from steadygrad.studies.advise import page, schema, words
from steadygrad.studies.folder import summarize
from steadygrad.studies.page import render
from tests.unit.report.conftest import made_run, no_charts  # noqa: F401

INF = math.inf
NASTY = "<script>document.title='x'</script><img src=x onerror=alert(1)>\x00$a_b$"
STAGES = tuple(schema.Stage(from_samples=at, batch_size=b, lr=0.001) for at, b in ((0, 8), (9, 24)))
quick = pytest.mark.usefixtures("no_charts")


@pytest.fixture(scope="module")
def summary() -> schema.Summary:
    """Batch 16 of 8 passes, 24 fails, and a growing batch passes."""
    run = made_run()
    return summarize(run.header, run.results, "budget")


def run(size=12, **fields) -> schema.Checked:
    """A batch size within the tolerance, unless fields say another."""
    told = {"overhead": 0.13, "low": 0.05, "high": 0.24, "within": True, "beyond": False}
    fixed = {"stages": STAGES[:1], "warmup_samples": 256, "steps": 4096 // size, "seeds": 3}
    return schema.Checked(**{"batch_size": size, "loss": 2.0, **fixed, **told, **fields})


def rate(verdict) -> schema.RateVerdict:
    known = {"seeds": 4, "mean": -0.02, "low": -0.03, "high": -0.01}
    fields = {"batch_size": 8, "lr": 0.001, "samples": 4096}
    others = tuple(schema.OtherRate(lr=lr, **known) for lr in (0.0005, 0.002))
    return schema.RateVerdict(verdict=verdict, others=others, **fields)


FAILED = run(overhead=0.45, low=0.3, high=0.6, within=False, beyond=True)
UNCERTAIN = run(overhead=0.2004, low=0.0, high=INF, within=False)
GROWING = schema.Schedule(
    stages=STAGES,
    steps=256,
    warmup_samples=0,
    megatron="",
    advised=True,
    check=run(24, overhead=0.1),
)
FLAT = {"recommendation": schema.Recommendation(why="flat")}


@pytest.mark.parametrize(
    ("size", "finding", "fields", "parts"),
    [
        (8, schema.Larger(run=FAILED), {}, ["needs 45% more", "interval 30% to 60%)."]),
        (8, schema.Larger(run=replace(FAILED, low=INF, loss=INF)), {}, ["batch 12 diverged."]),
        # No rounding hides on which side of the tolerance it is.
        (8, schema.Larger(run=UNCERTAIN), {}, ["20.04%", "0% to more than 60%", "not certain"]),
        (None, schema.Larger(run=UNCERTAIN), {}, ["2 more minutes would tell; till then stay"]),
        # 1.13 times a third fewer steps.
        (12, rate("fits"), {}, ["train at batch 12", "it needs 13% more", "25% fewer optimizer"]),
        (12, rate("low"), {}, ["Learning rate 0.002 does better", "by 0.02", "0.01 to 0.03"]),
        (12, rate("high"), {}, ["Learning rate 0.0005 does better than 0.001 at batch 8 over"]),
        (12, rate(""), {}, ["0.001 fits batch 8 over 4,096 sequences is not known after 4 seeds"]),
        # An answer that hangs on a condition opens with it.
        (12, rate("low"), {"rates": (rate("low"),)}, ["until then train at batch 12 with"]),
        (12, GROWING, {}, ["8 from 0 and 24 from 9 sequences on, needs 10%", "17% fewer"]),
        (12, schema.Flat(points=(64, 256), epochs=3.2), {}, ["64 and 256", "data seen 3 times"]),
        (None, schema.Flat(points=(64,), epochs=1), FLAT, ["validation loss of batch 8 does not"]),
        (12, schema.Unfinished(), {"status": "interrupted"}, ["Preliminary: for", "--resume"]),
    ],
)
def test_sentences(summary, size, finding, fields, parts):
    known = {"why": "" if size else "undecided", "lr": 0.00122, "samples": 4096, "minutes": 1.2}
    advice = schema.Recommendation(batch_size=size, **known)
    found = replace(summary, recommendation=advice, findings=(advice, finding), rates=())
    found = replace(found, checked=(run(),), **fields)
    said = " ".join((words.answer(found), *words.remarks(found)))
    assert [part for part in parts if part not in said] == []
    # A larger batch is in the answer and in no remark.
    assert not (isinstance(finding, schema.Larger) and words.remarks(found))


@quick
def test_a_growing_batch_in_the_form_of_every_trainer():
    made = made_run()
    rows = re.findall(r"<h3>([^<:]*):[^<]*</h3><pre[^>]*><code>(.*?)</code>", render(made), re.S)
    forms = {name: html.unescape(text) for name, text in rows}
    schedule = BatchSizeSchedule(made.summary["schedule"]["stages"])
    for name in ("Lightning", "Hugging Face Trainer"):
        own = {"BatchSizeSchedule": BatchSizeSchedule}
        exec(forms.pop(name), own)
        assert own["schedule"].stages == schedule.stages
    tokens = {"Megatron": schedule.to_megatron(64), "OLMo-core": schedule.to_olmo_core(64)}
    assert forms == tokens


def test_the_bracket_the_interval_and_the_limit_are_drawn(summary, monkeypatch):
    monkeypatch.setattr(page.charts, "chart", lambda name, spoken, paint, **k: paint)
    ends = {"within": 32, "beyond": INF, "value": 40.0, "low": 0.0, "high": INF}
    second = replace(summary.points[1], critical=replace(summary.points[1].critical, **ends))
    figure = Figure()
    page._over_training(replace(summary, points=(second,)), "sequences")(figure, False)
    (axes,) = figure.axes
    bottom, top = axes.get_ylim()
    bracket, interval, *triangles, limit, _ = [line.get_ydata() for line in axes.lines]
    assert 0 < bottom < 8
    assert top > 40
    assert (list(bracket), list(interval), list(limit)) == ([32, top], [bottom, top], [40.0])
    assert [list(each) for each in triangles] == [[bottom], [top]]


@quick
def test_a_run_without_a_summary_is_drawn():
    assert "no result yet" in render(made_run(points=1, status=None))


@quick
def test_every_string_is_escaped(monkeypatch):
    def changed(*run):
        found = summarize(*run)
        schedule = replace(found.schedule, megatron=NASTY)
        return replace(found, answer=NASTY, remarks=(NASTY,), schedule=schedule)

    monkeypatch.setattr("steadygrad.studies.page.summarize", changed)
    task = {"name": NASTY, "sample": NASTY, "spec": NASTY, "provenance": {NASTY: NASTY}}
    drawn = render(made_run(task=task, settings={"dask": NASTY}))
    assert not re.search("<script|<img", drawn)
    assert "<script>document.title='x'</script>" in html.unescape(drawn)
