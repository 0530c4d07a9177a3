"""The page of an `advise` run, where the recorded one of the documentation has nothing to show."""

import html
import math
import re

import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from steadygrad.noise import BatchSizeSchedule
from steadygrad.studies.advise import page
from steadygrad.studies.advise.schema import Scratch
from steadygrad.studies.page import render
from steadygrad.studies.summary import summarize
from tests.unit.report.conftest import made_run, no_charts  # noqa: F401

NASTY = "<script>document.title='x'</script><img src=x onerror=alert(1)>\x00$a_b$"
quick = pytest.mark.usefixtures("no_charts")


def text_of(drawn: str) -> str:
    """What a page says, without tags."""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", drawn)).split()).replace(" ,", ",")


def forms_of(drawn: str) -> dict[str, str]:
    """The schedule for other trainers, by the trainer's name."""
    found = re.findall(r"<h3>([^<:]*):[^<]*</h3><pre[^>]*><code>(.*?)</code>", drawn, re.DOTALL)
    return {name: html.unescape(text) for name, text in found}


def said(monkeypatch, change):
    """Draws a summary with other fields, which ``change`` gives for its schedule."""

    def changed(*run):
        found = summarize(*run)
        return replace(found, **change(found.schedule))

    monkeypatch.setattr("steadygrad.studies.page.summarize", changed)


@quick
def test_a_growing_batch_in_the_form_of_every_trainer(monkeypatch):
    run = made_run()
    schedule = BatchSizeSchedule(run.summary["schedule"]["stages"])
    forms = forms_of(render(run))
    for name in ("Lightning", "Hugging Face Trainer"):
        found = {"BatchSizeSchedule": BatchSizeSchedule}
        exec(forms.pop(name), found)
        assert found["schedule"].stages == schedule.stages
    tokens = {"Megatron": schedule.to_megatron(64), "OLMo-core": schedule.to_olmo_core(64)}
    assert forms == tokens
    plain = render(made_run(task={"tokens_per_sample": None}))
    assert list(forms_of(plain)) == ["Lightning", "Hugging Face Trainer"]
    said(monkeypatch, lambda found: {"schedule": replace(found, advised=False)})
    assert forms_of(render(run)) == {}


@quick
@pytest.mark.parametrize(
    ("task", "settings", "parts"),
    [
        ({}, {}, ["the square root", "no warm-up and is constant"]),
        (
            {"lr_rule": "constant", "warmup_samples": 64},
            {},
            ["stays the same", "over 64 sequences"],
        ),
        (
            {"lr_decay": "cosine", "beta2": None},
            {},
            ["a cosine decay", "size, weight decay (0.01)"],
        ),
        (
            {},
            {"keep_half_life": True, "seed": 7},
            ["the half-lives of beta2", "seed 7 alone", "35,311 tokens"],
        ),
    ],
)
def test_what_it_says_of_the_task(task, settings, parts):
    text = text_of(render(made_run(task=task, settings=settings)))
    assert [part for part in parts if part not in text] == []


@quick
def test_seeds_of_the_search_for_rates_are_no_pairs():
    def edit(result):
        again = isinstance(result, Scratch) and result.repeat == 2
        return replace(result, repeat=64) if again else result

    text = text_of(render(made_run(settings={"tune": True}, edit=edit)))
    count = len({run.repeat for run in made_run().select(Scratch)}) - 1
    assert f"have {count} seeds, and the search" in text


def test_the_bracket_the_interval_and_the_limit_are_drawn():
    run = made_run()
    found = summarize(run.header, run.results, "complete")
    ends = {"within": 32, "beyond": math.inf, "value": 40.0, "low": 0.0, "high": math.inf}
    second = replace(found.points[1], critical=replace(found.points[1].critical, **ends))
    axes = Figure().subplots()
    axes.set_ylim(4, 400)
    page._draw_point(axes, second)
    bracket, interval, *triangles, limit = [line.get_ydata() for line in axes.lines]
    assert (list(bracket), list(interval), list(limit)) == ([32, 400], [4, 400], [40.0])
    assert [list(each) for each in triangles] == [[4], [400]]


@quick
@pytest.mark.parametrize("points", [0, 1, 2])
def test_a_run_without_a_summary_is_drawn(points):
    assert "no result yet" in text_of(render(made_run(points=points, status=None)))


@quick
def test_every_string_is_escaped(monkeypatch):
    change = {"answer": NASTY, "remarks": (NASTY,)}
    said(monkeypatch, lambda found: {**change, "schedule": replace(found, megatron=NASTY)})
    task = {"name": NASTY, "sample": NASTY, "spec": NASTY, "provenance": {NASTY: NASTY}}
    drawn = render(made_run(task=task, settings={"dask": NASTY}))
    assert not re.search("<script|<img", drawn)
    assert "<script>document.title='x'</script>" in html.unescape(drawn)
