"""Pages escape every text and load nothing; charts follow them; numbers are written for people."""

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import pytest

from steadygrad.studies.page import CRITICAL, INK, PANEL, VARIABLES, chart, label, render
from steadygrad.studies.text import loss, show
from tests.unit.report.conftest import made_run

NASTY = '<script>alert(1)</script> id="x" #010105 $x$ 字\x00'


def paint(figure: Any) -> None:
    axes = figure.subplots()
    axes.plot([1, 2, 3], [1, 4, 2], "o-", color=CRITICAL)
    axes.fill_between([1, 2], [1, 1], [2, 2], color=INK)
    axes.set_title("title")
    axes.set_xlabel(label(NASTY))
    axes.annotate("", (1, 1), xytext=(0, 9), textcoords="offset points", arrowprops={"color": INK})


def svgs(html: str) -> list[ET.Element]:
    found = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    return [ET.fromstring(svg) for svg in found]


def texts(svg: ET.Element) -> list[str]:
    return [element.text or "" for element in svg.iter("text")]


def test_charts_refer_to_their_own_parts():
    page = chart("one", "a", paint) + chart("two", "b", paint, PANEL)
    wide, small = svgs(page)
    assert (wide.get("viewBox"), small.get("viewBox")) == ("0 0 800 320", "0 0 240 190")
    assert "title" in texts(wide)
    assert wide.get("width") is None  # the page decides
    ids = [part.get("id") for svg in (wide, small) for part in svg.iter() if part.get("id")]
    assert len(ids) == len(set(ids)) > 20
    wanted = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', page)
    assert wanted
    assert {a or b for a, b in wanted} <= set(ids)


def test_a_page_is_self_contained_and_its_drawings_have_its_own_colours():
    page = render(made_run())
    for part in ("width=device-width", "default-src 'none'", "prefers-color-scheme: dark"):
        assert part in page
    for loading in ("<script", "@import", "src=", "url(http"):
        assert loading not in page
    drawn = "".join(re.findall(r"<[^>]*>", chart("one", "a", paint, PANEL)))
    used = set(re.findall(r"#[0-9a-fA-F]{6}\b", drawn))
    assert {CRITICAL, INK} <= used <= set(VARIABLES)
    assert "<style" not in drawn  # it would apply to the whole page
    for colour in used:
        assert f'[style*="fill: {colour}"] {{ fill: var(--{VARIABLES[colour]})' in page


def test_the_users_matplotlib_settings_do_not_matter():
    before = chart("one", "a", paint, PANEL)
    with mpl.rc_context({"svg.fonttype": "path", "lines.linewidth": 9, "font.size": 30}):
        assert chart("one", "a", paint, PANEL) == before
        assert mpl.rcParams["lines.linewidth"] == 9


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x85", "\ud800", "\uffff"])
@pytest.mark.usefixtures("no_charts")
def test_a_name_is_text_wherever_it_stands(character: str):
    page = render(
        made_run(task={"sample": f"a{character}b", "name": NASTY, "provenance": {NASTY: NASTY}})
    )
    assert "a\ufffdb" in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    page.encode()


INF, NAN = math.inf, math.nan
WRITTEN = {
    show: {
        None: "–", NAN: "–", INF: "∞", -INF: "−∞", True: "yes", 0: "0", 254_720: "254,720",
        -3: "−3", 1234.5: "1,234", 99.96: "100", 0.0123: "0.0123", 0.00282842: "0.00283",
        -0.0004: "−4e−4", 1.25e-9: "1.25e−9", 3e8: "3e8", 10.0: "10", "sqrt": "sqrt",
    },
    loss: {
        1.7: "1.7000", -2.5: "−2.5000", NAN: "–", INF: "∞", 2: "2.0000", 2.26849: "2.2685",
        1.2e-5: "1.2e−5", 0.01234: "0.01234", None: "–",
    },
}  # fmt: skip


@pytest.mark.parametrize("function", WRITTEN)
def test_a_number(function: Callable[[object], str]):
    assert {value: function(value) for value in WRITTEN[function]} == WRITTEN[function]
    assert show(0.0) == "0"
