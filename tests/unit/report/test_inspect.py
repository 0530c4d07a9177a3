"""The page of an ``inspect`` run."""

import html
import io
import re
import shutil
from math import log2

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from rich.console import Console

from steadygrad.formulas.exponents import limits
from steadygrad.studies import charts as common
from steadygrad.studies.folder import SCHEMA, Run
from steadygrad.studies.inspect import schema as schema
from steadygrad.studies.inspect.report import charts
from steadygrad.studies.inspect.report.data import TITLES, Histogram, Inspection
from steadygrad.studies.inspect.report.terminal import table
from steadygrad.studies.inspect.schema import AFTER, BEFORE, OUTSIDE, Part
from steadygrad.studies.page import render
from steadygrad.studies.schema import Runtime, TaskInfo
from tests.unit.report.test_browser import (
    DARK,
    Look,
    assert_well_shown,
    luminance,
    needs_chromium,
)
from tests.unit.studies.results import write

LAYERS = ["early", "late", "a.layer.with.a.name.that.is.much.longer.than.any.chart.has.room.for"]
HEADER = schema.Header(
    schema=SCHEMA,
    study="inspect",
    task=TaskInfo(
        spec="made_up.py:make_task",
        name="made-up",
        sample="image",
        batch_size=4,
        lr=0.01,
        lr_rule="sqrt",
        parameters=1234,
        train_size=4096,
        valid_size=64,
    ),
    runtime=Runtime(
        device="cpu",
        dtype="float16",
        world_size=1,
        sharding="none",
        threads=1,
        micro_batch_size=4,
        workers=1,
    ),
    environment={"python": "3.11.7"},
    settings=schema.Settings(task="made_up.py:make_task", steps=80, budget=60.0, device="cpu"),
    plan=schema.Plan(batch_size=4, steps=80, layers=tuple(LAYERS), work=1004),
    time={"created": "2026-11-21T01:23:45+00:00"},
)


def counts(phase, name):
    """The early layer is flushed, and the late one overflows, where there is one scale only."""
    if phase == "before" and name == "early":
        return schema.Histogram(zero=60, low=-20, counts=(10, 20, 10), over=0)
    if phase == "before" and name == "late":
        return schema.Histogram(zero=0, low=12, counts=(40, 40, 15), over=5)
    return schema.Histogram(zero=1, low=-8, counts=(9, 20, 40, 20, 10), over=0)


def part(phase, number):
    # Before the scales have settled everything looks different.
    held = {name: counts(phase if number >= 4 else "search", name) for name in LAYERS}
    return Part(
        phase=phase,
        part=number,
        steps=10 * (number + 1),
        samples=40 * (number + 1),
        loss=(2.0 if phase == "before" else 1.0) / (number + 1),
        scales={"": 3.0, **dict.fromkeys(LAYERS, 0.0)},
        skipped=0,
        overflows={"late": 1} if phase == "before" else {},
        at_any_scale={},
        overflowed_at={"late": 4.0} if phase == "before" else {},
        largest={kind: dict.fromkeys(LAYERS, 0.0) for kind in ("activations", "weights")},
        activations=held,
        weights=held,
        plain={"activations": {}, "weights": {}},
    )


SHARES = {"zero": 0.6125, "subnormal": 0.3, "overflow": 0.0}
CALM = {"zero": 0.01, "subnormal": 0.0, "overflow": 0.0}
SUMMARY = {
    "schema": SCHEMA,
    "study": "inspect",
    "status": "complete",
    "task": "made-up",
    "sample": "image",
    "diagnosis": {
        "fault": True,
        "underflowing": {"early": 0.9},
        "limiting": {"late": 8},
        "nonfinite_at_any_scale": {},
    },
    "proposal": {"loss_scale": 8.0, "layer_scales": {"early": 2.0**15}, "code": "Scaler()"},
    "words": ["No single loss scale fits all layers.", "It cannot be <larger>."],
    "phases": {
        phase: {"steps": 80, "skipped": skipped, "loss_scale": 8.0, "valid_loss": loss}
        for phase, skipped, loss in (("before", 8, 2.2345), ("after", 0, 0.1234))
    },
    "layers": [
        {
            "name": name,
            "before": {"activations": SHARES, "weights": SHARES, "overflows": 8},
            "after": {"activations": CALM, "weights": None, "overflows": 0},
        }
        for name in LAYERS
    ],
}


