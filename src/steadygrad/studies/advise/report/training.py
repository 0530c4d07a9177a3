"""Sections of the ``advise`` page along training: the critical batch size, and the run itself."""

import math
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from steadygrad.formulas.schedule import BatchSizeSchedule
from steadygrad.studies import charts
from steadygrad.studies.advise.report.data import Advice, Point
from steadygrad.studies.charts import BAND, CRITICAL, INK, MUTED, NOISE, SCHEDULE
from steadygrad.studies.html import Html, el, figure, fill, section, table
from steadygrad.studies.text import percent, percent_interval, show

__all__ = ["how_measured", "over_training", "the_run"]

SIZES = (
    'The <span class="critical">critical batch size</span> is the largest batch that costs at most '
    "{tolerance} more {samples} over the branch that follows. Block: from the largest batch size "
    "tried that stayed within to the smallest that did not. Dot: the limit by interpolation. Thin "
    "line: its 95% interval; a triangle marks an interval that extends beyond the chart. "
    'A <span class="noise">cross</span> marks the smallest batch size that diverged.'
)
BRANCHES = (
    "Validation loss at the end of branches that leave one checkpoint and see the same number of "
    "{samples}. Dots are repeats, each with its own data order; the line is their mean. Dashed: "
    "the loss that a batch with {tolerance} sample overhead reaches. Shaded: from the largest "
    'batch size within it to the smallest beyond. A <span class="noise">cross</span> marks a '
    "batch size that diverged."
)
RUN = (
    "Training loss (grey) and validation loss (dark) of batch {base}. "
    '<span class="critical">Circles</span>: the points at which the study measured.'
)


def over_training(advice: Advice) -> Html | None:
    """The critical batch size at each point, and the schedule that follows it."""
    if not any(point.resolved for point in advice.points):
        return None
    caption = SIZES
    if advice.schedule:
        advised = "" if advice.schedule["advised"] else ", which is not advised"
        caption += f" Grey: the growing batch below{advised}."
    elif advice.batch_size:
        caption += " Grey: the fixed batch size for a run from scratch."
    said = fill(caption, tolerance=advice.tolerance, samples=advice.samples)
    drawn = figure(_sizes_chart(advice), said)
    schedule = _schedule(advice) if advice.schedule else None
    return section("Critical batch size over training", drawn, schedule)


def _schedule(advice: Advice) -> Iterable[Html]:
    schedule = advice.schedule
    keys = ("from_samples", "batch_size", "lr")
    head = [f"from {advice.task.sample}", "batch size", "learning rate"]
    rows = ([show(stage[key]) for key in keys] for stage in schedule["stages"])
    yield table("A growing batch", head, rows)
    yield el("p.more", " ".join(_known(advice)))
    if not schedule["advised"]:
        return
    for name, text in _forms(advice):
        # A box that scrolls has to be reachable by keyboard.
        code = el("pre", el("code", text), tabindex="0", role="region", aria_label=name)
        yield el("div.form", el("h3", name), code)


def _known(advice: Advice) -> Iterable[str]:
    """Sentences about the growing batch."""
    schedule, check = advice.schedule, advice.schedule["check"]
    if not schedule["advised"]:
        yield "It is not advised."
    if check is None:
        yield "It was predicted from branches and not trained."
    else:
        cost, span = percent(check["overhead"]), percent_interval(check["low"], check["high"])
        yield f"Trained from scratch, its sample overhead was {cost} (95% interval {span})."
    yield f"It takes {show(schedule['steps'])} steps."
    if warmup := schedule["warmup_samples"]:
        yield f"Its learning rate is warmed up over the first {show(warmup)} {advice.samples}."
    if not schedule["advised"]:
        return
    others = "trainers"
    if advice.task.tokens_per_sample:
        yield "OLMo-core's callback raises the learning rate by the square root of the growth."
        others = "other trainers"
    yield f"With the {others}, set the learning rates of the table yourself."


def _forms(advice: Advice) -> Iterable[tuple[str, str]]:
    """The schedule as other trainers take it."""
    schedule, tokens = BatchSizeSchedule(advice.schedule["stages"]), advice.task.tokens_per_sample
    if tokens:
        megatron = "Megatron: --step-batch-size-schedule, in tokens"
        yield megatron, advice.schedule["megatron"]
        yield "OLMo-core: its own callback, in tokens", schedule.to_olmo_core(tokens)
    base = f"micro-batches of {show(advice.base)} over all devices"
    yield f"Lightning: {base}", schedule.to_lightning(advice.base)
    yield f"Hugging Face Trainer: {base}", schedule.to_hugging_face(advice.base)


