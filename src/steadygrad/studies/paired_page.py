"""The chart of paired differences: a dot for each seed, and a bar for the interval of the mean."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from steadygrad.studies import charts
from steadygrad.studies.charts import CRITICAL, INK, MUTED, NOISE

# Number of ordinary widths beyond which an interval is cut.
MOST_WIDTHS = 6


class Row(NamedTuple):
    """A comparison.

    Attributes:
        label: Name beside the row.
        differences: By seed; none of those that diverged.
        mean: Their mean; NaN where there is none to be drawn, as where runs diverged.
        low: Lower end of its interval; ``high`` is the upper one.
        lost: Number of runs that diverged.
    """

    label: str
    differences: Sequence[float]
    mean: float
    low: float
    high: float
    lost: int = 0


def differences(name: str, spoken: str, rows: Sequence[Row], what: str) -> Markup:
    """Draws rows of differences around zero; an interval that is far wider is cut.

    Args:
        name: Prefix of the ids in the drawing.
        spoken: Text for a reader who cannot see the chart.
        rows: From top to bottom.
        what: Label of the axis.
    """
    widths = [max(abs(row.low), abs(row.high)) for row in rows if not math.isnan(row.mean)]
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

    return charts.chart(name, spoken, paint, height=70 + 26 * len(rows))


def _draw(axes: Axes, row: Row, y: int, most: float) -> None:
    """One row: the interval, the seeds and the mean; what is beyond ``most`` is a triangle."""
    axes.plot(row.differences, [y] * len(row.differences), "o", color=MUTED, ms=3.5, zorder=3)
    if row.lost:
        axes.plot([0.97 * most], [y], "x", color=NOISE, mew=2, ms=7.5)
    if math.isnan(row.mean):
        return
    low, high = max(row.low, -2 * most), min(row.high, 2 * most)
    axes.plot([low, high], [y, y], color=CRITICAL, linewidth=2, zorder=2)
    axes.plot([row.mean], [y], "D", color=CRITICAL, ms=7, zorder=4)
    for end, marker, cut in ((most, ">", row.high > most), (-most, "<", row.low < -most)):
        axes.plot([end] * cut, [y] * cut, marker, color=CRITICAL, ms=7, zorder=5)
