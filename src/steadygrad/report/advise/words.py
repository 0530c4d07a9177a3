"""What the ``advise`` page says beside its charts."""

from steadygrad.report.advise.data import Advice
from steadygrad.report.numbers import show
from steadygrad.report.page import Html, el

__all__ = ["branches", "headline", "limits", "missing", "over_training", "tradeoff", "training"]

CRITICAL = el("span.critical", "critical batch size")
NOISE = el("span.noise", "gradient noise scale")
CIRCLES = el("span.critical", "circles")


def headline(advice: Advice) -> str:
    """The recommendation in one sentence."""
    size = advice.batch_size
    if size > 0:
        return f"Train {advice.name} at {show(int(size))} {advice.count(size)} per step."
    if advice.status == "complete":
        return f"This run resolves no batch size for {advice.name}."
    return f"No batch size for {advice.name} yet: the run is not complete."


def missing(advice: Advice, truncated: bool) -> str:
    """What a partial record lacks; empty when nothing is missing."""
    words = {
        "interrupted": "The run was interrupted before its end.",
        "failed": "Training failed before everything planned was measured.",
        "budget": "The time budget was spent before everything planned was measured.",
        "unfinished": "The record has no end: the run was stopped, or is still going.",
    }
    planned = advice.plan.get("points")
    total = len(planned) if isinstance(planned, list) else 0
    done = sum(1 for point in advice.points if point.critical)
    notes = [words[advice.status]] if advice.status in words else []
    if done < total:
        notes.append(f"{done} of {total} planned points of training are measured.")
    if not advice.training:
        notes.append("No training step was recorded.")
    if not advice.recommendation:
        notes.append("There is no summary, so no recommendation can be shown.")
    if truncated:
        notes.append("A broken last line of the record was left out.")
    return " ".join(notes)


def over_training(advice: Advice) -> list[str]:
    """Caption of the critical batch size and the noise scale over training."""
    largest = (
        " (circles) is the largest batch that costs at most "
        f"{percent(advice.tolerance)} more {advice.samples}, measured by training. The "
    )
    reading = (
        " (diamonds) is computed from gradients alone. Bars are intervals. An arrow says that the "
        "value lies beyond: an open diamond is a noise scale that the data do not resolve."
    )
    steps = (
        " Grey steps: the schedule recommended below; left of the first circle it is extrapolated."
        if advice.schedule
        else ""
    )
    return ["The ", CRITICAL, largest, NOISE, reading, steps]


def branches(advice: Advice) -> list[str]:
    """Caption of the branches."""
    share = percent(advice.tolerance)
    return [
        (
            "Validation loss at the end of short branches that leave one checkpoint and see the "
            f"same number of {advice.samples}, at several batch sizes. Dots are repeats, each with "
            "its own data order; the line is their mean. Dashed: where the smallest batch stood "
            f"when it still had {share} more {advice.samples} to go. A batch size is acceptable "
            "while it ends below. Vertical line and band: the "
        ),
        CRITICAL,
        " and its interval.",
    ]


def tradeoff(advice: Advice, critical: float) -> list[str]:
    """Caption of the trade-off."""
    curve = (
        f"What it takes to reach one loss: further left, fewer steps; further down, fewer "
        f"{advice.samples}. The line is (S/Smin − 1)(E/Emin − 1) = 1 (McCandlish et al., 2018) "
        f"with a fitted critical batch of {show(critical)}, where both cost twice their least. "
        "Solid dots are batch sizes on it, open "
    )
    return [
        curve,
        CIRCLES,
        " what the branches measured: the longer their thread to the line, the worse it fits.",
    ]


def training(advice: Advice) -> list[str]:
    """Caption of the training curve."""
    size = show(advice.settings.get("batch_size"))
    curve = f"Training loss at batch {size}; the thin line is less smoothed than the bold one. "
    return [
        curve,
        el("span.critical", "Circles"),
        ": validation loss where the run stopped and measured.",
    ]


def limits(advice: Advice) -> Html:
    """What the run cannot tell, so that nobody reads more into it."""
    smallest = show(advice.settings.get("batch_size"))
    repeats = show(advice.plan.get("repeats"))
    items = {
        "Other models and data.": (
            f"It holds for {advice.name} with the optimizer and loss of this task; more training "
            "usually bears a larger batch."
        ),
        "Tuned learning rates.": (
            "They followed one rule from one starting point; tuning at each batch size can move "
            "the critical batch size."
        ),
        "The beginning.": (
            "Before the first branches nothing is measured: there the critical batch size is taken "
            "to have grown in proportion to the samples seen. The interval's upper end is what "
            "holds if it was the same from the start."
        ),
        "The end of a long run.": (
            "Branches are short and show what a batch size costs soon after a checkpoint."
        ),
        "Your clock.": (
            "Fewer steps save time only while a larger step takes little longer on your hardware. "
            f"Batches below {smallest} were not tried."
        ),
        "A batch size from the noise scale.": (
            "That number assumes plain gradient descent; for Adam it can lie far off. Where the "
            "two disagree, trust the branches."
        ),
        "Small differences.": f"Intervals rest on {repeats} repeats at each batch size.",
    }
    listed = (el("li", el("b", lead), " " + rest) for lead, rest in items.items())
    return el("div.note.limits", el("ul", listed))


def percent(fraction: float) -> str:
    """Writes a fraction as a percentage."""
    return f"{show(100 * fraction)}%"
