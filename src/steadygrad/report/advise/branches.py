"""Sections of the ``advise`` page with a small chart for each point: branches, learning rates."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from steadygrad.report import charts
from steadygrad.report.advise.data import Advice, Point
from steadygrad.report.charts import BAND, CRITICAL, INK
from steadygrad.report.numbers import show
from steadygrad.report.page import Html, el, figure, fill, section

__all__ = ["how_measured", "learning_rate"]

Losses = Mapping[float, Sequence[float]]

BRANCHES = (
    "Validation loss at the end of branches that leave one checkpoint and see the same number of "
    "{samples}. Dots are repeats, each with its own data order; the line is their mean. Dashed: "
    "the loss that a batch with {tolerance} sample overhead reaches. Shaded: from the largest "
    "batch size within it to the smallest beyond. A {cross} marks a batch size that diverged."
)
# By the verdict of the summary.
RATES = {
    "fits": "The task's learning rate {lr} fits.",
    "low": "The task's learning rate {lr} looks too low. Until it is tuned, every batch size here "
    "is an upper bound.",
    "high": "The task's learning rate {lr} looks too high. Until it is tuned, every batch size "
    "here is an upper bound.",
}


def how_measured(advice: Advice) -> Html | None:
    """Losses of the branches over batch size, point by point."""
    panels = [
        _branch_panel(f"branches{index}", point, advice)
        for index, point in enumerate(advice.points)
        if point.branches
    ]
    caption = fill(BRANCHES, samples=advice.samples, tolerance=advice.tolerance, cross=charts.CROSS)
    drawn = figure(el("div.panels", panels), caption)
    return section("How it was measured", drawn) if panels else None


def _branch_panel(name: str, point: Point, advice: Advice) -> Html:
    losses: Losses = {
        size: [branch.loss for branch in runs] for size, runs in point.branches.items()
    }
    critical = point.critical

    def paint(figure: Figure, _: bool) -> None:
        axes = figure.subplots()
        charts.octaves_axis(axes, "x", list(losses), most=6)
        _draw_losses(axes, losses, point.diverged)
        if point.resolved:
            axes.axhline(critical["level"], color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
            end = min(critical["beyond"], axes.get_xlim()[1])
            axes.axvspan(critical["within"], end, color=BAND, zorder=0, linewidth=0)
        axes.set_xlabel("batch size")

    unresolved = ": not resolved" if critical and not point.resolved else ""
    title = f"after {show(point.samples)} {advice.samples}{unresolved}"
    spoken = f"Validation loss at the end of each branch over its batch size, {title}."
    return el("div", el("h3", title), charts.panel(name, spoken, paint))


def _draw_losses(axes: Axes, losses: Losses, diverged: float = math.inf) -> None:
    """Dots, a line through their means, and crosses for what diverged."""
    axes.set_xlim(min(losses) / 1.4, max(losses) * 1.4)
    means = {}
    for place, some in losses.items():
        if place >= diverged or not all(map(math.isfinite, some)):
            charts.cross(axes, place)
        else:
            charts.dots(axes, place, some, size=6)
            means[place] = sum(some) / len(some)
    axes.plot(list(means), list(means.values()), color=CRITICAL, linewidth=1.4, zorder=1.5)
    axes.yaxis.set_major_locator(MaxNLocator(4))


def learning_rate(advice: Advice) -> Html | None:
    """The smallest batch at half, once and twice the task's learning rate."""
    own = advice.task.lr
    losses = {float(rate) * own: [loss] for rate, loss in advice.rate.get("losses", {}).items()}
    if not losses:
        return None

    def paint(figure: Figure, _: bool) -> None:
        axes = figure.subplots()
        charts.octaves_axis(axes, "x", sorted(losses), text=show)
        _draw_losses(axes, dict(sorted(losses.items())))
        axes.set_xlabel("learning rate")

    spoken = "Validation loss over learning rate, from scratch."
    caption = (
        f"Validation loss of batch {show(advice.base)} after {show(advice.header.plan.length)} "
        f"{advice.samples} from scratch, at half, once and twice the task's learning rate."
    )
    said = RATES.get(advice.rate["verdict"])
    verdict = el("p", said.format(lr=show(own))) if said else None
    return section("Learning rate", verdict, figure(charts.panel("rate", spoken, paint), caption))
