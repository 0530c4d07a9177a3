"""Section of the ``advise`` page on runs from scratch."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steadygrad.report import charts
from steadygrad.report.advise import words
from steadygrad.report.advise.data import Advice, Curve, percent, percent_interval
from steadygrad.report.charts import CRITICAL, INK, MUTED, NOISE, SCHEDULE
from steadygrad.report.numbers import loss, show, size
from steadygrad.report.page import Html, figure, section, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_lost", "scratch"]

SCHEDULE_NAME = "growing"


def scratch(advice: Advice) -> Html | None:
    """Loss curve of the smallest batch, final losses of all others, and what they cost."""
    curves = advice.baseline()
    if not curves or not advice.length:
        return None
    chart = figure(_chart(advice, curves), *words.scratch(advice))
    return section("Trained from scratch", chart, _table(advice, curves))


def _finals(advice: Advice, curves: list[Curve]) -> dict[str, list[float]]:
    """Final losses of every seed, by batch size."""
    found = {size(advice.base): [curve[-1][1] for curve in curves]}
    kept = [run for run in advice.scratch if run.rate == 1]
    for each in sorted({run.batch_size for run in kept if run.purpose == "constant"}):
        if each != advice.base:
            found[size(each)] = [run.loss for run in advice.runs("constant", each)]
    grown = [run.loss for run in kept if run.purpose == "schedule"]
    return {**found, SCHEDULE_NAME: grown} if grown else found


def _mean(curves: list[Curve]) -> Curve:
    columns = zip(*curves, strict=True)
    return [(column[0][0], sum(y for _, y in column) / len(column)) for column in columns]


def _chart(advice: Advice, curves: list[Curve]) -> Html:
    finals = _finals(advice, curves)

    def paint(figure: "Figure", narrow: bool) -> None:
        ratios = [1.3, 1] if narrow else [2.2, 1]
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=ratios)
        for curve in curves:
            left.plot(*zip(*curve, strict=True), color=SCHEDULE, linewidth=1, alpha=0.6)
        mean = _mean(curves)
        left.plot(*zip(*mean, strict=True), color=INK, linewidth=1.8)
        charts.samples_axis(left, mean[0][0] / 1.04, advice.length, advice.samples, narrow=narrow)
        left.set_ylabel("validation loss")
        for _, row, _ in _trained(advice):
            if math.isfinite(row["loss"]):
                for axes in (left, right):
                    axes.axhline(row["loss"], color=CRITICAL, lw=1, ls=(0, (4, 3)), zorder=1)
        _draw_finals(right, finals)

    names = ", ".join(finals)
    spoken = f"Validation loss of batch {show(advice.base)}, and final losses of batch {names}."
    return charts.chart("scratch", spoken, paint, height=300)


def _draw_finals(axes: "Axes", finals: Mapping[str, list[float]]) -> None:
    for place, losses in enumerate(finals.values()):
        known = [each for each in losses if math.isfinite(each)]
        charts.dots(axes, place, known, CRITICAL if place else INK, size=7)
        if len(known) < len(losses):
            draw_lost(axes, place)
    axes.set_xlim(-0.6, len(finals) - 0.4)
    axes.set_xticks(range(len(finals)), list(finals), color=MUTED)
    axes.set_xlabel("batch size")


def draw_lost(axes: "Axes", place: float) -> None:
    """Marks a run that diverged, at the upper edge."""
    where = axes.get_xaxis_transform()
    axes.plot([place], [0.95], "x", color=NOISE, mew=2, ms=7.5, transform=where, zorder=3)


def _trained(advice: Advice) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Name, row and verdict of what the summary compares with the smallest batch."""
    # The advice is the largest batch size below all that cost too much.
    size = advice.batch_size or 0
    rows = [(show(r["batch_size"]), r, r["batch_size"] <= size) for r in advice.checked]
    check = advice.schedule.get("check")
    return [*rows, (SCHEDULE_NAME, check, advice.schedule["advised"])] if check else rows


def _table(advice: Advice, curves: list[Curve]) -> Html | None:
    own = [show(advice.base), show(advice.task.lr), show(advice.steps(advice.base))]
    rows = [[*own, show(len(curves)), loss(_mean(curves)[-1][1]), "–", "–", "the reference"]]
    for name, row, within in _trained(advice):
        growing, cost = "to " * (len(row["stages"]) > 1), percent(row["overhead"])
        verdict = f"{'' if within else 'not '}within {advice.tolerance}"
        rows.append(
            [
                *(name, growing + show(row["stages"][-1]["lr"]), show(row["steps"])),
                *(show(row["seeds"]), loss(row["loss"]), cost),
                percent_interval(row["low"], row["high"]),
                "diverged" if math.isinf(row["loss"]) else verdict,
            ]
        )
    head = ["batch size", "learning rate", "steps", "seeds", "final loss", "sample overhead"]
    title = f"{show(advice.length)} {advice.samples} from scratch"
    return table(title, [*head, "95% interval", "verdict"], rows) if len(rows) > 1 else None
