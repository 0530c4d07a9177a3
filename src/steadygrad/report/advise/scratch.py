"""Section of the ``advise`` page on runs from scratch."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.figure import Figure

from steadygrad.report import charts
from steadygrad.report.advise.data import Advice, Curve
from steadygrad.report.charts import CRITICAL, INK, MUTED, SCHEDULE
from steadygrad.report.numbers import loss, percent, percent_interval, show, size
from steadygrad.report.page import Html, el, figure, fill, section, table

__all__ = ["scratch"]

GROWING = "growing"
CAPTION = (
    "Left: validation loss of batch {base} from scratch, each seed and their mean. Right: the "
    "final loss of every seed ({dots}), averaged over the end of the run. Dashed: the mean of a "
    "larger batch. It meets the curve where batch {base} was as good. The rest of the curve is the "
    "sample overhead. A {cross} marks a run that diverged."
)
HEAD = (
    "batch size",
    "learning rate",
    "steps",
    "seeds",
    "final loss",
    "sample overhead",
    "95% interval",
    "verdict",
)


def scratch(advice: Advice) -> Html | None:
    """Loss curve of the smallest batch, final losses of all others, and what they cost."""
    curves = advice.baseline()
    if not curves or not advice.length:
        return None
    dots = el("span.critical", "dots")
    caption = fill(CAPTION, base=show(advice.base), dots=dots, cross=charts.CROSS)
    drawn = figure(_chart(advice, curves), caption)
    rows = list(_rows(advice, curves))
    title = f"{show(advice.length)} {advice.samples} from scratch"
    compared = table(title, HEAD, rows) if len(rows) > 1 else None
    return section("Trained from scratch", drawn, compared)


def _mean(curves: list[Curve]) -> Curve:
    columns = zip(*curves, strict=True)
    return [(column[0][0], sum(y for _, y in column) / len(column)) for column in columns]


def _chart(advice: Advice, curves: list[Curve]) -> Html:
    # Final losses of every seed, by batch size.
    finals = {size(advice.base): [curve[-1][1] for curve in curves]}
    for run in advice.runs("constant"):
        if run.batch_size != advice.base:
            finals.setdefault(size(run.batch_size), []).append(run.loss)
    for run in advice.runs("schedule"):
        finals.setdefault(GROWING, []).append(run.loss)

    def paint(figure: Figure, narrow: bool) -> None:
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
        for place, losses in enumerate(finals.values()):
            known = [each for each in losses if math.isfinite(each)]
            charts.dots(right, place, known, CRITICAL if place else INK, size=7)
            if len(known) < len(losses):
                charts.cross(right, place)
        right.set_xlim(-0.6, len(finals) - 0.4)
        right.set_xticks(range(len(finals)), list(finals), color=MUTED)
        right.set_xlabel("batch size")

    names = ", ".join(finals)
    spoken = f"Validation loss of batch {show(advice.base)}, and final losses of batch {names}."
    return charts.chart("scratch", spoken, paint, height=300)


def _trained(advice: Advice) -> Iterable[tuple[str, Mapping[str, Any], bool]]:
    """Name, row and verdict of what the summary compares with the smallest batch."""
    for row in advice.checked:
        # The advice is the largest batch size below all that cost too much.
        yield show(row["batch_size"]), row, row["batch_size"] <= (advice.batch_size or 0)
    if check := advice.schedule.get("check"):
        yield GROWING, check, advice.schedule["advised"]


def _rows(advice: Advice, curves: list[Curve]) -> Iterable[list[str]]:
    own = [show(advice.base), show(advice.task.lr), show(advice.steps(advice.base))]
    yield [*own, show(len(curves)), loss(_mean(curves)[-1][1]), "–", "–", "the reference"]
    for name, row, within in _trained(advice):
        rate = show(row["stages"][-1]["lr"])
        verdict = f"{'' if within else 'not '}within {advice.tolerance}"
        yield [
            name,
            f"to {rate}" if len(row["stages"]) > 1 else rate,
            show(row["steps"]),
            show(row["seeds"]),
            loss(row["loss"]),
            percent(row["overhead"]),
            percent_interval(row["low"], row["high"]),
            "diverged" if math.isinf(row["loss"]) else verdict,
        ]
