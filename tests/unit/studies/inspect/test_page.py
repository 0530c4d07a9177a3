"""The page of an ``inspect`` run: what is drawn is what was counted."""

import html
import re
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from msgspec.structs import replace

from steadygrad.studies import charts
from steadygrad.studies.folder import Results, Run
from steadygrad.studies.inspect import page
from steadygrad.studies.inspect.page import NOT_FINITE, ZERO
from steadygrad.studies.inspect.schema import Histogram, Part, Phase
from steadygrad.studies.page import render
from tests.unit.report.conftest import no_charts  # noqa: F401
from tests.unit.report.test_browser import DARK, Look, assert_well_shown, needs_chromium
from tests.unit.studies.inspect.runs import HEADER, counts, parts, summary_of

LONG = "a.layer.with.a.name.that.is.much.longer.than.any.chart.has.room.for"
REST = "the rest of the model"
LAYERS = ["", "early", "late", LONG]
TITLES = ["one loss scale", "the proposed scales"]
quick = pytest.mark.usefixtures("no_charts")


def trained(phase, names):
    """A phase; the early layer is flushed, and the late one overflows, where one scale is tried."""
    calm = {name: counts(-8, 9, 20, 40, 20, 10, zero=1) for name in names}
    one = {"early": counts(-20, 10, 20, 10, zero=60), "late": counts(12, 40, 40, 15, over=5)}
    held, late = {name: one.get(name, calm[name]) for name in names}, {"late": 1}
    if phase != "before":
        held, late = calm, {}
    found = parts(phase, held, {}, late, settled=3.0, skipped=len(late), activations=held)
    # Before the scales have settled everything looks different.
    found[:4] = [replace(part, activations=calm, weights=calm) for part in found[:4]]
    top = 2.0 if phase == "before" else 1.0
    return [
        replace(p, steps=10 * n, samples=40 * n, loss=top / n) for n, p in enumerate(found, start=1)
    ]


def made_run(phases=("before", "search", "after"), *, names=LAYERS, status="complete"):
    """A run with the summary that the study itself would write, as it ended."""
    found = [part for phase in phases for part in trained(phase, names)]
    found += [Phase(phase=phase, valid_loss=0.1234) for phase in phases if phase != "search"]
    total = summary_of(found, status).to_dict() if status else None
    return Run(Path(), HEADER, Results(found), total)


def words_of(drawn):
    body = re.sub(r"<style.*?</style>|<svg.*?</svg>", " ", drawn, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


@quick
def test_the_page_says_what_the_summary_says():
    run = made_run()
    text = words_of(render(run))
    assert text.startswith(run.summary["answer"])
    assert all(remark in text for remark in run.summary["remarks"])
    assert (
        "one loss scale 80 8 2^3 0.2500 0.1234 the proposed scales 80 0 2^3 0.1250 0.1234" in text
    )
    row = "60.00% 40.00% 0.00%"
    assert text.count(f"early {row} {row} 0 steps") == 1
    row = "1.00% 0.00% 0.00%"
    assert text.count(f"late {row} {row} 0 steps") == 1
    # Calm in both trainings.
    assert text.count(f"{REST} {row} {row} 0 steps") == 2


@pytest.fixture
def painted(monkeypatch):
    """Calls a chart of a run, and gives the figure that it would have drawn on a wide page."""

    def paint(run, name):
        painters = {}
        monkeypatch.setattr(charts, "chart", lambda *a, **k: painters.update({a[0]: a[2]}))
        page.view(run, None)
        figure = Figure()
        painters[name](figure, False)
        return figure

    return paint


def boxes(axes):
    """The boxes of the drawing: strength by row, left edge and colour."""
    names = [label.get_text() for label in axes.get_yticklabels()]
    found = {}
    (drawn,) = axes.collections
    for path, colour in zip(drawn.get_paths(), drawn.get_facecolor(), strict=True):
        (x, y), (_, top) = path.vertices.min(axis=0), path.vertices.max(axis=0)
        found[names[round((y + top) / 2)], x, to_hex(colour)] = colour[3]
    return found


def test_the_map_shows_what_was_counted(painted):
    """In the second half of a phase."""
    before, after = painted(made_run(), "heat-weights").axes
    for axes in (before, after):
        # float16's limits; from half of its least number on values are rounded to it.
        assert [line.get_xdata()[0] for line in axes.lines] == [-24 - 1, -14, 16]
    assert [axes.get_title(loc="left") for axes in (before, after)] == TITLES
    long = "…" + LONG[-23:]
    # The page paints these orange and blue.
    lost, fine = charts.NOISE, charts.CRITICAL
    calm = {(ZERO, lost), *((x, fine) for x in range(-8, -3))}
    drawn = boxes(before)

    def row(layer):
        return {(x, colour) for name, x, colour in drawn if name == layer}

    # The early layer is all zero or subnormal; the late one has five values too large.
    assert row("early") == {(ZERO, lost), (-20, lost), (-19, lost), (-18, lost)}
    assert row("late") == {(12, fine), (13, fine), (14, fine), (NOT_FINITE, lost)}
    assert row(long) == row(REST) == calm
    # The more values the stronger.
    early = {x: alpha for (name, x, _), alpha in drawn.items() if name == "early"}
    assert 0.1 < early[-20] == early[-18] < early[-19] < early[ZERO] == 1.0
    drawn = boxes(after)
    assert row("early") == row("late") == row(long) == calm


def test_one_infinity_among_a_million_values_is_drawn(painted):
    run, found = made_run(), []
    many = Histogram(zero=1, low=-20, counts=(1, *[0] * 19, 10**6, *[0] * 16, 1), over=1)
    for result in run.results:
        if isinstance(result, Part):
            result = replace(result, weights={**result.weights, "late": many})
        found.append(result)
    drawn = boxes(painted(Run(Path(), HEADER, Results(found), None), "heat-weights").axes[0])
    assert {x for name, x, _ in drawn if name == "late"} == {0, 17, NOT_FINITE}


def test_the_curves_are_the_losses(painted):
    (axes,) = painted(made_run(), "training").axes
    curves = {line.get_color(): list(line.get_ydata()) for line in axes.lines}
    assert curves[charts.SCHEDULE] == [2.0 / n for n in range(1, 9)]
    assert curves[charts.CRITICAL] == [1.0 / n for n in range(1, 9)]
    named = {text.get_color(): text.get_text() for text in axes.texts}
    assert named == dict(zip((charts.SCHEDULE, charts.CRITICAL), TITLES, strict=True))


@quick
@pytest.mark.parametrize("phases", [(), ("before",), ("before", "search")])
def test_a_partial_run_says_so(phases):
    text = words_of(render(made_run(phases, status=None)))
    assert "no result yet" in text
    assert ("Where the bits go" in text) == bool(phases)
    assert words_of(render(made_run(phases, status="budget"))).count("budget before all steps") == 1


@pytest.mark.few(1)
@needs_chromium
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_on_a_phone_and_on_a_desk(tmp_path, mode):
    look = Look(render(made_run()), tmp_path, *([DARK] if mode == "dark" else []))
    assert_well_shown(look, charts=3)
