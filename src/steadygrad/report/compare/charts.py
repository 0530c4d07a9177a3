"""Charts of the ``compare`` report."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from steadygrad.record import Run as Record
from steadygrad.record.schema.compare import Run
from steadygrad.report import charts
from steadygrad.report.charts import BAND, CRITICAL, INK, MUTED, NOISE, SCHEDULE
from steadygrad.report.numbers import show
from steadygrad.report.page import Html

__all__ = ["differences", "over_rates", "over_samples"]

Summary = Mapping[str, Any]
# Short runs, those twice as long, and the longest.
COLOURS = (MUTED, SCHEDULE, CRITICAL)


def over_rates(run: Record, summary: Summary, name: str) -> Html:
    """Loss over the learning rate at each horizon; dots are the seeds of the verdict."""
    row = next(r for r in summary["tuned"] if r["optimizer"] == name and r["multiple"] == 1)
    title, base = summary["optimizers"][name], row["lr"] / 2.0 ** row["step"]

    def paint(figure: Figure, narrow: bool) -> None:
        axes, finite = figure.subplots(), []
        for (_, tried), colour in zip(row["tried"].items(), COLOURS, strict=False):
            curve = [(base * 2.0 ** int(step), loss) for step, loss in tried.items()]
            known = [(lr, loss) for lr, loss in curve if math.isfinite(loss)]
            finite += [loss for _, loss in known]
            axes.plot(
                *zip(*known, strict=True), "-", color=colour, marker="o", ms=3
            ) if known else None
            for lr, loss in curve:
                if not math.isfinite(loss):
                    charts.cross(axes, lr)
        longest = run.header.plan.horizons[2]
        seeds = [e.loss for e in _runs(run, name) if e.samples == longest and e.lr == row["lr"]]
        charts.dots(axes, row["lr"], [loss for loss in seeds if math.isfinite(loss)], size=6)
        if row["plateau"]:
            half = 2 ** (row["plateau"] / 2)
            axes.axvspan(row["lr"] / half, row["lr"] * half, color=BAND, zorder=0)
        axes.set_xscale("log")
        axes.set_title(title, loc="left", fontsize=11.5, color=INK)
        axes.set_xlabel("learning rate")
        _limit(axes, finite + seeds)

    words = f"Validation loss with {title} over the learning rate."
    return charts.panel(f"rates-{_id(name)}", words, paint, height=220)


def _limit(axes: Axes, losses: Sequence[float]) -> None:
    """Leaves out what is far above the best, so that differences near it can be seen."""
    finite = sorted(loss for loss in losses if math.isfinite(loss))
    if finite:
        low, middle = finite[0], finite[len(finite) // 2]
        axes.set_ylim(low - 0.15 * (middle - low + 1e-12), low + 2.5 * (middle - low + 1e-12))


def _runs(run: Record, name: str) -> list[Run]:
    return [e for e in run.select(Run) if e.optimizer == name and e.multiple == 1 and e.repeat]


def _id(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def over_samples(run: Record, summary: Summary) -> Html:
    """Loss over samples at both horizons: mean of the seeds at the tuned rate."""
    names = list(summary["optimizers"])

    def paint(figure: Figure, narrow: bool) -> None:
        axes, last = figure.subplots(), []
        for place, name in enumerate(names):
            lr = next(r["lr"] for r in summary["tuned"] if r["optimizer"] == name)
            for horizon, style in zip(run.header.plan.horizons[1:], ("--", "-"), strict=True):
                curves = [e.curve for e in _runs(run, name) if e.samples == horizon and e.lr == lr]
                means = _mean_curve(curves)
                if means:
                    colour = (INK, CRITICAL, NOISE, SCHEDULE, MUTED)[place % 5]
                    label = summary["optimizers"][name] if style == "-" else None
                    axes.plot(
                        *zip(*means, strict=True),
                        style,
                        color=colour,
                        marker="o",
                        ms=3,
                        label=label,
                    )
                    last += [loss for _, loss in means]
        axes.set_xlabel(f"{charts.label(summary['sample'])}s seen")
        axes.set_ylabel("validation loss")
        axes.legend(frameon=False, fontsize=10)

    return charts.chart("samples", "Validation loss over samples seen.", paint, height=300)


def _mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    whole = [curve for curve in curves if all(math.isfinite(loss) for _, loss in curve)]
    return [
        (marks[0][0], math.fsum(loss for _, loss in marks) / len(marks))
        for marks in zip(*whole, strict=False)
    ]


def differences(summary: Summary) -> Html:
    """Paired differences from AdamW: a dot for each seed, a bar for the interval."""
    rows = [row for row in summary["verdicts"] if math.isfinite(row["mean"])]

    def paint(figure: Figure, narrow: bool) -> None:
        axes, names = figure.subplots(), []
        for y, row in enumerate(rows):
            pairs = zip(row["losses"].values(), row["baseline_losses"].values(), strict=True)
            axes.plot([row["low"], row["high"]], [y, y], color=CRITICAL, linewidth=2, zorder=2)
            axes.plot([a - b for a, b in pairs], [y] * len(row["losses"]), "o", color=MUTED, ms=4)
            axes.plot([row["mean"]], [y], "o", color=CRITICAL, ms=7, zorder=4)
            names.append(
                f"{summary['optimizers'][row['optimizer']]} x{row['multiple']}, "
                f"{show(row['samples'])}"
            )
        axes.axvline(0, color=INK, linewidth=1.0)
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False)
        axes.set_xlabel("loss less AdamW's: left is better")

    words = "Paired differences of losses from AdamW's, with their intervals."
    return charts.chart("differences", words, paint, height=80 + 34 * len(rows))
