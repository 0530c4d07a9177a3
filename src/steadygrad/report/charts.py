"""Matplotlib figures as inline SVG that follows the page: its colours, its fonts, its width."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from steadygrad._checks import InputError
from steadygrad.report.numbers import short, size
from steadygrad.report.page import Html, clean, el, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Painter",
    "batch_axis",
    "chart",
    "dots",
    "label",
    "label_lines",
    "panel",
    "samples_axis",
]

Painter = Callable[["Figure", bool], None]

# Matplotlib wants real colours. Each of these stands for one of the page's CSS variables, which
# differ between light, dark and print.
INK, MUTED, GRID, PAPER = "#010101", "#010102", "#010103", "#010104"
CRITICAL, NOISE, SCHEDULE, BAND = "#010105", "#010106", "#010107", "#010108"
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    CRITICAL: "critical",
    NOISE: "noise",
    SCHEDULE: "schedule",
    BAND: "band",
}

WIDE, NARROW, PANEL = 800, 380, 240

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 11,
    "axes.linewidth": 1.0,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 11.5,
    "grid.color": GRID,
    "grid.linewidth": 1.0,
    "legend.borderaxespad": 0.0,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "steadygrad",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "xtick.labelsize": 10.5,
    "xtick.minor.bottom": False,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
    "ytick.labelsize": 10.5,
    "ytick.left": False,
    "ytick.minor.left": False,
}


def chart(name: str, description: str, paint: Painter, *, height: int = 320) -> Html:
    """Draws a chart twice: for a wide page, and for a phone, where text must not shrink.

    Args:
        name: Prefix of all ids in the drawing; one page uses each name once.
        description: What a reader who cannot see the chart is told.
        paint: Draws into an empty figure; its second argument says whether it is the narrow one.
        height: Of the wide drawing, in units of which the page is 800 wide.
    """
    wide = _svg(name + "-w", description, paint, (WIDE, height), narrow=False)
    narrow = _svg(name + "-n", description, paint, (NARROW, max(height * 0.9, 250)), narrow=True)
    return el("div.chart", el("div.wide", wide), el("div.narrow", narrow))


def panel(name: str, description: str, paint: Painter, *, height: int = 200) -> Html:
    """Draws one of several small charts that stand side by side."""
    return el("div.chart", _svg(name, description, paint, (PANEL, height), narrow=True))


def _svg(
    name: str, description: str, paint: Painter, size: tuple[float, float], *, narrow: bool
) -> Html:
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "A report needs matplotlib, which is not installed. "
            'Remedy: pip install "steadygrad[cli]"'
        ) from error
    out = io.StringIO()
    with style.context(["default", STYLE]), warnings.catch_warnings():
        # The browser has fonts that Matplotlib lacks: a missing glyph here is none there.
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        drawing = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        paint(drawing, narrow)
        drawing.savefig(out, format="svg", transparent=True)
    return _adopt(out.getvalue(), name, description, size)


def _adopt(svg: str, name: str, description: str, size: tuple[float, float]) -> Html:
    """Makes a stand-alone SVG part of the page."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    # The metadata hold the date. A style would apply to the whole page; style.css has its rule.
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    # Only in tags: a label that spells `id="` or a colour is content and stays what it is.
    body = re.sub(r"<[^>]*>", lambda tag: _adopt_tag(tag.group(), name), body)
    spoken = escape(description)
    view = f"0 0 {size[0]:g} {size[1]:g}"
    return Html(f'<svg role="img" aria-label="{spoken}" viewBox="{view}">{body}'.strip())


def _adopt_tag(tag: str, name: str) -> str:
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r"url\(#", f"url(#{name}-", tag)
    tag = re.sub(r'xlink:href="#', f'href="#{name}-', tag)
    tag = re.sub(r"font-family:[^;\"]*(&quot;|')?[^;\"]*;?", "", tag)
    return re.sub(
        r"#0101[0-9a-f]{2}\b",
        lambda colour: f"var(--{VARIABLES.get(colour.group(), 'ink')})",
        tag,
    )


def label(text: str) -> str:
    """A name from a record, short enough to stand in a chart."""
    text = clean(text)
    return text if len(text) <= 24 else text[:23] + "…"


def dots(
    axes: "Axes", x: float, ys: Sequence[float], colour: str = CRITICAL, *, size: float = 8
) -> None:
    """Draws dots above one place, each with a rim that parts it from its neighbours."""
    axes.plot([x] * len(ys), ys, "o", color=colour, mec=PAPER, mew=size / 7, ms=size, zorder=4)


def samples_axis(axes: "Axes", low: float, high: float, sample: str, *, narrow: bool) -> None:
    """Makes x a logarithmic axis of samples seen, with readable ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = len(str(int(high / low)))
    subs: Sequence[float] = (1, 2, 5) if decades <= (2 if narrow else 3) else (1,)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlabel(f"{label(sample)} seen")


def batch_axis(axes: "Axes", which: str, sizes: Sequence[float], most: int) -> None:
    """Makes an axis of batch sizes: base-2 logarithm, ticks where batch sizes are.

    Args:
        axes: Where.
        which: ``"x"`` or ``"y"``.
        sizes: Batch sizes, ascending.
        most: The most ticks there is room for.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    getattr(axes, f"set_{which}scale")("log", base=2)
    axis = getattr(axes, f"{which}axis")
    every = max(1, -(-len(sizes) // most))
    axis.set_major_locator(FixedLocator(list(sizes[::every])))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))


def label_lines(
    axes: "Axes", labels: Sequence[tuple[float, float, str, str]], *, gap: float
) -> None:
    """Writes names beside the right ends of lines, moved apart where they would touch.

    Args:
        axes: With its limits already set.
        labels: ``(x, y, name, colour)`` in data units.
        gap: Least distance of two names, in points.
    """
    to_points = 72 / axes.figure.dpi
    spots = [axes.transData.transform((x, y))[1] * to_points for x, y, _, _ in labels]
    order = sorted(range(len(labels)), key=spots.__getitem__)
    placed = [spots[index] for index in order]
    for _ in range(20):
        for lower in range(len(placed) - 1):
            overlap = gap - (placed[lower + 1] - placed[lower])
            if overlap > 0:
                placed[lower] -= overlap / 2
                placed[lower + 1] += overlap / 2
    for index, spot in zip(order, placed, strict=True):
        x, y, name, colour = labels[index]
        axes.annotate(
            name,
            (x, y),
            xytext=(9, spot - spots[index]),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )
