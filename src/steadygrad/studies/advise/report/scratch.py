"""Section of the ``advise`` page on runs from scratch."""

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from steadygrad.studies import charts
from steadygrad.studies.advise.report.data import Advice, Curve
from steadygrad.studies.charts import CRITICAL, INK, MUTED, SCHEDULE
from steadygrad.studies.html import Html, el, figure, fill, listing, section
from steadygrad.studies.text import loss, percent, percent_interval, show, size

__all__ = ["learning_rate", "scratch"]

GROWING = "growing"
CAPTION = (
    "Left: validation loss of batch {base} from scratch, each seed and their mean. Right: the "
    'final loss of every seed (<span class="critical">dots</span>), averaged over the end of the '
    "run. Dashed: the mean of a larger batch. Where the dashed line crosses the curve, batch "
    "{base} had reached the same loss. The distance from there to the end is the sample overhead. "
    'A <span class="noise">cross</span> marks a run that diverged.'
)
FITS = (
    "No better learning rate than {lr} was found for a run of {length}: none is ahead at each of "
    "the last five evaluations and saves a tenth of the samples."
)
MISFIT = "The task's learning rate {lr} looks too {verdict} for a run of {length}."
BOUND = "Every batch size here was measured with it and is an upper bound."
TUNE = "Tune it first: try a {other} one."
ELSEWHERE = "That says nothing of a run of {advised}."


def scratch(advice: Advice) -> Html | None:
    """Loss curve of the smallest batch, final losses of all others, and their costs."""
    curves = advice.baseline()
    if not curves or not advice.length:
        return None
    drawn = figure(_chart(advice, curves), fill(CAPTION, base=show(advice.base)))
    return section("Trained from scratch", drawn, _compared(advice, curves))


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
        for row in _trained(advice):
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


def _trained(advice: Advice) -> list[dict[str, Any]]:
    """Rows of the summary on the runs from scratch, each with its name."""
    rows = [{**row, "name": show(row["batch_size"])} for row in advice.checked]
    if check := advice.schedule.get("check"):
        rows.append({**check, "name": GROWING})
    return rows


def _compared(advice: Advice, curves: list[Curve]) -> Html | None:
    def rate(row: Mapping[str, Any]) -> str:
        *others, last = row["stages"]
        return f"to {show(last['lr'])}" if others else show(last["lr"])

    def verdict(row: Mapping[str, Any]) -> str:
        if "within" not in row:
            return "the reference"
        if math.isinf(row["loss"]):
            return "diverged"
        if not row["within"]:
            sure = row["low"] > advice.header.settings.tolerance
            return f"not within {advice.tolerance}" if sure else "not certain"
        # The advice is the largest batch size below all that were not within.
        above = row["name"] != GROWING and row["batch_size"] > (advice.batch_size or 0)
        return f"within {advice.tolerance}{', above a size that was not' if above else ''}"

    reference = {
        "name": show(advice.base),
        "stages": [{"lr": advice.task.lr}],
        "steps": advice.steps(advice.base),
        "seeds": len(curves),
        "loss": _mean(curves)[-1][1],
    }
    columns = {
        "batch size": lambda row: row["name"],
        "learning rate": rate,
        "steps": lambda row: show(row["steps"]),
        "seeds": lambda row: show(row["seeds"]),
        "final loss": lambda row: loss(row["loss"]),
        "sample overhead": lambda row: percent(row.get("overhead")),
        "95% interval": lambda row: percent_interval(row.get("low"), row.get("high")),
        "verdict": verdict,
    }
    rows, title = _trained(advice), f"{show(advice.length)} {advice.samples} from scratch"
    return listing(title, [reference, *rows], columns) if rows else None


def learning_rate(advice: Advice) -> Html | None:
    """The smallest batch at half, once and twice the task's learning rate."""
    own = advice.task.lr
    losses = {float(rate) * own: [loss] for rate, loss in advice.rate.get("losses", {}).items()}
    verdict = advice.rate.get("verdict")
    if not verdict:
        return None

    def paint(figure: Figure, _: bool) -> None:
        axes = figure.subplots()
        charts.octaves_axis(axes, "x", sorted(losses), show)
        charts.losses(axes, dict(sorted(losses.items())))
        axes.set_xlabel("learning rate")

    judged = advice.rate["samples"]
    length = f"{show(judged)} {advice.samples}"
    spoken = "Validation loss over learning rate, from scratch."
    caption = (
        f"Mean validation loss of batch {show(advice.base)} over the last 40% of {length} from "
        "scratch, at half, once and twice the task's learning rate."
    )
    parts = [FITS if verdict == "fits" else MISFIT]
    if verdict != "low" and advice.length not in (0, judged):
        parts.append(ELSEWHERE)
    elif verdict != "fits":
        parts += [BOUND] * any(point.resolved for point in advice.points) + [TUNE]
    values = {"lr": show(own), "verdict": verdict, "length": length}
    values["other"] = "higher" if verdict == "low" else "lower"
    said = " ".join(parts).format(**values, advised=f"{show(advice.length)} {advice.samples}")
    drawn = el("div.panels", el("div", charts.panel("rate", spoken, paint)))
    return section("Learning rate", el("p", said), figure(drawn, caption))
