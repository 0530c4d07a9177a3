"""Charts of the ``compare`` report."""

import math
from collections.abc import Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from steadygrad.studies import charts
from steadygrad.studies.charts import BAND, CRITICAL, FIFTH, FOURTH, INK, MUTED, NOISE, SCHEDULE
from steadygrad.studies.compare.report.data import Comparison, Row
from steadygrad.studies.compare.schema import BASELINE
from steadygrad.studies.html import Html
from steadygrad.studies.text import short, show

__all__ = ["differences", "over_batches", "over_rates", "over_samples"]

# One for each optimizer, AdamW first; with more they begin anew.
COLOURS, MARKERS = (INK, CRITICAL, NOISE, FOURTH, FIFTH, MUTED), "osD^vP"
# Number of ordinary widths beyond which an interval is cut.
MOST_WIDTHS = 6


def differences(found: Comparison) -> Html:
    """Paired differences from AdamW: a dot for each seed, a bar for the interval."""
    names = list(found.titles)
    rows = sorted(
        found.summary["verdicts"],
        key=lambda row: (row["multiple"], names.index(row["optimizer"]), -row["samples"]),
    )
    widths = [max(abs(r["low"]), abs(r["high"])) for r in rows if math.isfinite(r["mean"])]
    most = min(max(widths), MOST_WIDTHS * median(widths)) if widths else 0.0
    # Without any spread or difference.
    most = most or 1.0

    def label(row: Row) -> str:
        size = f" {show(row['multiple'] * found.plan.batch_size)}"
        batch = size if len(found.plan.multiples) > 1 else ""
        return f"{charts.label(found.titles[row['optimizer']])}{batch}, {short(row['samples'])}"

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        for y, row in enumerate(rows):
            colour = CRITICAL if row["samples"] == found.longest else SCHEDULE
            _difference(axes, row, y, colour, most)
        axes.set_xlim(-1.05 * most, 1.05 * most)
        axes.axvline(0, color=INK, linewidth=1.0, zorder=1)
        axes.set_yticks(range(len(rows)), map(label, rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False)
        axes.locator_params(axis="x", nbins=4 if narrow else 8)
        axes.set_xlabel("loss less AdamW's")

    words = "Paired differences of losses from AdamW's, with their intervals."
    return charts.chart("differences", words, paint, height=70 + 26 * len(rows))


def _difference(axes: Axes, row: Row, y: int, colour: str, most: float) -> None:
    """One row: the interval, the seeds and the mean; what is beyond ``most`` is a triangle."""
    if not math.isfinite(row["mean"]):
        # Where only AdamW diverged there is nothing to draw.
        if row["mean"] > 0:
            axes.plot([0.97 * most], [y], "x", color=NOISE, mew=2, ms=7.5)
        return
    axes.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=2, zorder=2)
    apart = [own - row["baseline_losses"][seed] for seed, own in row["losses"].items()]
    axes.plot(apart, [y] * len(apart), "o", color=MUTED, ms=3.5, zorder=3)
    axes.plot([row["mean"]], [y], "D", color=colour, ms=7, zorder=4)
    for end, marker, cut in ((most, ">", row["high"] > most), (-most, "<", row["low"] < -most)):
        axes.plot([end] * cut, [y] * cut, marker, color=colour, ms=7, zorder=5)


def over_rates(found: Comparison, place: int) -> Html | None:
    """Losses of one optimizer over the learning rate, at each horizon."""
    name = found.plan.optimizers[place]
    runs = [run for run in found.trainings if run.optimizer == name and run.multiple == 1]
    if not runs:
        return None
    colours = dict(zip(found.plan.horizons, (SCHEDULE, MUTED, CRITICAL), strict=True))
    title = charts.label(found.titles[name])
    own = (row for row in found.tuned if (row["optimizer"], row["multiple"]) == (name, 1))
    plateau = next((row.get("plateau_loss") for row in own), None)

    def paint(figure: Figure, _: bool) -> None:
        axes, bests = figure.subplots(), []
        rates = sorted({run.lr for run in runs})
        charts.octaves_axis(axes, "x", rates[:: math.ceil(len(rates) / 4)], show)
        axes.set_xlim(rates[0] / 1.3, rates[-1] * 1.3)
        for samples, colour in colours.items():
            tried = [run for run in runs if run.samples == samples and not run.repeat]
            ladder = sorted((run.lr, run.loss) for run in tried if not found.is_point(run))
            known = [(lr, loss) for lr, loss in ladder if math.isfinite(loss)]
            axes.plot([lr for lr, _ in known], [y for _, y in known], "-o", color=colour, ms=3)
            others = [(run.lr, run.loss) for run in tried if found.is_point(run)]
            axes.plot([lr for lr, _ in others], [y for _, y in others], "_", color=colour, ms=9)
            bests.append(min((loss for _, loss in known), default=math.inf))
            if samples == found.plan.horizons[0] and plateau is not None and ladder:
                _shade(axes, ladder, plateau)
        seeds = [run for run in runs if run.samples == found.longest and run.repeat]
        for run in seeds:
            charts.dots(axes, run.lr, [run.loss] if math.isfinite(run.loss) else [], size=5)
        for lr in sorted({run.lr for run in runs if math.isinf(run.loss)}):
            charts.cross(axes, lr)
        axes.set_title(title, loc="left", fontsize=11.5, color=INK)
        _limit(axes, bests + [run.loss for run in seeds])

    words = f"Validation loss with {title} over the learning rate."
    return charts.panel(f"rates-{place}", words, paint, height=190)


