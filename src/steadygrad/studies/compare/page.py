"""Charts and tables that the template ``page.html`` shows."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from steadygrad.studies import charts
from steadygrad.studies.charts import CRITICAL, INK, MUTED, NOISE, SCHEDULE
from steadygrad.studies.compare import words
from steadygrad.studies.compare.schema import KNOWN, Header, Summary, Verdict
from steadygrad.studies.compare.schema import Run as Training
from steadygrad.studies.folder import Run
from steadygrad.studies.text import listed, plural, short, show

# Number of ordinary widths beyond which an interval is cut.
MOST_WIDTHS = 6


def view(run: Run, found: Summary | None) -> Mapping[str, object]:
    """The values of the template's own sections."""
    plan, runs = run.header.plan, run.select(Training)
    titles = found.optimizers if found else {name: name for name in plan.optimizers}
    search: dict[tuple[str, int, int], dict[float, float]] = {}
    for one in runs:
        if not one.repeat:
            search.setdefault((one.optimizer, one.multiple, one.samples), {})[one.step] = one.loss
    return {
        "found": found,
        "titles": titles,
        "samples": plural(run.header.task.sample),
        "search": search,
        "steps": sorted({step for tried in search.values() for step in tried}),
        "differences": _differences(found, run.header) if found and found.verdicts else None,
        "panels": [drawn for name in titles if (drawn := _rates(run, name, titles[name]))],
        "missing_names": listed([name for name in KNOWN if name not in titles] + ["all others"]),
        "words": words,
    }


def _differences(found: Summary, header: Header) -> Markup:
    """Paired differences from AdamW: a dot for each seed, a bar for the interval."""
    names, longest = list(found.optimizers), header.plan.horizons[2]
    key = lambda row: (row.multiple, names.index(row.optimizer), -row.samples)  # noqa: E731
    rows = sorted(found.verdicts, key=key)
    widths = [max(abs(r.low), abs(r.high)) for r in rows if math.isfinite(r.mean)]
    # Without any spread or difference it is 1.
    most = (min(max(widths), MOST_WIDTHS * median(widths)) if widths else 0.0) or 1.0

    def label(row: Verdict) -> str:
        size = f" {show(row.multiple * found.batch_size)}" if len(header.plan.multiples) > 1 else ""
        return f"{charts.label(found.optimizers[row.optimizer])}{size}, {short(row.samples)}"

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        for y, row in enumerate(rows):
            _difference(axes, row, y, CRITICAL if row.samples == longest else SCHEDULE, most)
        axes.set_xlim(-1.05 * most, 1.05 * most)
        axes.axvline(0, color=INK, linewidth=1.0, zorder=1)
        axes.set_yticks(range(len(rows)), map(label, rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False)
        axes.locator_params(axis="x", nbins=4 if narrow else 8)
        axes.set_xlabel("loss less AdamW's")

    spoken = "Paired differences of losses from AdamW's, with their confidence intervals."
    return charts.chart("differences", spoken, paint, height=70 + 26 * len(rows))


def _difference(axes: Axes, row: Verdict, y: int, colour: str, most: float) -> None:
    """One row: the interval, the seeds and the mean; what is beyond ``most`` is a triangle."""
    if not math.isfinite(row.mean):
        # Where only AdamW diverged there is nothing to draw.
        if row.mean > 0:
            axes.plot([0.97 * most], [y], "x", color=NOISE, mew=2, ms=7.5)
        return
    axes.plot([row.low, row.high], [y, y], color=colour, linewidth=2, zorder=2)
    apart = [own - row.baseline_losses[seed] for seed, own in row.losses.items()]
    axes.plot(apart, [y] * len(apart), "o", color=MUTED, ms=3.5, zorder=3)
    axes.plot([row.mean], [y], "D", color=colour, ms=7, zorder=4)
    for end, marker, cut in ((most, ">", row.high > most), (-most, "<", row.low < -most)):
        axes.plot([end] * cut, [y] * cut, marker, color=colour, ms=7, zorder=5)


def _rates(run: Run, name: str, title: str) -> Markup | None:
    """Losses of one optimizer over the learning rate, at each horizon."""
    plan = run.header.plan
    runs = [one for one in run.select(Training) if (one.optimizer, one.multiple) == (name, 1)]
    if not runs:
        return None
    colours: Mapping[int, str] = dict(zip(plan.horizons, (SCHEDULE, MUTED, CRITICAL), strict=True))

    def paint(figure: Figure, _: bool) -> None:
        axes, bests, rates = figure.subplots(), [], sorted({one.lr for one in runs})
        charts.octaves_axis(axes, "x", rates[:: math.ceil(len(rates) / 4)], show)
        axes.set_xlim(rates[0] / 1.3, rates[-1] * 1.3)
        for samples, colour in colours.items():
            own = [one for one in runs if one.samples == samples and math.isfinite(one.loss)]
            line = sorted((one.lr, one.loss) for one in own if not one.repeat)
            axes.plot([lr for lr, _ in line], [y for _, y in line], "-o", color=colour, ms=4)
            bests += [min(y for _, y in line)] if line else []
        for one in own:
            # Of the longest runs.
            if one.repeat:
                charts.dots(axes, one.lr, [one.loss], size=5)
                bests.append(one.loss)
        for lr in sorted({one.lr for one in runs if math.isinf(one.loss)}):
            charts.cross(axes, lr)
        axes.set_title(charts.label(title), loc="left", fontsize=11.5, color=INK)
        _limit(axes, bests)

    spoken = f"Validation loss with {charts.label(title)} over the learning rate."
    return charts.panel(f"rates-{plan.optimizers.index(name)}", spoken, paint, height=190)


def _limit(axes: Axes, losses: Sequence[float]) -> None:
    """Leaves out losses far above the best, so that differences near it can be seen."""
    axes.locator_params(axis="y", nbins=4)
    if not losses:
        axes.set_yticks([])
        return
    low = high = min(losses)
    near = max(median(losses) - low, 0.2 * abs(low))
    for loss in sorted(losses):
        # A short run may have diverged without becoming infinite.
        if loss - low <= 10 * max(near, high - low):
            high = loss
    span = high - low or 1.0
    axes.set_ylim(low - 0.2 * span, high + span)
