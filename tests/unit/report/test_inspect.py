"""The page of an ``inspect`` run."""

import html
import re
import shutil
from math import log2

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from steadygrad.formulas.exponents import limits
from steadygrad.record import Run, RunWriter, read_run
from steadygrad.report import charts as common
from steadygrad.report import render
from steadygrad.report.inspect import charts
from steadygrad.report.inspect.data import AFTER, BEFORE, TITLES, Histogram, gather
from tests.unit.report.test_browser import (
    DARK,
    Look,
    assert_well_shown,
    luminance,
    needs_chromium,
)

HEADER = {
    "study": "inspect",
    "seed": 0,
    "task": {"name": "made-up", "sample": "image"},
    "settings": {"batch_size": 4, "steps": 80, "budget_seconds": 60.0, "device": "cpu"},
    "plan": {},
    "time": {"created": "2026-11-21T01:23:45+00:00"},
}
LAYERS = ["early", "late", "a.layer.with.a.name.that.is.much.longer.than.any.chart.has.room.for"]


def counts(phase, name):
    """The early layer is flushed, and the late one overflows, where there is one scale only."""
    if phase == "before" and name == "early":
        return {"zero": 60, "low": -20, "counts": [10, 20, 10], "over": 0}
    if phase == "before" and name == "late":
        return {"zero": 0, "low": 12, "counts": [40, 40, 15], "over": 5}
    return {"zero": 1, "low": -8, "counts": [9, 20, 40, 20, 10], "over": 0}


def part(phase, number):
    # Before the scales have settled everything looks different.
    held = {name: counts(phase if number >= 4 else "search", name) for name in LAYERS}
    return {
        "phase": phase,
        "part": number,
        "steps": 10 * (number + 1),
        "samples": 40 * (number + 1),
        "loss": (2.0 if phase == "before" else 1.0) / (number + 1),
        "scales": {"": 3.0, **dict.fromkeys(LAYERS, 0.0)},
        "skipped": 0,
        "overflows": {"late": 1} if phase == "before" else {},
        "at_any_scale": {},
        "overflowed_at": {"late": 4.0} if phase == "before" else {},
        "largest": {kind: dict.fromkeys(LAYERS, 0.0) for kind in ("activations", "weights")},
        "activations": held,
        "weights": held,
        "plain": {"activations": {}, "weights": {}},
    }


SHARES = {"zero": 0.6125, "subnormal": 0.3, "overflow": 0.0}
CALM = {"zero": 0.01, "subnormal": 0.0, "overflow": 0.0}
SUMMARY = {
    "schema": 1,
    "study": "inspect",
    "status": "complete",
    "verdict": {"fault": True, "starved": {"early": 0.9}, "ceiling": {"late": 8}, "broken": {}},
    "proposal": {"loss_scale": 8.0, "layer_scales": {"early": 2.0**15}, "code": "Scaler()"},
    "words": ["No single loss scale serves all layers.", "It cannot be <larger>."],
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
        with RunWriter.create(tmp_path / "run", HEADER) as writer:
            for phase in phases:
                for number in range(8):
                    writer.append("part", **part(phase, number))
            if summary is not None:
                writer.append("end", status=summary["status"])
                writer.write_summary(summary)
        return read_run(tmp_path / "run")

    return make


def words_of(page):
    body = re.sub(r"<style.*?</style>|<svg.*?</svg>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_the_verdict_comes_first(make_run):
    page = render(make_run())
    text = words_of(page)
    assert "<h1>One loss scale starves early of made-up.</h1>" in page
    assert "No single loss scale serves all layers. It cannot be <larger>." in text
    assert "2.2345 after 80 steps with one loss scale" in text
    assert "0.1234 after 80 steps with the scales proposed" in text
    assert "8 of 80 with one loss scale, for an overflow" in text


def test_the_tables_say_what_the_record_says(make_run):
    text = words_of(render(make_run()))
    row = "61.25% 30.00% 0.00%"
    assert text.count(f"early {row} {row} 8 steps") == 1
    assert text.count("early 1.00% 0.00% 0.00% – – – 0 steps") == 1
    assert "(loss) 2^3 early 2^15" in text


def test_what_is_drawn_is_what_was_counted(make_run):
    """Shares of the second half of a phase, by exponent."""
    found = gather(make_run())
    early = found.histograms[BEFORE]["weights"]["early"]
    assert (early.zero, early.over) == (0.6, 0.0)
    assert early.exponents == {-20: 0.1, -19: 0.2, -18: 0.1}
    late = found.histograms[BEFORE]["activations"]["late"]
    assert late.over == 0.05
    assert sum(late.exponents.values()) == pytest.approx(0.95)
    assert found.layers == LAYERS  # the loss has no gradients of its own here
    assert found.losses[AFTER][0] == (10.0, 1.0)


def test_each_cell_stands_at_its_exponent(make_run):
    from steadygrad.report.inspect.charts import LEAST, NOT_FINITE, OVER, ZERO, _cells

    found = gather(make_run())
    cells = dict(_cells(found.histograms[BEFORE]["weights"]["early"]))
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
    """What is drawn: strength by row, left edge and colour."""
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
    figure = painted(charts.heat, gather(make_run()), "weights")
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
    drawn = boxes(painted(charts.heat, gather(make_run()), "weights").axes[0])
    early = {x: alpha for (name, x, _), alpha in drawn.items() if name == "early"}
    assert 0.1 < early[-20] == early[-18] < early[-19] < early[charts.ZERO] == 1.0


def test_the_dashed_lines_are_float16_s_limits(make_run, painted):
    for axes in painted(charts.heat, gather(make_run()), "weights").axes:
        normal, least, over = limits(torch.float16)
        assert (normal, least, over) == (charts.NORMAL, charts.LEAST, charts.OVER)
        # From half of the least number on values are rounded to it.
        assert [line.get_xdata()[0] for line in axes.lines] == [least - 1, normal, over]


def test_one_infinity_among_a_million_values_is_drawn(make_run, painted):
    found = gather(make_run())
    many = Histogram(1e-6, 1e-6, {0: 1 - 4e-6, -20: 1e-6, 17: 1e-6})
    found.histograms[BEFORE]["weights"]["late"] = many
    drawn = boxes(painted(charts.heat, found, "weights").axes[0])
    assert {x for name, x, _ in drawn if name == "late"} == {0, 17, charts.NOT_FINITE}


def test_the_curves_are_the_losses(make_run, painted):
    (axes,) = painted(charts.training, gather(make_run())).axes
    curves = {line.get_color(): list(line.get_ydata()) for line in axes.lines}
    assert curves[common.SCHEDULE] == [2.0 / n for n in range(1, 9)]
    assert curves[common.CRITICAL] == [1.0 / n for n in range(1, 9)]
    named = {text.get_color(): text.get_text() for text in axes.texts}
    assert named == {common.SCHEDULE: TITLES[BEFORE], common.CRITICAL: TITLES[AFTER]}


def test_the_same_run_gives_the_same_bytes(make_run):
    run = make_run()
    assert render(run) == render(run)
    assert "<script" not in render(run)


def test_nothing_at_fault(make_run):
    calm = {"fault": False, "starved": {}, "ceiling": {}, "broken": {}}
    page = render(make_run(summary={**SUMMARY, "verdict": calm}))
    assert "<h1>Nothing is at fault: one loss scale serves made-up.</h1>" in page
    broken = {**calm, "fault": True, "broken": {"late": 3}}
    page = render(make_run(summary={**SUMMARY, "verdict": broken}))
    assert "<h1>late of made-up overflows at any scale.</h1>" in page


def test_what_is_said_above_all(make_run):
    def title(proposal=None, **verdict):
        summary = {**SUMMARY, "verdict": {**SUMMARY["verdict"], **verdict}}
        summary["proposal"] = {**SUMMARY["proposal"], **(proposal or {})}
        return re.search("<h1>(.*?)</h1>", render(make_run(summary=summary)))[1]

    assert title(broken={"late": 3}) == (
        "late of made-up overflows at any scale; one loss scale starves early of made-up."
    )
    one = {"layer_scales": {}, "loss_scale": 2.0**20}
    assert title(one, ceiling={}) == "One loss scale serves made-up, if it begins at 2^20."
    # The late layer overflowed above 2**3, where it settled.
    assert title(one) == "early of made-up loses small gradients at any scale."
    one["loss_scale"] = 8.0
    assert title(one, ceiling={}) == "early of made-up loses small gradients at any scale."


@pytest.mark.parametrize("phases", [(), ("before",), ("before", "search")])
def test_a_partial_record_says_so(make_run, phases):
    text = words_of(render(make_run(phases, None)))
    assert "Nothing is known of made-up in float16 yet" in text
    assert "The record has no end" in text
    assert ("Where the bits go" in text) == bool(phases)


@needs_chromium
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_on_a_phone_and_on_a_desk(make_run, tmp_path, mode):
    look = Look(render(make_run()), tmp_path, *([DARK] if mode == "dark" else []))
    assert_well_shown(look, charts=3)
    assert (luminance(look.desk["paper"]) < 0.1) == (mode == "dark")
