"""Charts of the ``advise`` report over batch sizes: the branches, and the trade-off they imply."""

import math
from typing import TYPE_CHECKING

from steadygrad.report import charts
from steadygrad.report.advise.data import Advice, Point, batch_of, rows_of
from steadygrad.report.charts import CRITICAL, INK, PAPER, SCHEDULE
from steadygrad.report.numbers import number, show, size
from steadygrad.report.page import Html, el

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["branches", "measured", "tradeoff"]


def branches(advice: Advice) -> Html:
    """One small chart a point: the loss at the end of each branch over its batch size."""
    panels = [
        _branch_panel(f"branches{index}", point, advice)
        for index, point in enumerate(advice.points)
        if point.batch_sizes
    ]
    return el("div.panels", panels)


def _branch_panel(name: str, point: Point, advice: Advice) -> Html:
    sizes = point.batch_sizes
    level = point.tolerance_level

    def paint(figure: "Figure", _: bool) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        charts.batch_axis(axes, "x", sizes, 6)
        axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
        losses = [point.losses(each) for each in sizes]
        for each, some in zip(sizes, losses, strict=True):
            axes.plot([each] * len(some), some, "o", color=CRITICAL, ms=5.5, alpha=0.75, mew=0)
        means = [sum(some) / len(some) for some in losses]
        axes.plot(sizes, means, color=CRITICAL, linewidth=1.6)
        if math.isfinite(level):
            axes.axhline(level, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        _shade_critical(axes, point)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel("batch size")

    title = f"after {show(point.samples)} {advice.samples}"
    words = f"Validation loss at the end of each branch over its batch size, {title}."
    return el("div", el("h3", title), charts.panel(name, words, paint))


def _shade_critical(axes: "Axes", point: Point) -> None:
    value, low, high = (number(point.critical.get(key)) for key in ("value", "low", "high"))
    left, right = axes.get_xlim()
    if low > 0 and high > 0:
        axes.axvspan(max(low, left), min(high, right), color=charts.BAND, zorder=0, linewidth=0)
    if left <= value <= right:
        axes.axvline(value, color=CRITICAL, linewidth=1.2, zorder=1)


def tradeoff(advice: Advice) -> Html:
    """Steps against samples: the fitted hyperbola, the batch sizes on it, and what was measured."""
    critical = number(advice.tradeoff.get("critical_batch"))
    rows = [row for row in rows_of(advice.tradeoff, "rows") if batch_of(row) > 0]
    sizes = [batch_of(row) for row in rows]
    ends = min([*sizes, critical]) / 1.3, max([*sizes, critical]) * 1.5

    def paint(figure: "Figure", _: bool) -> None:
        axes = figure.subplots()
        first, last = ends
        grid = [first * (last / first) ** (k / 80) for k in range(81)]
        axes.plot(*zip(*(_model(b, critical) for b in grid), strict=True), color=SCHEDULE, lw=2)
        for spot in measured(advice):
            _draw_measured(axes, spot, critical)
        for each in sizes:
            _dot(axes, _model(each, critical), size(each), INK, (7, 7))
        # Right of the curve stand the names of batch sizes; beyond the last there is room.
        between = min(sizes, default=critical) < critical < max(sizes, default=critical)
        beside = (-9.0, -13.0) if between else (8.0, 7.0)
        _dot(axes, (2, 2), f"critical: {size(critical)}", CRITICAL, beside)
        _ratio_axes(axes)

    words = f"Samples against steps to one loss; critical batch size {show(critical)}."
    return charts.chart("tradeoff", words, paint, height=340)


Spot = tuple[float, float]


def _model(batch_size: float, critical: float) -> Spot:
    """Steps and samples, as multiples of the fewest, at one batch size."""
    return 1 + critical / batch_size, 1 + batch_size / critical


def _dot(axes: "Axes", spot: Spot, label: str, colour: str, offset: Spot) -> None:
    axes.plot(*spot, "o", color=colour, mec=PAPER, mew=1.5, ms=8, zorder=3)
    side = "left" if offset[0] > 0 else "right"
    axes.annotate(
        label, spot, xytext=offset, textcoords="offset points", color=colour, ha=side, zorder=5
    )


def _draw_measured(axes: "Axes", spot: tuple[float, float, float], critical: float) -> None:
    """A ring, and a thin line to the place on the curve where its batch size should be."""
    each, steps, samples = spot
    expected = _model(each, critical)
    axes.plot([steps, expected[0]], [samples, expected[1]], color=CRITICAL, lw=0.9, alpha=0.6)
    axes.plot(steps, samples, "o", mfc="none", mec=CRITICAL, mew=1.6, ms=11, zorder=4)


def _ratio_axes(axes: "Axes") -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.yaxis.set_major_locator(FixedLocator([1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{size(value)}×"))
    axes.set_xlabel("steps, relative to the fewest possible")
    axes.set_ylabel("samples, relative to the fewest")


def measured(advice: Advice) -> list[tuple[float, float, float]]:
    """Batch size, steps and samples of what was measured, on the axes of the trade-off.

    Excesses are relative to the smallest batch size b, which itself needs ``1 + b/critical`` of
    the fewest samples; steps follow as samples over batch size. They come from the rows of the
    trade-off, or from the last point of training when the rows have none.
    """
    critical = number(advice.tradeoff.get("critical_batch"))
    rows = rows_of(advice.tradeoff, "rows")
    excess = {batch_of(row): number(row.get("excess")) for row in rows}
    if not any(math.isfinite(extra) for extra in excess.values()):
        excess = (list(advice.points) or [Point()])[-1].excess()
    spots = []
    for each, extra in excess.items():
        samples = (1 + min(excess) / critical) * (1 + extra)
        if 0 < samples < math.inf:
            spots.append((each, samples * critical / each, samples))
    return spots
