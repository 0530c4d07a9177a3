"""Matplotlib figures as inline SVG that follows the page: its colours, its fonts, its width."""

import io
import re
import warnings
from collections.abc import Callable
from functools import partial

from markupsafe import Markup
from matplotlib import style
from matplotlib.figure import Figure

from steadygrad.studies.text import clean

Painter = Callable[[Figure, bool], None]

# Matplotlib wants real colours. Each of these stands for one of the page's CSS variables, which
# differ between light, dark and print.
NAMES = ("ink", "muted", "grid", "paper", "critical", "noise", "schedule")
VARIABLES = {f"#0101{number:02}": name for number, name in enumerate(NAMES, start=1)}
INK, MUTED, GRID, PAPER, CRITICAL, NOISE, SCHEDULE = VARIABLES

WIDE, NARROW, PANEL = 800, 380, (240, 190)

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 11.5,
    "grid.color": GRID,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "steadygrad",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
    "ytick.left": False,
}


def chart(name: str, description: str, paint: Painter, *, height: int = 320) -> Markup:
    """Draws a chart twice: for a wide page, and for a phone, where text must not shrink.

    One page uses each name once; the description is for a reader who cannot see the chart; the
    painter's second argument says whether it is the narrow one; the height is that of the wide one.
    """
    wide = _svg(name + "-w", description, paint, (WIDE, height))
    narrow = _svg(name + "-n", description, paint, (NARROW, max(height * 0.9, 250)))
    both = '<div class="chart"><div class="wide">{}</div><div class="narrow">{}</div></div>'
    return Markup(both).format(wide, narrow)


def panel(name: str, description: str, paint: Painter) -> Markup:
    """Draws one of several small charts that stand side by side."""
    drawn = _svg(name, description, paint, PANEL)
    return Markup('<div class="chart">{}</div>').format(drawn)


def _svg(name: str, description: str, paint: Painter, size: tuple[float, float]) -> Markup:
    out = io.StringIO()
    with style.context(["default", STYLE]), warnings.catch_warnings():
        # The browser has fonts that Matplotlib lacks: a missing glyph here is none there.
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        drawing = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        paint(drawing, size[0] < WIDE)
        drawing.savefig(out, format="svg", transparent=True)
    # The stand-alone SVG becomes a part of the page.
    body = out.getvalue().partition("<svg")[2].partition(">")[2]
    # The metadata hold the date. A style would apply to the whole page; style.css has its rule.
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    # One page has several drawings. Only in tags: a label that spells `id="` stays what it is.
    own = partial(re.sub, r'(\bid="|url\(#|\bhref="#)', rf"\g<1>{name}-")
    body = re.sub(r"<[^>]*>", lambda tag: own(tag.group().replace("xlink:href", "href")), body)
    view = f"0 0 {size[0]:g} {size[1]:g}"
    opening = Markup('<svg role="img" aria-label="{}" viewBox="{}">').format(
        clean(description), view
    )
    return opening + Markup(body.strip())


def label(text: str, most: int = 24) -> str:
    """A name from a record, in one line short enough to stand in a chart: names differ at ends."""
    text = " ".join(clean(text).split())
    return text if len(text) <= most else "…" + text[1 - most :]