@pytest.fixture
def make_run(tmp_path):
    def make(phases=("before", "search", "after"), summary=SUMMARY) -> Run:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        found = [part(phase, number) for phase in phases for number in range(8)]
        return write(tmp_path / "run", *found, header=HEADER, summary=summary)

    return make


def words_of(page):
    body = re.sub(r"<style.*?</style>|<svg.*?</svg>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


@pytest.mark.usefixtures("no_charts")
def test_the_diagnosis_comes_first(make_run):
    page = render(make_run())
    text = words_of(page)
    assert "<h1>made-up: with one loss scale, gradients underflow in early.</h1>" in page
    assert "No single loss scale fits all layers. It cannot be <larger>." in text
    assert "2.2345 after 80 steps with one loss scale" in text
    assert "0.1234 after 80 steps with the proposed scales" in text
    assert "8 of 80 with one loss scale, for an overflow" in text


@pytest.mark.usefixtures("no_charts")
def test_the_tables_say_what_the_record_says(make_run):
    text = words_of(render(make_run()))
    row = "61.25% 30.00% 0.00%"
    assert text.count(f"early {row} {row} 8 steps") == 1
    assert text.count("early 1.00% 0.00% 0.00% – – – 0 steps") == 1
    assert "the loss 2^3 early 2^15" in text


def test_what_is_drawn_is_what_was_counted(make_run):
    """Shares of the second half of a phase, by exponent."""
    found = Inspection(make_run())
    early = found.histograms[BEFORE]["weights"]["early"]
    assert (early.zero, early.over) == (0.6, 0.0)
    assert early.exponents == {-20: 0.1, -19: 0.2, -18: 0.1}
    late = found.histograms[BEFORE]["activations"]["late"]
    assert late.over == 0.05
    assert sum(late.exponents.values()) == pytest.approx(0.95)
    assert found.layers == LAYERS  # the loss has no gradients of its own here
    assert found.losses[AFTER][0] == (10.0, 1.0)


def test_each_cell_stands_at_its_exponent(make_run):
    from steadygrad.studies.inspect.report.charts import LEAST, NOT_FINITE, OVER, ZERO, _cells

    found = Inspection(make_run())
    cells = _cells(found.histograms[BEFORE]["weights"]["early"])
    ends = {ZERO: 0.6, NOT_FINITE: 0.0, LEAST - 2: 0, OVER + 2: 0}
    assert cells == {**ends, -20: 0.1, -19: 0.2, -18: 0.1}
    # The axis is float16's: its least subnormal number, and twice its largest power of two.
    assert (log2(2.0**-24), log2(65536)) == (LEAST, OVER)


@pytest.fixture
def painted(monkeypatch):
    """Calls a chart, and gives the figure that it would have drawn on a wide page."""

    def paint(chart, *arguments):
        painters = []
        monkeypatch.setattr(common, "chart", lambda *a, **k: painters.append(a[2]))
        chart(*arguments)
        figure = Figure()
        painters[0](figure, False)
        return figure

    return paint


def boxes(axes):
    """The boxes of the drawing: strength by row, left edge and colour."""
    names = [label.get_text() for label in axes.get_yticklabels()]
    found = {}
    for collection in axes.collections:
        # One strength for each box.
        assert len(collection.get_paths()) == len(collection.get_alpha())
        colour = to_hex(collection.get_facecolor()[0])
        for path, alpha in zip(collection.get_paths(), collection.get_alpha(), strict=True):
            (x, y), (_, top) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found[names[round((y + top) / 2)], x, colour] = alpha
    return found


def test_the_map_shows_what_was_counted(make_run, painted):
    figure = painted(charts.heat, Inspection(make_run()), "weights")
    before, after = figure.axes
    assert [axes.get_title(loc="left") for axes in (before, after)] == list(TITLES.values())
    long = "…" + LAYERS[2][-23:]
    ZERO, NOT_FINITE = charts.ZERO, charts.NOT_FINITE
    # The page paints these orange and blue.
    lost, held = common.NOISE, common.CRITICAL
    drawn = boxes(before)
    # The early layer is all zero or subnormal; the late one has five values too large.
    early = {(x, colour) for name, x, colour in drawn if name == "early"}
    assert early == {(ZERO, lost), (-20, lost), (-19, lost), (-18, lost)}
    late = {(x, colour) for name, x, colour in drawn if name == "late"}
    assert late == {(12, held), (13, held), (14, held), (NOT_FINITE, lost)}
    calm = {(ZERO, lost), *((x, held) for x in range(-8, -3))}
    assert {(x, colour) for name, x, colour in drawn if name == long} == calm
    drawn = boxes(after)
    assert {name for name, *_ in drawn} == {"early", "late", long}
    for layer in ("early", "late", long):
        assert {(x, colour) for name, x, colour in drawn if name == layer} == calm


def test_the_more_values_the_stronger_a_cell(make_run, painted):
    drawn = boxes(painted(charts.heat, Inspection(make_run()), "weights").axes[0])
    early = {x: alpha for (name, x, _), alpha in drawn.items() if name == "early"}
    assert 0.1 < early[-20] == early[-18] < early[-19] < early[charts.ZERO] == 1.0


def test_the_dashed_lines_are_float16_s_limits(make_run, painted):
    for axes in painted(charts.heat, Inspection(make_run()), "weights").axes:
        normal, least, over = limits(torch.float16)
        assert (normal, least, over) == (charts.NORMAL, charts.LEAST, charts.OVER)
        # From half of the least number on values are rounded to it.
        assert [line.get_xdata()[0] for line in axes.lines] == [least - 1, normal, over]


def test_one_infinity_among_a_million_values_is_drawn(make_run, painted):
    found = Inspection(make_run())
    many = Histogram(1e-6, 1e-6, {0: 1 - 4e-6, -20: 1e-6, 17: 1e-6})
    found.histograms[BEFORE]["weights"]["late"] = many
    drawn = boxes(painted(charts.heat, found, "weights").axes[0])
    assert {x for name, x, _ in drawn if name == "late"} == {0, 17, charts.NOT_FINITE}


def test_the_curves_are_the_losses(make_run, painted):
    (axes,) = painted(charts.training, Inspection(make_run())).axes
    curves = {line.get_color(): list(line.get_ydata()) for line in axes.lines}
    assert curves[common.SCHEDULE] == [2.0 / n for n in range(1, 9)]
    assert curves[common.CRITICAL] == [1.0 / n for n in range(1, 9)]
    named = {text.get_color(): text.get_text() for text in axes.texts}
    assert named == {common.SCHEDULE: TITLES[BEFORE], common.CRITICAL: TITLES[AFTER]}


def test_the_same_run_gives_the_same_bytes(make_run):
    page = render(run := make_run())
    assert render(run) == page
    assert "<script" not in page


def title(make_run, proposal=None, **diagnosis):
    """The headline, with some findings and scales in place of others."""
    summary = {**SUMMARY, "diagnosis": {**SUMMARY["diagnosis"], **diagnosis}}
    summary["proposal"] = {**SUMMARY["proposal"], **(proposal or {})}
    return re.search("<h1>(.*?)</h1>", render(make_run(summary=summary)))[1]


@pytest.mark.usefixtures("no_charts")
def test_nothing_at_fault(make_run):
    calm = {"underflowing": {}, "limiting": {}}
    assert title(make_run, **calm) == "made-up: one loss scale is enough."
    assert title(make_run, **calm, nonfinite_at_any_scale={"late": 3}) == (
        "made-up: gradients are not finite at any scale in late."
    )


@pytest.mark.usefixtures("no_charts")
def test_what_is_said_above_all(make_run):
    assert title(make_run, nonfinite_at_any_scale={"late": 3}) == (
        "made-up: gradients are not finite at any scale in late; with one loss scale, gradients "
        "underflow in early."
    )
    one = {"layer_scales": {}, "loss_scale": 2.0**20}
    enough = "made-up: one loss scale is enough if it starts at 2^20."
    assert title(make_run, one, limiting={}) == enough
    # The late layer overflowed above 2**3, where it settled.
    neither = "made-up: gradients underflow in early, and no scale prevents it."
    assert title(make_run, one) == neither
    one["loss_scale"] = 8.0
    assert title(make_run, one, limiting={}) == neither


@pytest.mark.usefixtures("no_charts")
def test_a_headline_agrees_with_any_number_of_layers(make_run):
    assert title(make_run, underflowing={"early": 0.9, "late": 0.2}) == (
        "made-up: with one loss scale, gradients underflow in early and late."
    )


def with_the_loss(summary):
    """The first layer of the summary is the one outside of all layers."""
    first, *others = summary["layers"]
    return {**summary, "layers": [{**first, "name": ""}, *others]}


def test_the_layer_without_a_name_is_called_the_same_everywhere(make_run, painted, monkeypatch):
    monkeypatch.setitem(globals(), "LAYERS", ["", *LAYERS[1:]])
    summary = with_the_loss({**SUMMARY, "diagnosis": {"underflowing": {"": 0.9}}})
    run = make_run(summary=summary)
    row = "61.25% 30.00% 0.00%"
    text = words_of(render(run))
    assert f"with one loss scale, gradients underflow in {OUTSIDE}." in text
    assert f"{OUTSIDE} {row} {row} 8 steps" in text
    (axes, _) = painted(charts.heat, Inspection(run), "weights").axes
    assert axes.get_yticklabels()[0].get_text() == OUTSIDE
    assert OUTSIDE in printed(summary)


def printed(summary):
    """The table as a terminal shows it."""
    console = Console(width=200, file=io.StringIO(), markup=False)
    console.print(table(summary))
    return console.file.getvalue()


def test_the_table_in_the_terminal():
    lines = printed({**SUMMARY, "task": "[made] up"}).splitlines()
    assert lines[0].strip() == "[made] up: gradients in float16, one loss scale / proposed"
    cells = [[cell.strip() for cell in re.split("[│┃]", line)] for line in lines]
    row = ["early", "61.3% / 1.0%", "30.0% / 0.0%", "8 / 0 steps"]
    assert [cell for cell in next(c for c in cells if "early" in c) if cell] == row
    empty = {**SUMMARY["layers"][0], "after": {"overflows": 0}}
    assert "30.0% / -" in printed({**SUMMARY, "layers": [empty]})
    assert table({**SUMMARY, "layers": []}) is None


@pytest.mark.parametrize("status", ["complete", "budget"])
@pytest.mark.usefixtures("no_charts")
def test_how_it_ended_is_said_once(make_run, status):
    """By the words; the page itself only knows of a record without an end."""
    said = "The time budget ended before all measurements were made."
    words = [said] if status == "budget" else []
    run = make_run(summary={**SUMMARY, "status": status, "words": [*words, *SUMMARY["words"]]})
    text = words_of(render(run))
    assert text.count(said) == len(words)
    assert "The record has no end" not in text


@pytest.mark.parametrize("phases", [(), ("before",), ("before", "search")])
def test_a_partial_record_says_so(make_run, phases):
    text = words_of(render(make_run(phases, None)))
    assert "No result for made-up in float16 yet: the run is not complete." in text
    assert "The record has no end" in text
    assert ("Where the bits go" in text) == bool(phases)


@needs_chromium
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_on_a_phone_and_on_a_desk(make_run, tmp_path, mode):
    look = Look(render(make_run()), tmp_path, *([DARK] if mode == "dark" else []))
    assert_well_shown(look, charts=3)
    assert (luminance(look.desk["paper"]) < 0.1) == (mode == "dark")
