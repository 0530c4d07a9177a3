"""The page of an ``advise`` run: which batch size, why, and how sure."""

from collections.abc import Iterable

from steadygrad.studies.advise.report.data import Advice
from steadygrad.studies.advise.report.scratch import learning_rate, scratch
from steadygrad.studies.advise.report.tables import tables
from steadygrad.studies.advise.report.training import how_measured, over_training, the_run
from steadygrad.studies.advise.schema import Noise
from steadygrad.studies.folder import Run
from steadygrad.studies.frame import Figure, limits, opening, provenance
from steadygrad.studies.html import document, section
from steadygrad.studies.text import interval, percent, percent_interval, show

__all__ = ["page"]

BASES = {
    "trained": "trained from scratch over",
    "predicted": "predicted from branches and not trained, for",
    "own": "the task's own, for",
}
HALF_LIVES = {"half_life": "Adam's second moment", "decay_half_life": "the weight decay"}
RULES = {
    "sqrt": "grows with the square root of the batch size",
    "linear": "grows in proportion to the batch size",
    "constant": "stays the same at every batch size",
}


def page(run: Run) -> str:
    """Draws the page; see :func:`steadygrad.studies.page.render`."""
    advice = Advice(run)
    title = _headline(advice)
    numbers = tables(advice)
    done, planned = len(advice.points), len(advice.header.plan.points)
    partial = (
        "The record has no summary: the study is still going, or it was killed. "
        f"It has reached {done} of {planned} planned points of training."
    )
    return document(
        f"{advice.task.name}: {title}",
        opening(run, title, _figures(advice), [] if advice.status else [partial]),
        scratch(advice),
        over_training(advice),
        how_measured(advice),
        learning_rate(advice),
        the_run(advice),
        limits(_what_it_cannot_tell(advice)),
        section("Every number", numbers) if numbers else None,
        provenance(run.header),
    )


def _headline(advice: Advice) -> str:
    size = advice.batch_size
    if size is None:
        if advice.status == "complete":
            return f"This study finds no batch size for {advice.task.name}."
        return f"No batch size for {advice.task.name} yet."
    count = advice.task.sample if size == 1 else advice.samples
    if advice.recommendation["basis"] == "predicted":
        return f"Predicted, not trained: {show(size)} {count} per step for {advice.task.name}."
    if size == advice.base:
        known = advice.recommendation["known"]
        sure = f"within {advice.tolerance}" if known else "known to be as good"
        return f"Stay at {show(size)} {count} per step: no larger batch is {sure}."
    return f"Train {advice.task.name} at {show(size)} {count} per step."


def _figures(advice: Advice) -> Iterable[Figure]:
    if advice.batch_size is not None:
        yield from _recommended(advice, advice.batch_size)
    noises = [point.noise for point in advice.points if point.noise]
    if noises:
        yield _noise(noises[-1])


def _recommended(advice: Advice, size: int) -> Iterable[Figure]:
    found, base, samples = advice.recommendation, show(advice.base), advice.samples
    yield "Batch size", show(size), f"{BASES[found['basis']]} {show(advice.length)} {samples}"
    origin = "the task's own"
    if found["warmup_samples"]:
        first = f"the first {show(found['warmup_samples'])} {samples}"
        origin = f"warmed up from {show(advice.task.lr)} over {first}"
    yield "Learning rate", show(found["lr"]), origin
    if size != advice.base and found["overhead"] is not None:
        span = f"95% interval {percent_interval(found['low'], found['high'])}"
        detail = f"in {samples}, against batch {base}; {span}"
        yield "Sample overhead", percent(found["overhead"]), detail
        steps, own = advice.steps(size), advice.steps(advice.base)
        if steps and own:
            yield "Steps", show(steps), f"instead of {show(own)} at batch {base}"
    tokens, kept = advice.task.tokens_per_sample, advice.header.settings.keep_half_life
    for name, title in HALF_LIVES.items():
        half_life = found.get(name)
        if half_life is not None:
            also = f", {show(half_life * tokens)} tokens" if tokens else ""
            detail = f"{samples}{also}, {'kept from the task' if kept else 'at this batch size'}"
            yield f"Half-life of {title}", show(round(half_life)), detail


def _noise(noise: Noise) -> Figure:
    if noise.resolved:
        span = f"95% interval {interval(noise.low, noise.high)}"
        return "Gradient noise scale", show(noise.value), f"{span}; no advice on a batch size"
    bound = f"at least {show(noise.low)}; " if noise.low > 0 else ""
    return "Gradient noise scale", "unresolved", f"{bound}too few measurements to tell"


def _what_it_cannot_tell(advice: Advice) -> dict[str, str]:
    """Subjects, each with its limits; subjects without limits are left out."""
    task, base = advice.task, show(advice.base)
    rule = RULES.get(task.lr_rule, f"follows the rule {task.lr_rule!r}")
    return {
        "Other learning rates.": (
            f"The learning rate {rule}, from {show(task.lr)} at batch {base}. "
            "No batch size was tuned by itself."
        ),
        "Other learning-rate schedules.": _decay(advice),
        "Other optimizer settings.": _optimizer(advice),
        "Other seeds.": (
            f"The branches, and any advice for continuing, rest on seed "
            f"{show(advice.header.settings.seed)} alone.{_seeds(advice)}"
        ),
        "What was not trained.": _predicted(advice),
        "Your clock.": (
            "Fewer steps save time only while a larger step takes little longer on your hardware. "
            f"Batch sizes below {base} were not tried."
        ),
    }


def _seeds(advice: Advice) -> str:
    """Number of seeds of the runs from scratch, where there are any."""
    # The main trajectory is a run from scratch with the first seed.
    count = len({0, *(run.repeat for run in advice.scratch)})
    if count > 1:
        return f" The runs from scratch have {show(count)} seeds."
    return " So do the runs from scratch." if advice.scratch else ""


def _decay(advice: Advice) -> str:
    warmup, decay = advice.task.warmup_samples, advice.task.lr_decay
    first = f"warms up over {show(warmup)} {advice.samples}" if warmup else "has no warm-up"
    if decay == "none":
        return f"The task's learning rate {first} and is constant then. A decay was not tried."
    return (
        f"The task's learning rate {first} and has a {decay} decay. Runs from scratch have it; the "
        "main trajectory and the branches leave the decay out."
    )


def _optimizer(advice: Advice) -> str:
    values = {"beta2": advice.task.beta2, "weight decay": advice.task.weight_decay}
    named = " and ".join(f"{name} ({show(value)})" for name, value in values.items() if value)
    if not named:
        return ""
    if advice.header.settings.keep_half_life:
        return f"The half-lives of {named} stayed the same in samples."
    return f"At every batch size, {named} stayed as in the task."


def _predicted(advice: Advice) -> str:
    found = {"fixed batch size": advice.recommendation, "growing batch": advice.schedule}
    names = [name for name, advised in found.items() if advised.get("basis") == "predicted"]
    predicted = [f"The {name} is predicted from branches." for name in names]
    short = "Branches are short: they show what a batch size costs soon after a checkpoint."
    return " ".join([*predicted, short])
