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
    """Draws rows of differences around zero; an interval that is far wider is cut.

    ``name`` and ``spoken`` are those of a chart; ``what`` is the label of the axis.
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

    return charts.chart(name, spoken, paint, height=70 + 26 * len(rows))


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
