"""Charts and tables that the template ``page.html`` shows."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from steadygrad.studies.folder import Run
from steadygrad.studies.inspect import analysis
from steadygrad.studies.inspect.analysis import LEAST, NORMAL, OVER, Exponents, Place
from steadygrad.studies.inspect.schema import AFTER, BEFORE, KINDS, TITLES, Summary
from steadygrad.studies.inspect.words import layer_title, power
from steadygrad.studies.page import CRITICAL, INK, MUTED, NOISE, chart, label

# Columns of what has no exponent, apart from the others.
ZERO, NOT_FINITE = LEAST - 4, OVER + 4
MOST_LAYERS = 40
# Smaller shares are not drawn, overflows apart.
FAINTEST = 1e-4
# The trainings that are shown.
SHOWN = BEFORE, AFTER


def view(run: Run, found: Summary | None) -> Mapping[str, object]:
    """The values of the template's own sections."""
    phases = analysis.by_phase(run.results)
    layers = analysis.layers_of(*phases.values())
    held = {phase: analysis.counts_of(phases[phase]) for phase in SHOWN}
    kinds = [kind for kind in KINDS if any(kind == k for at in held.values() for _, k in at)]
    return {
        "titles": {phase: TITLES[phase] for phase in SHOWN if phases[phase]},
        "heats": {kind: _heat(held, layers[:MOST_LAYERS], kind) for kind in kinds},
        "more_layers": max(0, len(layers) - MOST_LAYERS),
        "layer_title": layer_title,
        "power": power,
    }


def _heat(held: Mapping[str, Mapping[Place, Exponents]], layers: list[str], kind: str) -> Markup:
    """Shares of each layer's gradients by exponent, with one loss scale and the proposed scales."""
    drawn = [phase for phase in SHOWN if any(k == kind for _, k in held[phase])]
    names = [name for name in layers if any((name, kind) in held[phase] for phase in drawn)]

    def paint(figure: Figure) -> None:
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
        titles = [label(layer_title(name)) for name in names]
        for axes, phase in zip(panels, drawn, strict=True):
            _paint(axes, [held[phase].get((name, kind)) for name in names])
            axes.set_ylim(len(names) - 0.4, -0.6)
            axes.set_yticks(range(len(names)), titles)
            axes.set_title(TITLES[phase], loc="left", fontsize=11.5, color=INK)
        panels[-1].set_xlabel("binary exponent of the gradient in float16")

    spoken = f"Exponents of the gradients of {kind}, layer by layer, before and after."
    height = 90 + len(drawn) * (50 + 21 * len(names))
    return chart(f"heat-{kind}", spoken, paint, (800, height))


def _paint(axes: Axes, rows: Sequence[Exponents | None]) -> None:
    boxes, colours = [], []
    for y, row in enumerate(rows):
        low, high = y - 0.42, y + 0.42
        for x, share in _cells(row).items() if row else ():
            # One infinity is enough to leave a step out.
            if share >= FAINTEST or (x >= OVER and share > 0):
                colour = CRITICAL if NORMAL <= x < OVER else NOISE
                # A tenth of the values and all of them should both be seen.
                alpha = min(1.0, 0.12 + 0.88 * math.sqrt(min(1.0, share / 0.3)))
                boxes.append([(x, low), (x + 1, low), (x + 1, high), (x, high)])
                colours.append(to_rgba(colour, alpha))
    axes.add_collection(PolyCollection(boxes, facecolors=colours, linewidths=0))
    axes.set_xlim(ZERO - 0.5, NOT_FINITE + 1.5)
    axes.grid(visible=False)
    exponents = [LEAST, NORMAL, -5, 5, OVER]
    words = ["0", *(f"{exponent}".replace("-", "−") for exponent in exponents), "∞"]
    axes.set_xticks([ZERO + 0.5, *exponents, NOT_FINITE + 0.5], words)
    axes.tick_params(axis="x", labelbottom=True)
    for x in (LEAST - 1, NORMAL, OVER):
        axes.axvline(x, color=MUTED, linewidth=1.0, linestyle=(0, (3, 2)))


def _cells(row: Exponents) -> dict[int, float]:
    """Shares by the left edges of their columns."""
    columns = Counter[int]()
    for exponent, count in row.items():
        # What lies beyond the axis is gathered at its ends: it was flushed, or has overflowed.
        ends = (LEAST - 2, OVER + 2) if math.isfinite(exponent) else (ZERO, NOT_FINITE)
        columns[int(min(max(exponent, ends[0]), ends[1]))] += count
    return {column: count / max(1, row.total()) for column, count in columns.items()}