def _shade(axes: Axes, ladder: Sequence[tuple[float, float]], most: float) -> None:
    """Shades where a straight line between neighbours is not above the plateau's loss."""
    rates, losses = np.array(ladder).T
    fine = np.geomspace(rates[0], rates[-1], 400)
    with np.errstate(invalid="ignore"):
        inside = np.interp(np.log(fine), np.log(rates), losses) <= most
    where = axes.get_xaxis_transform()
    axes.fill_between(fine, 0, 1, where=inside, color=BAND, lw=0, transform=where, zorder=0)


def _limit(axes: Axes, losses: Sequence[float]) -> None:
    """Leaves out losses far above the best, so that differences near it can be seen."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    axes.locator_params(axis="y", nbins=4)
    if finite:
        low = high = min(finite)
        near = max(median(finite) - low, 0.2 * abs(low))
        for loss in sorted(finite):
            # A short run may have diverged without becoming infinite.
            if loss - low <= 10 * max(near, high - low):
                high = loss
        span = high - low or 1.0
        axes.set_ylim(low - 0.2 * span, high + span)
    else:
        axes.set_yticks([])


def over_samples(found: Comparison) -> Html:
    """Loss over samples at both horizons: mean of the seeds at the tuned rate."""

    def paint(figure: Figure, narrow: bool) -> None:
        axes, ends = figure.subplots(), []
        highest = -math.inf
        for place, (name, title) in enumerate(found.titles.items()):
            colour, marker = COLOURS[place % 6], MARKERS[place % 6]
            for samples, style in ((found.half, (0, (3, 2))), (found.longest, "-")):
                curve = found.curve(name, samples)
                xs, ys = [x for x, _ in curve], [y for _, y in curve]
                axes.plot(xs, ys, ls=style, color=colour, marker=marker, ms=4, lw=1.6)
                if curve and samples == found.longest:
                    ends.append((*curve[-1], charts.label(title), colour))
                # What is above AdamW's curve, and above all ends, would only press those together.
                shown = ys if name == BASELINE else ys[-1:]
                highest = max([highest, *filter(math.isfinite, shown)])
        lowest = min((y for _, y, *_ in ends), default=0.0)
        if highest > lowest:
            span = highest - lowest
            axes.set_ylim(lowest - 0.08 * span, highest + 0.08 * span)
        axes.set_xlim(0, found.longest * (1.6 if narrow else 1.25))
        axes.set_xticks([*found.plan.horizons, 3 * found.longest // 4])
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.set_xlabel(f"{charts.label(found.samples)} seen")
        axes.set_ylabel("validation loss")
        figure.canvas.draw()
        charts.label_lines(axes, ends, gap=14)

    return charts.chart("samples", "Validation loss over samples seen.", paint, height=320)


def over_batches(found: Comparison) -> Html:
    """Extra samples of each optimizer over the batch size."""
    sizes = [multiple * found.plan.batch_size for multiple in found.plan.multiples]

    def paint(figure: Figure, narrow: bool) -> None:
        axes, ends, names = figure.subplots(), [], list(found.titles)
        charts.octaves_axis(axes, "x", sizes)
        for row in (row for row in found.summary["critical"] if len(row["overheads"]) > 1):
            place = names.index(row["optimizer"]) % 6
            found_at = {int(multiple): extra for multiple, extra in row["overheads"].items()}
            xs = [multiple * found.plan.batch_size for multiple in found_at]
            ys = [100 * min(extra, 3.0) for extra in found_at.values()]
            axes.plot(xs, ys, color=COLOURS[place], marker=MARKERS[place], ms=5, lw=1.6)
            title = charts.label(found.titles[row["optimizer"]])
            ends.append((xs[-1], ys[-1], title, COLOURS[place]))
        axes.axhline(20, color=CRITICAL, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.set_xlim(
            sizes[0] / 1.1, sizes[-1] * (sizes[-1] / sizes[0]) ** (0.8 if narrow else 0.3)
        )
        axes.set_xlabel("batch size")
        axes.set_ylabel("extra samples, %")
        figure.canvas.draw()
        charts.label_lines(axes, ends, gap=14)

    return charts.chart("batches", "Extra samples over the batch size.", paint, height=280)