def _sizes_chart(advice: Advice) -> Html:
    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        xs = [point.samples for point in advice.points]
        left, right = min(xs) / 1.6, max(xs) * 1.25
        charts.samples_axis(axes, left, right, advice.samples, narrow=narrow)
        low, high = _bounds(advice)
        octaves = range(math.ceil(low), math.floor(high) + 1)
        charts.octaves_axis(axes, "y", [2.0**octave for octave in octaves])
        axes.set_ylim(2**low, 2**high)
        axes.set_ylabel(f"batch size ({charts.label(advice.samples)})")
        _draw_schedule(axes, advice, left, right)
        for point in advice.points:
            _draw_point(axes, point)
        line = [(p.samples, p.critical["value"]) for p in advice.points if p.resolved]
        axes.plot(*zip(*line, strict=True), color=CRITICAL, linewidth=1.2, zorder=3)

    spoken = "Critical batch size with its bracket and interval at each point of training."
    return charts.chart("sizes", spoken, paint, height=350)


def _draw_point(axes: Axes, point: Point) -> None:
    critical, (bottom, top) = point.critical, axes.get_ylim()
    if math.isfinite(point.diverged):
        axes.plot([point.samples], [point.diverged], "x", color=NOISE, mew=2, ms=8, zorder=4)
    if not point.resolved:
        text = "not resolved " if critical else "not measured "
        axes.axvline(point.samples, color=SCHEDULE, linewidth=1, linestyle=(0, (2, 3)))
        axes.text(point.samples, bottom * 1.1, text, rotation=90, ha="right", color=MUTED)
        return
    block = [critical["within"], min(critical["beyond"], top)]
    axes.plot([point.samples] * 2, block, linewidth=13, color=BAND, solid_capstyle="butt")
    ends = [max(critical["low"], bottom), min(critical["high"], top)]
    axes.plot([point.samples] * 2, ends, linewidth=2, color=CRITICAL, alpha=0.6, zorder=2.5)
    for end, marker in zip(ends, "v^", strict=True):
        if end in (bottom, top):
            axes.plot([point.samples], [end], marker, color=CRITICAL, ms=7, clip_on=False)
    charts.dots(axes, point.samples, [critical["value"]])


def _draw_schedule(axes: Axes, advice: Advice, left: float, right: float) -> None:
    fixed = [{"from_samples": 0, "batch_size": advice.batch_size or math.nan}]
    stages = advice.schedule.get("stages", fixed)
    xs = [*(max(stage["from_samples"], left) for stage in stages), right]
    ys = [stage["batch_size"] for stage in (*stages, stages[-1])]
    axes.step(xs, ys, where="post", color=SCHEDULE, linewidth=5, alpha=0.45, zorder=1)


def _bounds(advice: Advice) -> tuple[float, float]:
    """Limits of the axis of batch sizes, as powers of two; open intervals reach beyond."""
    found: list[float] = [stage["batch_size"] for stage in advice.schedule.get("stages", ())]
    found += [advice.batch_size or advice.base, advice.base]
    for point in advice.points:
        if point.critical:
            found += [point.critical[key] for key in ("value", "low", "high", "beyond")]
        found += [*point.branches, point.diverged]
    logs = [math.log2(value) for value in found if 0 < value < math.inf]
    return min(logs) - 0.6, max(logs) + 0.8


def how_measured(advice: Advice) -> Html | None:
    """Losses of the branches over batch size, point by point."""
    panels = [
        _branch_panel(f"branches{index}", point, advice)
        for index, point in enumerate(advice.points)
        if point.branches
    ]
    caption = fill(BRANCHES, samples=advice.samples, tolerance=advice.tolerance)
    drawn = figure(el("div.panels", panels), caption)
    return section("How it was measured", drawn) if panels else None


def _branch_panel(name: str, point: Point, advice: Advice) -> Html:
    losses = {size: [branch.loss for branch in runs] for size, runs in point.branches.items()}
    critical = point.critical

    def paint(figure: Figure, _: bool) -> None:
        axes = figure.subplots()
        charts.octaves_axis(axes, "x", list(losses))
        charts.losses(axes, losses, point.diverged)
        if point.resolved:
            axes.axhline(critical["level"], color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
            end = min(critical["beyond"], axes.get_xlim()[1])
            axes.axvspan(critical["within"], end, color=BAND, zorder=0, linewidth=0)
        axes.set_xlabel("batch size")

    unresolved = ": not resolved" if critical and not point.resolved else ""
    title = f"after {show(point.samples)} {advice.samples}{unresolved}"
    spoken = f"Validation loss at the end of each branch over its batch size, {title}."
    return el("div", el("h3", title), charts.panel(name, spoken, paint))


def the_run(advice: Advice) -> Html | None:
    """Training and validation loss of the main trajectory."""
    if not advice.points:
        return None
    unresolved = [point for point in advice.points if point.critical and not point.resolved]
    training = [spot for point in advice.points for spot in point.reached.training]
    valid = [spot for point in advice.points for spot in point.reached.curve]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        for point in unresolved:
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
    caption = RUN
    if unresolved:
        caption += (
            " Shaded: branches over which the validation loss of the smallest batch fell by less "
            "than three standard errors, so that they tell of no batch size."
        )
    drawn = charts.chart("training", spoken, paint, height=280)
    return section("The run itself", figure(drawn, fill(caption, base=show(advice.base))))
