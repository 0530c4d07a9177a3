"""Matplotlib figures as inline SVG that follows the page: its colours, its fonts, its width."""

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from steadygrad.studies.text import clean

Painter = Callable[[Figure, bool], None]

# Matplotlib wants real colours. Each of these stands for one of the page's CSS variables, which
# differ between light, dark and print.
NAMES = ("ink", "muted", "grid", "paper", "critical", "noise")
VARIABLES = {f"#0101{number:02}": name for number, name in enumerate(NAMES, start=1)}
INK, MUTED, GRID, PAPER, CRITICAL, NOISE = VARIABLES

WIDE, NARROW, PANEL = 800, 380, (240, 190)
# Number of ordinary widths beyond which an interval is cut.
MOST_WIDTHS = 6

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


class Row(NamedTuple):
    """A comparison: differences by seed, and the interval of their mean.

    A difference that is not finite is of a run that diverged, and no mean is drawn then.
    """

    label: str
    differences: Sequence[float]
    mean: float
    low: float
    high: float

    @property
    def is_whole(self) -> bool:
        """Whether no run diverged."""
        return all(map(math.isfinite, self.differences))


def differences(name: str, spoken: str, rows: Sequence[Row], what: str) -> Markup:
    """Draws paired differences: a dot for each seed, and a bar for the interval of their mean.

    An interval that is far wider than the others is cut. ``name`` and ``spoken`` are those of a
    chart; ``what`` is the label of the axis.
    """
    widths = [max(abs(row.low), abs(row.high)) for row in rows if row.is_whole]
    widths = [width for width in widths if width < math.inf]
    # Without any spread or difference it is 1.
    most = (min(max(widths), MOST_WIDTHS * median(widths)) if widths else 0.0) or 1.0

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        for y, row in enumerate(rows):
            _draw(axes, row, y, most)
        axes.set_xlim(-1.05 * most, 1.05 * most)
        axes.axvline(0, color=INK, linewidth=1.0, zorder=1)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False)
        axes.locator_params(axis="x", nbins=4 if narrow else 8)
        axes.set_xlabel(what)

    return chart(name, spoken, paint, height=70 + 26 * len(rows))


def _draw(axes: Axes, row: Row, y: int, most: float) -> None:
    """One row: the interval, the seeds and the mean; what is beyond ``most`` is a triangle."""
    finite = [x for x in row.differences if math.isfinite(x)]
    axes.plot(finite, [y] * len(finite), "o", color=MUTED, ms=3.5, zorder=3)
    if not row.is_whole:
        # On the left where only the other run of each such pair diverged.
        ends = {-0.97 if x == -math.inf else 0.97 for x in {*row.differences} - {*finite}}
        axes.plot([end * most for end in ends], [y] * len(ends), "x", color=NOISE, mew=2, ms=7.5)
        return
    low, high = max(row.low, -2 * most), min(row.high, 2 * most)
    axes.plot([low, high], [y, y], color=CRITICAL, linewidth=2, zorder=2)
    axes.plot([row.mean], [y], "D", color=CRITICAL, ms=7, zorder=4)
    for end, marker, cut in ((most, ">", row.high > most), (-most, "<", row.low < -most)):
        axes.plot([end] * cut, [y] * cut, marker, color=CRITICAL, ms=7, zorder=5)
