"""The page of an `advise` run, from whole, partial and hostile runs."""

import html
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from steadygrad.noise import BatchSizeSchedule
from steadygrad.studies import charts
from steadygrad.studies.advise import page
from steadygrad.studies.advise.schema import Branch, Point, Scratch
from steadygrad.studies.page import render
from steadygrad.studies.summary import summarize
from tests.unit.report.conftest import made_run, no_charts, whole_page  # noqa: F401

NASTY = "<script>document.title='x'</script><img src=x onerror=alert(1)>\x00$a_b$"
quick = pytest.mark.usefixtures("no_charts")


class Reader(HTMLParser):
    """Collects tags, attributes and text of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data + "\n"


def charts_of(page: str) -> dict[str, ET.Element]:
    drawings = {}
    for svg in map(ET.fromstring, re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)):
        name = next(element.get("id", "") for element in svg.iter() if element.get("id"))
        drawings[re.split(r"-figure|-(?=[wn]-)", name)[0]] = svg
    return drawings


def crosses(page: str, chart: str) -> int:
    """Strokes in the colour of what diverged."""
    svg = charts_of(page)[chart]
    return sum(charts.NOISE in str(e.get("style")) for e in svg.iter("use"))


def said(monkeypatch, change):
    """Draws a summary with other fields, which ``change`` gives for its schedule."""

    def changed(*run):
        found = summarize(*run)
        return replace(found, **change(found.schedule))

    monkeypatch.setattr("steadygrad.studies.page.summarize", changed)


def rows_of(page: str, caption: str) -> list[list[str]]:
    """Cells of the table with a caption, row by row."""
    pattern = rf"<caption>{re.escape(caption)}</caption>(.*?)</table>"
    (found,) = re.findall(pattern, page, flags=re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", found, flags=re.DOTALL)[1:]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.DOTALL) for row in rows]


def forms_of(page: str) -> dict[str, str]:
    """The schedule for other trainers, by the trainer's name."""
    found = re.findall(r"<h3>([^<:]*):[^<]*</h3><pre[^>]*><code>(.*?)</code>", page, re.DOTALL)
    return {name: html.unescape(text) for name, text in found}


def test_the_whole_page(whole_page):  # noqa: F811
    assert tuple(charts_of(whole_page)) == ("scratch", "sizes")
    assert re.findall(r"<h2>(.*?)</h2>", whole_page) == [
        "Settings of the advised run",
        "Whole trainings",
        "Critical batch size over training",
        "Every number",
        "What this cannot tell you",
        "Where the numbers come from",
    ]
    summary = made_run().summary
    assert f"<h1>{html.escape(summary['answer'])}</h1>" in whole_page
    assert all(html.escape(remark) in whole_page for remark in summary["remarks"])
    assert 'role="note"' not in whole_page  # nothing is missing
    assert render(made_run()) == whole_page
    assert crosses(whole_page, "sizes") == 1


def test_every_number_of_the_run_is_in_a_table(whole_page):  # noqa: F811
    run = made_run()
    cells = {each for cell in re.findall(r"<td[^>]*>([^<]*)</td>", whole_page) for each in
             cell.split(", ")}  # fmt: skip
    losses = [e.loss for e in run.select(Branch) + run.select(Scratch)]
    losses += [event.valid_loss for event in run.select(Point)]
    assert {f"{loss:.4f}" if math.isfinite(loss) else "∞" for loss in losses} <= cells
    for row in run.summary["points"]:
        found = row["critical"]
        assert {f"{found['value']:.3g}", f"{found['within']}"} <= cells


@quick
def test_a_growing_batch_in_the_form_of_every_trainer(monkeypatch):
    run = made_run()
    stages, drawn = run.summary["schedule"]["stages"], render(run)
    assert [row[1] for row in rows_of(drawn, "A growing batch")] == [
        str(stage["batch_size"]) for stage in stages
    ]
    schedule = BatchSizeSchedule(stages)
    forms = forms_of(drawn)
    made = [forms.pop(name) for name in ("Lightning", "Hugging Face Trainer")]
    for text in made:
        found = {"BatchSizeSchedule": BatchSizeSchedule}
        exec(text, found)
        assert found["schedule"].stages == schedule.stages
    assert forms == {
        "Megatron": run.summary["schedule"]["megatron"],
        "OLMo-core": schedule.to_olmo_core(64),
    }
    assert "OLMo-core's callback raises the learning rate" in drawn
    plain = render(made_run(task={"tokens_per_sample": None}))
    assert list(forms_of(plain)) == ["Lightning", "Hugging Face Trainer"]
    assert "OLMo-core" not in plain
    said(monkeypatch, lambda found: {"schedule": replace(found, advised=False, check=None)})
    text = render(run)
    assert forms_of(text) == {}
    assert "It rests on branches and was not trained." in text
    assert "It is not advised." in text


