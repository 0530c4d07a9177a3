"""Charts and tables that the template ``page.html`` shows."""

import math
from collections.abc import Mapping

import msgspec
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from steadygrad.noise.schedule import BatchSizeSchedule
from steadygrad.studies import charts
from steadygrad.studies.advise.analysis import TUNING, Evidence
from steadygrad.studies.advise.schema import Branch, Measured, Scratch, Summary
from steadygrad.studies.charts import BAND, CRITICAL, INK, MUTED, NOISE, SCHEDULE
from steadygrad.studies.folder import Run
from steadygrad.studies.sequential import interval
from steadygrad.studies.text import plural, size


def view(run: Run, found: Summary | None) -> Mapping[str, object]:
    """The values of the template's own sections."""
    task, samples = run.header.task, plural(run.header.task.sample)
    runs = sorted(run.select(Scratch), key=lambda run: (run.batch_size, run.key))
    # The repeats of each batch size.
    branches: dict[tuple[int, int], list[Branch]] = {}
    for branch in sorted(run.select(Branch), key=lambda branch: branch.key):
        branches.setdefault((branch.point, branch.batch_size), []).append(branch)
    resolved = found and any(point.resolved for point in found.points)
    return {
        "found": found,
        "samples": samples,
        "runs": runs,
        "seeds": len({each.repeat for each in runs if each.repeat not in TUNING}),
        "branches": [branches[key] for key in sorted(branches)],
        "forms": _forms(found, task.tokens_per_sample),
        "scratch": _scratch(run, found) if found else None,
        "over_training": _over_training(found, samples) if found and resolved else None,
    }


def _forms(found: Summary | None, tokens: int | None) -> list[tuple[str, str]]:
    """An advised schedule as other trainers take it."""
    if found is None or found.schedule is None or not found.schedule.advised:
        return []
    schedule = BatchSizeSchedule(msgspec.to_builtins(found.schedule.stages))
    own = f"schedule = BatchSizeSchedule({schedule.to_json()})"
    forms = [
        ("Megatron: --step-batch-size-schedule, in tokens", found.schedule.megatron),
        ("OLMo-core: its own callback, in tokens", schedule.to_olmo_core(tokens) if tokens else ""),
        ("Lightning: BatchSizeCallback(schedule, samples of a micro-batch)", own),
        ("Hugging Face Trainer: batch_sizes=schedule", own),
    ]
    return [(name, text) for name, text in forms if text]


def _scratch(run: Run, found: Summary) -> Markup | None:
    """Differences of the final losses from the tolerated one, by batch size, seed by seed."""
    evidence = Evidence(run.header, run.results)
    if not evidence.sizes or found.rise:
        return None

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        axes.axhline(0, color=INK, linewidth=1)
        for place, pairs in enumerate(evidence.sizes.values()):
            apart = pairs.behind(np.asarray(found.tolerance))
            known = [each for each in apart if math.isfinite(each)]
            charts.dots(axes, place, known, CRITICAL, size=7)
            if len(known) < len(apart):
                charts.cross(axes, place)
                continue
            ends = interval(apart, pairs.prior)[1:]
            axes.plot([place, place], ends, color=INK, linewidth=1.5)
        axes.set_xlim(-0.6, len(evidence.sizes) - 0.4)
        axes.set_xticks(range(len(evidence.sizes)), [*map(size, evidence.sizes)], color=MUTED)
        axes.set_xlabel("batch size")
        axes.set_ylabel("validation loss, difference")

    names = ", ".join(map(str, evidence.sizes))
    spoken = f"Final losses of batch {names} less the tolerated loss, seed by seed."
    return charts.chart("scratch", spoken, paint, height=300)


def _over_training(found: Summary, samples: str) -> Markup:
    """The critical batch size at each point."""
    drawn: list[float] = [found.batch_size]
    for point in found.points:
        if c := point.critical:
            drawn += [*c.sizes, c.value, c.low, c.high, c.beyond]
    # Open intervals reach beyond the chart.
    logs = [math.log2(value) for value in drawn if 0 < value < math.inf]
    low, high = min(logs) - 0.6, max(logs) + 0.8

    def paint(figure: Figure, narrow: bool) -> None:
        axes, xs = figure.subplots(), [point.samples for point in found.points]
        left, right = min(xs) / 1.6, max(xs) * 1.25
        charts.samples_axis(axes, left, right, samples, narrow=narrow)
        ticks = [2.0**octave for octave in range(math.ceil(low), math.floor(high) + 1)]
        charts.octaves_axis(axes, "y", ticks)
        axes.set_ylim(2**low, 2**high)
        axes.set_ylabel(f"batch size ({charts.label(samples)})")
        for point in found.points:
            _draw_point(axes, point)
        known = [(point.samples, point.critical.value) for point in found.points if point.critical]
        axes.plot(*zip(*known, strict=True), color=CRITICAL, linewidth=1.2, zorder=3)

    spoken = "Critical batch size with its bracket and interval at each point of training."
    return charts.chart("sizes", spoken, paint, height=350)


def _draw_point(axes: Axes, point: Measured) -> None:
    x, critical, (bottom, top) = point.samples, point.critical, axes.get_ylim()
    if critical and critical.diverged:
        axes.plot([x], [critical.diverged], "x", color=NOISE, mew=2, ms=8, zorder=4)
    if critical is None or not critical.resolved:
        text = "not measured " if critical is None else "not determined "
        axes.axvline(x, color=SCHEDULE, linewidth=1, linestyle=(0, (2, 3)))
        axes.text(x, bottom * 1.1, text, rotation=90, ha="right", color=MUTED)
        return
    block = [critical.within, min(critical.beyond, top)]
    axes.plot([x, x], block, linewidth=13, color=BAND, solid_capstyle="butt")
    ends = [max(critical.low, bottom), min(critical.high, top)]
    axes.plot([x, x], ends, linewidth=2, color=CRITICAL, alpha=0.6, zorder=2.5)
    for end, marker in zip(ends, "v^", strict=True):
        if end in (bottom, top):
            axes.plot([x], [end], marker, color=CRITICAL, ms=7, clip_on=False)
    charts.dots(axes, x, [critical.value])
