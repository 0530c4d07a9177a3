"""Charts of the ``inspect`` report."""

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from steadygrad.studies import charts
from steadygrad.studies.charts import CRITICAL, INK, MUTED, NOISE, SCHEDULE
from steadygrad.studies.html import Html, clean
from steadygrad.studies.inspect.report.data import TITLES, Histogram, Inspection
from steadygrad.studies.inspect.schema import AFTER, BEFORE, layer_title

__all__ = ["MOST_LAYERS", "heat", "training"]

# float16: exponents of its least subnormal number, its least normal one, and the first too large.
LEAST, NORMAL, OVER = -24, -14, 16
# Columns of what has no exponent, apart from the others.
ZERO, NOT_FINITE = LEAST - 4, OVER + 4
MOST_LAYERS = 40
# Smaller shares are not drawn, overflows apart.
FAINTEST = 1e-4


def heat(found: Inspection, kind: str) -> Html:
    """Shares of each layer's gradients by exponent, with one loss scale and the proposed scales."""
    drawn = {phase: held[kind] for phase, held in found.histograms.items() if held[kind]}
    layers = [name for name in found.layers if any(name in held for held in drawn.values())]
    layers = layers[:MOST_LAYERS]

    def paint(figure: Figure, narrow: bool) -> None:
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (phase, held) in zip(panels, drawn.items(), strict=True):
            _paint_rows(axes, [held.get(name) for name in layers])
            _dress(axes, [_short_title(name, 13 if narrow else 24) for name in layers])
            axes.set_title(TITLES[phase], loc="left", fontsize=11.5, color=INK)
        panels[-1].set_xlabel("binary exponent of the gradient in float16")

    words = f"Exponents of the gradients of {kind}, layer by layer, with {_both(drawn)}."
    height = 90 + len(drawn) * (50 + 21 * len(layers))
    return charts.chart(f"heat-{kind}", words, paint, height=height)


def _both(phases: Iterable[str]) -> str:
    return " and with ".join(TITLES[phase] for phase in phases)


def _short_title(name: str, most: int) -> str:
    text = clean(layer_title(name))
    # Names of layers differ at their ends.
    return text if len(text) <= most else "…" + text[1 - most :]


def _paint_rows(axes: Axes, rows: Sequence[Histogram | None]) -> None:
    for colour in (CRITICAL, NOISE):
        boxes, alphas = [], []
        for y, row in enumerate(rows):
            for x, share in _cells(row).items() if row else ():
                # One infinity is enough to leave a step out.
                visible = share >= FAINTEST or (x >= OVER and share > 0)
                if visible and (NORMAL <= x < OVER) == (colour == CRITICAL):
                    low, high = y - 0.42, y + 0.42
                    boxes.append([(x, low), (x + 1, low), (x + 1, high), (x, high)])
                    # A tenth of the values and all of them should both be seen.
                    alphas.append(min(1.0, 0.12 + 0.88 * math.sqrt(min(1.0, share / 0.3))))
        if boxes:
            cells = PolyCollection(boxes, facecolors=colour, alpha=alphas, linewidths=0)
            axes.add_collection(cells)


def _cells(row: Histogram) -> Mapping[int, float]:
    """Shares by the left edges of their columns."""
    # What lies beyond the axis is gathered at its ends: it has been flushed, or has overflowed.
    least, most = LEAST - 2, OVER + 2
    shares = {ZERO: row.zero, NOT_FINITE: row.over, least: 0.0, most: 0.0}
    for exponent, share in row.exponents.items():
        column = min(max(exponent, least), most)
        shares[column] = shares.get(column, 0.0) + share
    return shares


def _dress(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xlim(ZERO - 0.5, NOT_FINITE + 1.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False)
    axes.set_yticks(range(len(names)), names)
    exponents = [LEAST, NORMAL, -5, 5, OVER]
    words = ["0", *(f"{exponent}".replace("-", "−") for exponent in exponents), "∞"]
    axes.set_xticks([ZERO + 0.5, *exponents, NOT_FINITE + 0.5], words)
    axes.tick_params(axis="x", labelbottom=True)
    for x in (LEAST - 1, NORMAL, OVER):
        axes.axvline(x, color=MUTED, linewidth=1.0, linestyle=(0, (3, 2)))


def training(found: Inspection) -> Html:
    """Training loss over steps, with one loss scale and with the proposed scales."""

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        labels, last = [], 1.0
        for phase, colour in ((BEFORE, SCHEDULE), (AFTER, CRITICAL)):
            curve = [(x, y) for x, y in found.losses[phase] if math.isfinite(y)]
            if curve:
                axes.plot(*zip(*curve, strict=True), color=colour, linewidth=2, marker="o", ms=4)
                labels.append((*curve[-1], TITLES[phase], colour))
                last = max(last, curve[-1][0])
        axes.set_xlim(0, last * (1.75 if narrow else 1.3))
        axes.set_xlabel("steps")
        axes.set_ylabel("loss")
        figure.canvas.draw()
        charts.label_lines(axes, labels, gap=14)

    words = f"Training loss of {found.name} over steps, with {_both(TITLES)}."
    return charts.chart("training", words, paint, height=260)
