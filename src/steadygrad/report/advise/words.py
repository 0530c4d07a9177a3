"""What the ``advise`` page says beside its charts."""

from collections.abc import Iterable

from steadygrad.report.advise.data import Advice, percent, percent_interval
from steadygrad.report.numbers import show
from steadygrad.report.page import Html, el

__all__ = [
    "RATES",
    "branches",
    "headline",
    "limits",
    "missing",
    "over_training",
    "schedule",
    "the_run",
]

CRITICAL = el("span.critical", "critical batch size")
CROSS = el("span.noise", "cross")

# By the verdict of the summary.
RATES = {
    "fits": "The task's learning rate {lr} fits.",
    "low": "The task's learning rate {lr} looks too low. Until it is tuned, every batch size here "
    "is an upper bound.",
    "high": "The task's learning rate {lr} looks too high. Until it is tuned, every batch size "
    "here is an upper bound.",
}


def headline(advice: Advice) -> str:
    """The recommendation in one sentence."""
    size = advice.batch_size
    if size is None:
        if advice.status == "complete":
            return f"This study finds no batch size for {advice.task.name}."
        return f"No batch size for {advice.task.name} yet."
    count = advice.task.sample if size == 1 else advice.samples
    return f"Train {advice.task.name} at {show(size)} {count} per step."


def missing(advice: Advice) -> str:
    """What a partial record lacks beyond what its words say; empty when nothing is missing."""
    notes = []
    if not advice.status:
        done, planned = len(advice.points), len(advice.header.plan.points)
        notes.append("The record has no summary: the study is still going, or it was killed.")
        notes.append(f"It has reached {done} of {planned} planned points of training.")
    if advice.truncated:
        notes.append("A broken last line of the record was left out.")
    return " ".join(notes)


def scratch(advice: Advice) -> Iterable[str]:
    """Caption of the runs from scratch."""
    base = show(advice.base)
    yield f"Left: validation loss of batch {base} from scratch, each seed and their mean. Right: "
    yield "the final loss of every seed ("
    yield el("span.critical", "dots")
    yield (
        "), averaged over the end of the run. Dashed: the mean of a larger batch. It meets the "
        f"curve where batch {base} was as good. The rest of the curve is the sample overhead. A "
    )
    yield CROSS
    yield " marks a run that diverged."


def over_training(advice: Advice) -> Iterable[str]:
    """Caption of the critical batch size over training."""
    yield "The "
    yield CRITICAL
    yield (
        f" is the largest batch that costs at most {advice.tolerance} more {advice.samples} over "
        "the branch that follows. Block: from the largest batch size tried that stayed within to "
        "the smallest that did not. Dot: the limit by interpolation. Thin line: its 95% interval; "
        "a triangle says that it goes on. A "
    )
    yield CROSS
    yield " marks the smallest batch size that diverged."
    if advice.schedule:
        yield " Grey: the growing batch below."
    elif advice.batch_size:
        yield " Grey: the fixed batch size for a run from scratch."


def schedule(advice: Advice) -> str:
    """What is known of the growing batch."""
    found, steps = advice.schedule, show(advice.schedule["steps"])
    if found["check"] is None:
        known = "It was predicted from branches and not trained."
    else:
        cost = percent(found["check"]["overhead"])
        span = percent_interval(found["check"]["low"], found["check"]["high"])
        advised = "" if found["advised"] else "It is not advised. "
        known = (
            f"{advised}Trained from scratch, its sample overhead was {cost} (95% interval {span})."
        )
    warmup = found["warmup_samples"]
    warm = f" Its learning rate is warmed up over the first {show(warmup)} {advice.samples}."
    olmo = "OLMo-core's callback raises the learning rate by the square root of the growth."
    yours = "With the other trainers, set the learning rates of the table yourself."
    rates = f"{olmo} {yours}" if advice.task.tokens_per_sample else yours.replace("other ", "")
    return f"{known} It takes {steps} steps.{warm if warmup else ''} {rates}"


def branches(advice: Advice) -> Iterable[str]:
    """Caption of the branches."""
    yield (
        "Validation loss at the end of branches that leave one checkpoint and see the same number "
        f"of {advice.samples}. Dots are repeats, each with its own data order; the line is their "
        f"mean. Dashed: the loss that a batch with {advice.tolerance} sample overhead reaches. "
        "Shaded: from the largest batch size within it to the smallest beyond. A "
    )
    yield CROSS
    yield " marks a batch size that diverged."


def the_run(advice: Advice) -> Iterable[str]:
    """Caption of the main trajectory."""
    yield f"Training loss (grey) and validation loss (dark) of batch {show(advice.base)}. "
    yield el("span.critical", "Circles")
    yield ": the points at which the study measured."
    if any(point.critical and not point.resolved for point in advice.points):
        yield " Shaded: the validation loss no longer falls, and nothing is known of that time."


def limits(advice: Advice) -> Html:
    """What the run cannot tell, so that nobody reads more into it."""
    plan = advice.header.plan
    items = {
        "Other learning rates.": f"{_rule(advice)} No batch size was tuned by itself.",
        "Other learning-rate schedules.": _decay(advice),
        "Other optimizer settings.": _optimizer(advice),
        "Other seeds.": (
            f"The branches stand on seed {show(advice.header.settings.seed)} and its checkpoints. "
            f"Runs from scratch have {show(plan.repeats)} seeds."
        ),
        "What was not trained.": _predicted(advice),
        "Your clock.": (
            "Fewer steps save time only while a larger step takes little longer on your hardware. "
            f"Batch sizes below {show(advice.base)} were not tried."
        ),
    }
    listed = (el("li", el("b", lead), " " + rest) for lead, rest in items.items() if rest)
    return el("div.note.limits", el("ul", listed))


def _rule(advice: Advice) -> str:
    rules = {
        "sqrt": "grows with the square root of the batch size",
        "linear": "grows in proportion to the batch size",
        "constant": "stays the same at every batch size",
    }
    rule = rules.get(advice.task.lr_rule, f"follows the rule {advice.task.lr_rule!r}")
    return f"The learning rate {rule}, from {show(advice.task.lr)} at batch {show(advice.base)}."


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
    names = {"beta2": advice.task.beta2, "weight decay": advice.task.weight_decay}
    what = " and ".join(f"{name} ({show(value)})" for name, value in names.items() if value)
    if advice.header.settings.keep_half_life:
        return f"The half-lives of {what} stayed the same in samples." if what else ""
    return f"At every batch size, {what} stayed as in the task." if what else ""


def _predicted(advice: Advice) -> str:
    named = {"fixed batch size": advice.recommendation, "growing batch": advice.schedule}
    parts = [
        f"The {name} is predicted from branches."
        for name, found in named.items()
        if found.get("basis") == "predicted"
    ]
    short = "Branches are short: they show what a batch size costs soon after a checkpoint."
    return " ".join([*parts, short])
