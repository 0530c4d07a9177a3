"""Sections of the ``advise`` page along training: the critical batch size, and the run itself."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from steadygrad.report import charts
from steadygrad.report.advise import words
from steadygrad.report.advise.data import Advice, Point
from steadygrad.report.charts import BAND, CRITICAL, INK, MUTED, NOISE, SCHEDULE
from steadygrad.report.numbers import number, show
from steadygrad.report.page import Html, el, figure, section, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["over_training", "the_run"]


def over_training(advice: Advice) -> Html | None:
    """The critical batch size at each point, and the schedule that follows it."""
    if not any(point.resolved for point in advice.points):
        return None
    chart = figure(_sizes_chart(advice), *words.over_training(advice))
    return section("The batch size that pays, over training", chart, _schedule(advice))


def _schedule(advice: Advice) -> Iterable[Html]:
    if not advice.schedule:
        return
    keys = ("from_samples", "batch_size", "lr")
    cells = [[show(stage[key]) for key in keys] for stage in advice.schedule["stages"]]
    yield table(
        "A growing batch", [f"from {advice.task.sample}", "batch size", "learning rate"], cells
    )
    yield el("p.more", words.schedule(advice))
    if advice.schedule["check"] and not advice.schedule["advised"]:
        return
    for name, text in _forms(advice):
        # A box that scrolls has to be reachable by keyboard.
        code = el("pre", el("code", text), tabindex="0", role="region", aria_label=name)
        yield el("div.form", el("h3", name), code)


def _forms(advice: Advice) -> Iterable[tuple[str, str]]:
    """The schedule as other trainers take it."""
    # It comes with torch, which nothing else of a report needs.
    from steadygrad.noise.schedule import BatchSizeSchedule

    schedule, tokens = BatchSizeSchedule(advice.schedule["stages"]), advice.task.tokens_per_sample
    if tokens:
        megatron = "Megatron: --step-batch-size-schedule, in tokens"
        yield megatron, advice.schedule["megatron"]
        yield "OLMo-core: its own callback, in tokens", schedule.to_olmo_core(tokens)
    base = f"micro-batches of {show(advice.base)} over all devices"
    yield f"Lightning: {base}", schedule.to_lightning(advice.base)
    yield f"Hugging Face Trainer: {base}", schedule.to_hugging_face(advice.base)


def _sizes_chart(advice: Advice) -> Html:
    def paint(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        xs = [point.samples for point in advice.points]
        left, right = min(xs) / 1.6, max(xs) * 1.25
        charts.samples_axis(axes, left, right, advice.samples, narrow=narrow)
        low, high = _bounds(advice)
        octaves = [2.0**k for k in range(math.ceil(low), math.floor(high) + 1)]
        charts.batch_axis(axes, "y", octaves, 8)
        axes.set_ylim(2**low, 2**high)
        axes.set_ylabel(f"batch size ({charts.label(advice.samples)})")
        _draw_schedule(axes, advice, left, right)
        for point in advice.points:
            _draw_point(axes, point)
        known = [p for p in advice.points if p.resolved and p.critical]
        line = [(p.samples, p.critical["value"]) for p in known if p.critical]
        if line:
            axes.plot(*zip(*line, strict=True), color=CRITICAL, linewidth=1.2, zorder=3)

    spoken = "Critical batch size with its bracket and interval at each point of training."
    return charts.chart("sizes", spoken, paint, height=350)


def _draw_point(axes: "Axes", point: Point) -> None:
    critical, (bottom, top) = point.critical, axes.get_ylim()
    if math.isfinite(point.diverged):
        axes.plot([point.samples], [point.diverged], "x", color=NOISE, mew=2, ms=8, zorder=4)
    if critical is None or not point.resolved:
        text = "not resolved" if critical else "not measured"
        axes.axvline(point.samples, color=SCHEDULE, linewidth=1, linestyle=(0, (2, 3)))
        axes.text(point.samples, bottom * 1.1, f"{text} ", rotation=90, ha="right", color=MUTED)
        return
    block = [critical["within"], min(critical["beyond"], top)]
    axes.plot([point.samples] * 2, block, linewidth=13, color=BAND, solid_capstyle="butt")
    ends = [max(critical["low"], bottom), min(critical["high"], top)]
    axes.plot([point.samples] * 2, ends, linewidth=2, color=CRITICAL, alpha=0.6, zorder=2.5)
    for end, marker in zip(ends, "v^", strict=True):
        if end in (bottom, top):
            axes.plot([point.samples], [end], marker, color=CRITICAL, ms=7, clip_on=False)
    charts.dots(axes, point.samples, [critical["value"]])


def _draw_schedule(axes: "Axes", advice: Advice, left: float, right: float) -> None:
    fixed = [{"from_samples": 0, "batch_size": advice.batch_size or math.nan}]
    stages = advice.schedule.get("stages", fixed)
    starts = [max(stage["from_samples"], left) for stage in stages]
    sizes = [stage["batch_size"] for stage in stages]
    xs, ys = [*starts, right], [*sizes, sizes[-1]]
    axes.step(xs, ys, where="post", color=SCHEDULE, linewidth=5, alpha=0.45, zorder=1)


def _bounds(advice: Advice) -> tuple[float, float]:
    """Limits of the axis of batch sizes, as powers of two; open intervals reach beyond."""
    found: list[float] = [stage["batch_size"] for stage in advice.schedule.get("stages", ())]
    found += [advice.batch_size or advice.base, advice.base]
    for point in advice.points:
        critical = point.critical or {}
        found += [number(critical.get(key)) for key in ("value", "low", "high", "beyond")]
        found += [*point.sizes, point.diverged]
    logs = [math.log2(value) for value in found if 0 < value < math.inf]
    return min(logs) - 0.6, max(logs) + 0.8


def the_run(advice: Advice) -> Html | None:
    """Training and validation loss of the main trajectory."""
    if not advice.points:
        return None
    chart = figure(_run_chart(advice), *words.the_run(advice))
    return section("The run itself", chart)


def _run_chart(advice: Advice) -> Html:
    training = [spot for point in advice.points for spot in point.reached.training]
    valid = [spot for point in advice.points for spot in point.reached.curve]

    def paint(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots()
        for point in advice.points:
            if point.critical and not point.resolved:
                end = point.samples + point.branch_samples
                axes.axvspan(point.samples, end, color=BAND, zorder=0, linewidth=0)
        axes.plot(*zip(*training, strict=True), color=SCHEDULE, linewidth=1.3)
        axes.plot(*zip(*valid, strict=True), color=INK, linewidth=1.8)
        for point in advice.points:
            charts.dots(axes, point.samples, [point.reached.valid_loss], size=9)
        ends = [x for x, _ in (*training, *valid)]
        charts.samples_axis(axes, min(ends) / 1.1, max(ends) * 1.3, advice.samples, narrow=narrow)
        axes.set_ylabel("loss")

    spoken = f"Training and validation loss of {advice.task.name} over {advice.samples} seen."
    return charts.chart("training", spoken, paint, height=280)
