"""Sections of the ``advise`` page with a small chart for each point: branches, learning rates."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from steadygrad.report import charts
from steadygrad.report.advise import words
from steadygrad.report.advise.data import Advice, Point
from steadygrad.report.advise.scratch import draw_lost
from steadygrad.report.charts import CRITICAL, INK
from steadygrad.report.numbers import show
from steadygrad.report.page import Html, el, figure, section

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["how_measured", "learning_rate"]

Losses = Mapping[float, Sequence[float]]


def how_measured(advice: Advice) -> Html | None:
    """Losses of the branches over batch size, point by point."""
    panels = [
        _branch_panel(f"branches{index}", point, advice)
        for index, point in enumerate(advice.points)
        if point.branches
    ]
    if not panels:
        return None
    chart = figure(el("div.panels", panels), *words.branches(advice))
    return section("How it was measured", chart)


def _branch_panel(name: str, point: Point, advice: Advice) -> Html:
    losses: Losses = {each: [branch.loss for branch in point.of(each)] for each in point.sizes}
    critical = point.critical

    def paint(figure: "Figure", _: bool) -> None:
        axes = figure.subplots()
        charts.batch_axis(axes, "x", point.sizes, 6)
        left, right = point.sizes[0] / 1.4, point.sizes[-1] * 1.4
        axes.set_xlim(left, right)
        _draw_losses(axes, losses, point.diverged)
        if critical and point.resolved:
            axes.axhline(critical["level"], color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
            end = min(critical["beyond"], right)
            axes.axvspan(critical["within"], end, color=charts.BAND, zorder=0, linewidth=0)
        axes.set_xlabel("batch size")

    title = f"after {show(point.samples)} {advice.samples}"
    if critical and not point.resolved:
        title += ": not resolved"
    spoken = f"Validation loss at the end of each branch over its batch size, {title}."
    return el("div", el("h3", title), charts.panel(name, spoken, paint))


def _draw_losses(axes: "Axes", losses: Losses, diverged: float = math.inf) -> None:
    """Dots, a line through their means, and crosses for what diverged."""
    from matplotlib.ticker import MaxNLocator

    for place, some in losses.items():
        if place >= diverged or not all(map(math.isfinite, some)):
            draw_lost(axes, place)
        else:
            charts.dots(axes, place, some, size=6)
    kept = {x: y for x, y in losses.items() if x < diverged and all(map(math.isfinite, y))}
    means = [sum(some) / len(some) for some in kept.values()]
    axes.plot(list(kept), means, color=CRITICAL, linewidth=1.4, zorder=1.5)
    axes.yaxis.set_major_locator(MaxNLocator(4))


def learning_rate(advice: Advice) -> Html | None:
    """The smallest batch at half, once and twice the task's learning rate."""
    losses = advice.rate.get("losses")
    if not losses:
        return None
    rates = {float(rate) * advice.task.lr: value for rate, value in losses.items()}
    caption = (
        f"Validation loss of batch {show(advice.base)} after {show(advice.header.plan.length)} "
        f"{advice.samples} from scratch, at half, once and twice the task's learning rate."
    )
    said = words.RATES.get(str(advice.rate.get("verdict")))
    verdict = el("p", said.format(lr=show(advice.task.lr))) if said else None
    return section("Learning rate", verdict, figure(_rate_panel(rates), caption))


def _rate_panel(rates: Mapping[float, float]) -> Html:
    def paint(figure: "Figure", _: bool) -> None:
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(list(rates)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
        axes.set_xlim(min(rates) / 1.4, max(rates) * 1.4)
        _draw_losses(axes, {rate: [loss] for rate, loss in sorted(rates.items())})
        axes.set_xlabel("learning rate")

    return charts.panel("rate", "Validation loss over learning rate, from scratch.", paint)
