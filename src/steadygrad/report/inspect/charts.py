"""Charts of the ``inspect`` report."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from steadygrad.record.schema.inspect import AFTER, BEFORE, layer_title
from steadygrad.report import charts
from steadygrad.report.charts import CRITICAL, INK, MUTED, NOISE, SCHEDULE
from steadygrad.report.inspect.data import TITLES, Histogram, Inspection
from steadygrad.report.page import Html, clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    layers = [n for n in found.layers if any(n in found.histograms[p][kind] for p in TITLES)]
    layers = layers[:MOST_LAYERS]
    phases = [phase for phase in TITLES if found.histograms[phase][kind]]

    def paint(figure: "Figure", narrow: bool) -> None:
        panels = figure.subplots(len(phases), 1, sharex=True, squeeze=False)[:, 0]
        for axes, phase in zip(panels, phases, strict=True):
            own = found.histograms[phase][kind]
            _paint_rows(axes, [own.get(name) for name in layers])
            _dress(axes, [_name(name, narrow) for name in layers], TITLES[phase])
        panels[-1].set_xlabel("binary exponent of the gradient in float16")

    words = f"Exponents of the gradients of {kind}, layer by layer, with {_both(phases)}."
    height = 90 + len(phases) * (50 + 21 * len(layers))
    return charts.chart(f"heat-{kind}", words, paint, height=height)


def _both(phases: Sequence[str]) -> str:
    return " and with ".join(TITLES[phase] for phase in phases)


def _name(name: str, narrow: bool) -> str:
    text = clean(layer_title(name))
    most = 13 if narrow else 24
    # Names of layers differ at their ends.
    return text if len(text) <= most else "…" + text[1 - most :]


def _paint_rows(axes: "Axes", rows: Sequence[Histogram | None]) -> None:
    from matplotlib.collections import PolyCollection

    for colour in (CRITICAL, NOISE):
        boxes, alphas = [], []
        for y, row in enumerate(rows):
            for x, share in _cells(row):
                # One infinity is enough to leave a step out.
                drawn = share >= FAINTEST or (x >= OVER and share > 0)
                if (NORMAL <= x < OVER) == (colour == CRITICAL) and drawn:
                    boxes.append(
                        [(x, y - 0.42), (x + 1, y - 0.42), (x + 1, y + 0.42), (x, y + 0.42)]
                    )
                    alphas.append(_strength(share))
        if boxes:
            cells = PolyCollection(boxes, facecolors=colour, alpha=alphas, linewidths=0)
            axes.add_collection(cells)


def _cells(row: Histogram | None) -> Iterator[tuple[float, float]]:
    """Left edges of columns, and shares."""
    if row is None:
        return
    yield ZERO, row.zero
    yield NOT_FINITE, row.over
    # What lies beyond the axis is gathered at its ends: it has been flushed, or has overflowed.
    flushed = sum(share for e, share in row.exponents.items() if e < LEAST - 1)
    yield LEAST - 2, flushed
    beyond = sum(share for e, share in row.exponents.items() if e > OVER + 1)
    yield OVER + 2, beyond
    yield from ((e, s) for e, s in row.exponents.items() if LEAST - 1 <= e <= OVER + 1)


def _strength(share: float) -> float:
    """A tenth of the values and all of them should both be seen, and a thousandth not be lost."""
    return min(1.0, 0.12 + 0.88 * math.sqrt(min(1.0, share / 0.3)))


def _dress(axes: "Axes", names: Sequence[str], title: str) -> None:
    axes.set_xlim(ZERO - 0.5, NOT_FINITE + 1.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False)
    axes.set_yticks(range(len(names)), names)
    ticks = [ZERO + 0.5, LEAST, NORMAL, -5, 5, OVER, NOT_FINITE + 0.5]
    words = ["0", *(f"{int(t)}".replace("-", "−") for t in ticks[1:-1]), "∞"]
    axes.set_xticks(ticks, words)
    axes.tick_params(axis="x", labelbottom=True)
    for x in (LEAST - 1, NORMAL, OVER):
        axes.axvline(x, color=MUTED, linewidth=1.0, linestyle=(0, (3, 2)))
    axes.set_title(title, loc="left", fontsize=11.5, color=INK)


def training(found: Inspection) -> Html:
    """Training loss over steps, with one loss scale and with the proposed scales."""

    def paint(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        labels, last = [], 1.0
        for phase, colour in ((BEFORE, SCHEDULE), (AFTER, CRITICAL)):
            curve = [(x, y) for x, y in found.losses[phase] if math.isfinite(y)]
            if curve:
                xs, ys = zip(*curve, strict=True)
                axes.plot(xs, ys, color=colour, linewidth=2, marker="o", ms=4)
                labels.append((xs[-1], ys[-1], TITLES[phase], colour))
                last = max(last, xs[-1])
        axes.set_xlim(0, last * (1.75 if narrow else 1.3))
        axes.set_xlabel("steps")
        axes.set_ylabel("loss")
        figure.canvas.draw()
        charts.label_lines(axes, labels, gap=14)

    words = f"Training loss of {found.name} over steps, with {_both(list(TITLES))}."
    return charts.chart("training", words, paint, height=260)
