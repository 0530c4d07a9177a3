"""What an ``advise`` run cannot tell."""

from steadygrad.report.advise.data import Advice
from steadygrad.report.numbers import show

__all__ = ["what_it_cannot_tell"]

RULES = {
    "sqrt": "grows with the square root of the batch size",
    "linear": "grows in proportion to the batch size",
    "constant": "stays the same at every batch size",
}


def what_it_cannot_tell(advice: Advice) -> dict[str, str]:
    """Subjects, and what is to be said of each; nothing where that is empty."""
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
            f"The branches stand on seed {show(advice.header.settings.seed)} and its checkpoints. "
            f"Runs from scratch have {show(advice.header.plan.repeats)} seeds."
        ),
        "What was not trained.": _predicted(advice),
        "Your clock.": (
            "Fewer steps save time only while a larger step takes little longer on your hardware. "
            f"Batch sizes below {base} were not tried."
        ),
    }


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