@quick
@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        ({}, {}, "grows with the square root of the batch size, from 0.001 at batch 8"),
        ({"lr_rule": "constant"}, {}, "stays the same at every batch size, from 0.001"),
        ({}, {}, "has no warm-up and is constant then"),
        ({"warmup_samples": 64}, {}, "warms up over 64 sequences and is constant then"),
        ({"lr_decay": "cosine"}, {}, "has a cosine decay. Whole trainings have it"),
        ({}, {}, "At every batch size, beta2 (0.99) and weight decay (0.01) stayed as in the task"),
        ({}, {"tune": True}, "the best of each batch size was searched"),
        ({}, {"keep_half_life": True}, "In samples, the half-lives of beta2 (0.99) and weight"),
        ({"beta2": None}, {}, "At every batch size, weight decay (0.01) stayed"),
        ({}, {"seed": 7}, "rest on seed 7 alone."),
        ({}, {"keep_half_life": True}, "552 sequences, 35,311 tokens, kept from the task"),
        ({"tokens_per_sample": None}, {}, "sequences, at this batch size"),
    ],
)
def test_what_it_says_of_the_task(task, settings, words):
    points = 2 if "sequences" in words and "token" in words + str(task) else 1
    assert words in Reader(render(made_run(points=points, task=task, settings=settings))).text


@quick
def test_seeds_of_the_search_for_rates_are_no_pairs():
    def edit(result):
        again = isinstance(result, Scratch) and result.repeat == 2
        return replace(result, repeat=64) if again else result

    text = Reader(render(made_run(settings={"tune": True}, edit=edit))).text
    count = len({run.repeat for run in made_run().select(Scratch)}) - 1
    assert f"Whole trainings have {count} seeds, and the search" in text


def flat(point):
    """The validation loss does not fall along the branches of a point."""

    def edit(result):
        if not isinstance(result, Branch) or result.point != point:
            return result
        loss = 2.0 + 0.01 * result.repeat + 0.02 * (result.batch_size > 8)
        return replace(result, loss=loss, curve=tuple((at, loss) for at, _ in result.curve))

    return edit


def test_a_point_that_tells_nothing_is_said():
    drawn = render(made_run(edit=flat(1)))
    labels = [element.text for element in charts_of(drawn)["sizes"].iter("text")]
    assert labels.count("not determined ") == 1
    assert rows_of(drawn, "Critical batch size")[1][2:4] == ["not determined", "–"]


def test_the_bracket_the_interval_and_the_limit_are_drawn():
    run = made_run()
    found = summarize(run.header, run.results, "complete")
    second = found.points[1]
    ends = {"within": 32, "beyond": math.inf, "value": 40.0, "low": 0.0, "high": math.inf}
    second = replace(second, critical=replace(second.critical, **ends))
    axes = Figure().subplots()
    axes.set_ylim(4, 400)
    page._draw_point(axes, second)
    bracket, interval, *triangles, limit = [line.get_ydata() for line in axes.lines]
    assert (list(bracket), list(interval), list(limit)) == ([32, 400], [4, 400], [40.0])
    assert [list(each) for each in triangles] == [[4], [400]]


@quick
@pytest.mark.parametrize("points", [0, 1, 2])
def test_a_run_without_a_summary_is_drawn(points):
    text = Reader(render(made_run(points=points, status=None))).text
    assert "char-lm: no result yet." in text
    assert "The run was stopped, or is still going." in text


@quick
@pytest.mark.parametrize("sample", [NASTY, "字" * 300, "x", "$\\frac$"])
def test_every_string_is_escaped(sample, monkeypatch):
    change = {"answer": NASTY, "remarks": (NASTY,)}
    said(monkeypatch, lambda found: {**change, "schedule": replace(found, megatron=NASTY)})
    task = {"name": NASTY, "sample": sample, "spec": NASTY, "provenance": {NASTY: NASTY}}
    reader = Reader(render(made_run(task=task, settings={"dask": NASTY})))
    assert reader.tags.isdisjoint({"script", "img"})
    assert "onerror" not in reader.attributes
    assert "<script>document.title='x'</script>" in reader.text
