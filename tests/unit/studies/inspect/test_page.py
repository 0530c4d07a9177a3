"""The page of an ``inspect`` run: what is drawn is what was counted."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from msgspec.structs import replace

from steadygrad.studies.folder import Results, Run
from steadygrad.studies.inspect import page
from steadygrad.studies.inspect.page import NOT_FINITE, ZERO
from steadygrad.studies.inspect.schema import Phase
from steadygrad.studies.page import render
from tests.unit.report.conftest import no_charts  # noqa: F401
from tests.unit.studies.inspect.runs import HEADER, counts, phase, summary_of

LONG = "a.layer.with.a.name.that.is.much.longer.than.any.chart.has.room.for"
REST = "the rest of the model"
TITLES = ["one loss scale", "the proposed scales"]


def trained(name, **layers):
    """A phase; before scales have settled everything looks different."""
    calm = dict.fromkeys(("", "early", "late", LONG), counts(-8, 9, 20, 40, 20, 10, zero=1))
    first, last = (phase(name, held, {})[0].parts for held in (calm, calm | layers))
    top = 2.0 if name == "before" else 1.0
    found = enumerate(first[:4] + last[4:], start=1)
    parts = tuple(replace(part, steps=10 * n, loss=top / n) for n, part in found)
    return [Phase(phase=name, parts=parts, valid_loss=None)]


EARLY = counts(-20, 10, 20, 10, zero=60)
LATE = counts(12, 40, 40, 15, over=5)


def made_run(*results, status=None):
    total = summary_of(results, status).to_dict() if status else None
    return Run(Path(), HEADER, Results(results), total)


@pytest.fixture
def painted(monkeypatch):
    """Calls a chart of some results, and gives the panels of a wide page."""

    def paint(results, name):
        painters = {}
        monkeypatch.setattr(page, "chart", lambda *a, **k: painters.update({a[0]: a[2]}))
        page.view(made_run(*results), None)
        figure = Figure()
        painters[name](figure)
        return figure.axes

    return paint


def boxes(axes):
    """The boxes of each row: strength by left edge and colour."""
    names = [label.get_text() for label in axes.get_yticklabels()]
    found = {name: {} for name in names}
    (drawn,) = axes.collections
    for path, colour in zip(drawn.get_paths(), drawn.get_facecolor(), strict=True):
        (x, y), (_, top) = path.vertices.min(axis=0), path.vertices.max(axis=0)
        found[names[round((y + top) / 2)]][x, to_hex(colour)] = colour[3]
    return found


def test_the_map_shows_what_was_counted(painted):
    """In the second half of a phase."""
    run = trained("before", early=EARLY, late=LATE) + trained("after")
    before, after = painted(run, "heat-weights")
    for axes in (before, after):
        # float16's limits; from half of its least number on values are rounded to it.
        assert [line.get_xdata()[0] for line in axes.lines] == [-24 - 1, -14, 16]
    assert [axes.get_title(loc="left") for axes in (before, after)] == TITLES
    # The page paints these orange and blue.
    lost, fine = page.NOISE, page.CRITICAL
    calm = {(ZERO, lost), *((x, fine) for x in range(-8, -3))}
    drawn, then = boxes(before), boxes(after)
    # The early layer is all zero or subnormal; the late one has five values too large.
    assert {*drawn["early"]} == {(ZERO, lost), (-20, lost), (-19, lost), (-18, lost)}
    assert {*drawn["late"]} == {(12, fine), (13, fine), (14, fine), (NOT_FINITE, lost)}
    for row in (drawn["…" + LONG[-23:]], drawn[REST], then["early"], then["late"]):
        assert {*row} == calm
    # The more values the stronger.
    early = {x: strength for (x, _), strength in drawn["early"].items()}
    assert 0.1 < early[-20] == early[-18] < early[-19] < early[ZERO] == 1.0


def test_one_infinity_among_a_million_values_is_drawn(painted):
    many = counts(-20, 1, *[0] * 19, 10**6, *[0] * 16, 1, zero=1, over=1)
    (axes,) = painted(trained("before", late=many), "heat-weights")
    assert {x for x, _ in boxes(axes)["late"]} == {0, 17, NOT_FINITE}


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("phases", [(), ("before",), ("before", "search")])
def test_a_partial_run_says_so(phases):
    results = [end for name in phases for end in trained(name)]
    text = render(made_run(*results))
    assert "no result yet" in text
    assert ("Where the bits go" in text) == bool(phases)
    assert "ran out of its budget" in render(made_run(*results, status="budget"))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b[31mred", "a\ufffd[31mred"),
        ("a\0b\x9b\ufffe\udc80", "a\ufffdb\ufffd\ufffd\ufffd"),
        ("two\nlines\tand more", "two lines and more"),
        ("$x^2$ <b>&amp;\\alpha", "$x^2$ <b>&amp;\\alpha"),
        ("طبقة 👩\u200d👧", "طبقة 👩\u200d👧"),
        ("x" * 5000, "…" + "x" * 23),
    ],
)
def test_any_name_is_a_label(name, shown):
    page = render(made_run(*phase("before", {name: EARLY}, {}), status="budget"))
    drawings = re.findall("<svg.*?</svg>", page, re.DOTALL)
    texts = [text.text for svg in drawings for text in ET.fromstring(svg).iter("text")]
    assert shown in texts
