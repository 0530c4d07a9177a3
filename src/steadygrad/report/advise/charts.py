"""Charts of the ``advise`` report that run along training."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from steadygrad.report import charts
from steadygrad.report.advise.data import Advice, Point, batch_of
from steadygrad.report.charts import CRITICAL, INK, MUTED, NOISE, PAPER, SCHEDULE
from steadygrad.report.numbers import number
from steadygrad.report.page import Html

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["scales", "training"]


def training(advice: Advice) -> Html:
    """Training loss over samples, with the points at which the study measured."""

    def paint(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        xs, ys = zip(*_thin(advice.training, 240 if narrow else 480), strict=True)
        axes.plot(xs, ys, color=SCHEDULE, linewidth=0.8, alpha=0.55)
        xs, ys = zip(*_thin(advice.training, 24 if narrow else 40), strict=True)
        axes.plot(xs, ys, color=INK, linewidth=1.8)
        for point in advice.points:
            _mark_point(axes, point)
        ends = [advice.training[0][0], advice.training[-1][0], *_positions(advice)]
        charts.samples_axis(axes, min(ends) / 1.1, max(ends) * 1.15, advice.samples, narrow=narrow)
        axes.set_ylabel("loss")

    words = f"Training loss of {advice.name} over {advice.samples} seen."
    return charts.chart("training", words, paint, height=280)


def _mark_point(axes: "Axes", point: Point) -> None:
    loss = number(point.valid_loss)
    if not (point.samples > 0 and math.isfinite(loss)):
        return
    axes.plot([point.samples], [loss], "o", color=CRITICAL, mec=PAPER, mew=1.5, ms=9)
    axes.annotate(
        f"{loss:#.3g}",
        (point.samples, loss),
        xytext=(5, 7),
        textcoords="offset points",
        color=CRITICAL,
    )


def scales(advice: Advice) -> Html:
    """Noise scale and critical batch size over training, and the recommended schedule."""
    bounds = _bounds(advice)

    def paint(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        xs = _positions(advice)
        left, right = _left(advice, min(xs)) / 1.6, max(xs) * 1.25
        charts.samples_axis(axes, left, right, advice.samples, narrow=narrow)
        octaves = [2.0**k for k in range(math.ceil(bounds[0]), math.floor(bounds[1]) + 1)]
        charts.batch_axis(axes, "y", octaves, 8)
        axes.set_ylim(2 ** bounds[0], 2 ** bounds[1])
        axes.set_ylabel(f"batch size ({charts.label(advice.samples)})")
        ends = [
            _draw_schedule(axes, advice, left, right),
            _draw_series(axes, advice.points, "noise", NOISE, 1.02),
            _draw_series(axes, advice.points, "critical", CRITICAL, 1 / 1.02),
        ]
        _name_series(axes, ends, right, narrow=narrow)

    words = (
        "Critical batch size and gradient noise scale, with intervals, at each point of training."
    )
    return charts.chart("scales", words, paint, height=350)


def _left(advice: Advice, first: float) -> float:
    """The first point, or where the schedule first grows, if that is not too far before it."""
    grows = [number(row.get("from_samples")) for row in advice.schedule[1:]]
    return min([first, *(start for start in grows if first / 32 < start < math.inf)])


Ends = tuple[float, str, str]


def _name_series(axes: "Axes", ends: Sequence[Ends | None], right: float, *, narrow: bool) -> None:
    named = [end for end in ends if end is not None]
    if not narrow:
        labels = [(right, y, name, colour) for y, name, colour in named]
        charts.label_lines(axes, labels, gap=15)
        return
    for row, (_, name, colour) in enumerate(reversed(named)):
        text = f"{name}"
        axes.text(0, 1.03 + 0.075 * row, text, color=colour, transform=axes.transAxes)


def _draw_schedule(axes: "Axes", advice: Advice, left: float, right: float) -> Ends | None:
    rows = [row for row in advice.schedule if number(row.get("from_samples")) < right]
    if not rows:
        return None
    begun = [row for row in rows if number(row.get("from_samples")) <= left]
    rows = rows[max(0, len(begun) - 1) :]
    starts = [max(number(row.get("from_samples")), left) for row in rows]
    sizes = [batch_of(row) for row in rows]
    axes.step(
        [*starts, right], [*sizes, sizes[-1]], where="post", color=SCHEDULE, linewidth=7, alpha=0.5
    )
    return sizes[-1], "recommended schedule", MUTED


def _draw_series(
    axes: "Axes", points: Sequence[Point], kind: str, colour: str, dodge: float
) -> Ends | None:
    """Values with interval bars; an arrow where only one end of the interval is known."""
    shown: list[tuple[float, float]] = []
    for point in points:
        event = point.noise if kind == "noise" else point.critical
        if not event or not point.samples > 0:
            continue
        x = point.samples * dodge
        value, low, high = (number(event.get(key)) for key in ("value", "low", "high"))
        if kind == "noise" and (not event.get("resolved") or not value > 0):
            _draw_unresolved(axes, x, low, colour)
            shown.append((x, math.nan))
            continue
        if not value > 0:
            continue
        _draw_bar(axes, x, value, low, high, colour)
        if event.get("at_edge") in ("above", "below"):
            _draw_arrow(axes, x, value, colour, up=event["at_edge"] == "above")
        shown.append((x, value))
    known = [spot for spot in shown if not math.isnan(spot[1])]
    if not known:
        return None
    # NaN breaks the line: nothing is known of what lies between.
    axes.plot(*zip(*shown, strict=True), color=colour, linewidth=1.2, zorder=3)
    marker = "o" if kind == "critical" else "D"
    axes.plot(*zip(*known, strict=True), marker, color=colour, mec=PAPER, mew=1.5, ms=8, zorder=4)
    name = "critical batch size" if kind == "critical" else "gradient noise scale"
    return known[-1][1], name, colour


def _draw_bar(axes: "Axes", x: float, value: float, low: float, high: float, colour: str) -> None:
    bottom, top = axes.get_ylim()
    low = max(low, bottom) if low > 0 else (bottom if low <= 0 else value)
    open_above = math.isinf(high) or high > top
    high = top if open_above else (value if math.isnan(high) else high)
    axes.plot([x, x], [low, high], color=colour, linewidth=2.2, alpha=0.55, zorder=2.5)


def _draw_arrow(axes: "Axes", x: float, y: float, colour: str, *, up: bool) -> None:
    axes.annotate(
        "",
        (x, y),
        xytext=(0, 26 if up else -26),
        textcoords="offset points",
        arrowprops={"arrowstyle": "<-", "color": colour, "linewidth": 1.6, "shrinkA": 0},
    )


def _draw_unresolved(axes: "Axes", x: float, low: float, colour: str) -> None:
    bottom, top = axes.get_ylim()
    start = min(max(low, bottom), top) if low > 0 else bottom
    _draw_arrow(axes, x, start, colour, up=True)
    axes.plot([x], [start], "D", mfc=PAPER, mec=colour, mew=1.5, ms=7, zorder=4, clip_on=False)
    axes.annotate(
        "unresolved", (x, start), xytext=(7, 8), textcoords="offset points", color=colour, size=10
    )


def _thin(curve: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Means over at most so many stretches of equal ratio of samples."""
    first, last = math.log(curve[0][0]), math.log(curve[-1][0])
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, y in curve:
        share = (math.log(x) - first) / (last - first) if last > first else 0.0
        bins.setdefault(min(int(share * most), most - 1), []).append((x, y))
    return [
        (sum(x for x, _ in some) / len(some), sum(y for _, y in some) / len(some))
        for _, some in sorted(bins.items())
    ]


def _positions(advice: Advice) -> list[float]:
    return [point.samples for point in advice.points if point.samples > 0]


def _bounds(advice: Advice) -> tuple[float, float]:
    """Limits of the axis of batch sizes, as powers of two; open intervals reach beyond."""
    found: list[float] = [batch_of(row) for row in advice.schedule]
    for point in advice.points:
        for event in (point.noise, point.critical):
            found += [number(event.get(key)) for key in ("value", "low", "high")]
        found += point.batch_sizes
    logs = [math.log2(value) for value in found if 0 < value < math.inf] or [0.0, 4.0]
    return min(logs) - 0.6, max(logs) + 0.8
