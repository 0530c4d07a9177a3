"""The findings of ``compare`` in words."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from steadygrad.record import listed, plural
from steadygrad.record.schema.compare import BASELINE, Header

__all__ = ["explain"]

ENDS = {
    "interrupted": "The study was stopped; --resume goes on.",
    "budget": "The budget was over; --resume goes on.",
    "failed": "The study failed; once its error is mended, --resume goes on.",
}


def explain(header: Header, found: Mapping[str, Any], status: str) -> list[str]:
    """Sentences, the most important first.

    Args:
        header: The record's header.
        found: The summary so far.
        status: As of :func:`steadygrad.studies.compare.summary.summarize`.
    """
    words = [*_flips(header, found), *_verdicts(header, found), *_rates(found), *_failures(found)]
    if not found["verdicts"]:
        words = ["No optimizer could be judged yet: a verdict needs two seeds of each."]
    return [*words, ENDS[status]] if status in ENDS else words


def _flips(header: Header, found: Mapping[str, Any]) -> Iterator[str]:
    samples = plural(header.task.sample)
    short, long = header.plan.horizons[1:]
    for flip in found["flips"]:
        name = found["optimizers"][flip["optimizer"]]
        yield (
            f"The order changes with the length of the training: {name} is {flip['short']} than "
            f"AdamW after {short:,} {samples} and {flip['long']} after "
            f"{long:,}{_at(header, flip['multiple'])}."
        )


def _at(header: Header, multiple: int) -> str:
    several = len(header.plan.multiples) > 1
    return f" at batch size {multiple * header.plan.batch_size:,}" if several else ""


def _verdicts(header: Header, found: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each optimizer and batch size, on the longest horizon that was judged."""
    last: dict[tuple[str, int], Mapping[str, Any]] = {}
    for row in found["verdicts"]:
        last[row["optimizer"], row["multiple"]] = row
    for (name, multiple), row in last.items():
        title = found["optimizers"][name]
        place = f"{row['samples']:,} {plural(header.task.sample)}{_at(header, multiple)}"
        own, base = ([*row[key].values()] for key in ("losses", "baseline_losses"))
        lost, lost_base = (sum(map(math.isinf, losses)) for losses in (own, base))
        if row["verdict"] == "cannot tell":
            yield _untold(title, place, row, lost_base)
        elif lost:
            yield (
                f"{title} is worse than AdamW over {place}: it diverged on {lost} of {len(own)} "
                "seeds."
            )
        else:
            yield (
                f"{title} is {row['verdict']} than AdamW over {place}: loss "
                f"{sum(own) / len(own):.4g} against {sum(base) / len(base):.4g}, "
                f"{_difference(row)}.{_saved(row)}{_slower(found, name)}"
            )


def _untold(title: str, place: str, row: Mapping[str, Any], lost_base: int) -> str:
    if lost_base:
        return (
            f"{title} against AdamW over {place}: cannot tell, as AdamW diverged on {lost_base} "
            "seeds."
        )
    needed, seeds = row["needed"], len(row["losses"])
    more = f"about {needed:,} seeds would" if needed else "no number of seeds is likely to"
    return (
        f"{title} against AdamW over {place}: cannot tell after {seeds} seeds, "
        f"{_difference(row)}; {more}."
    )


def _difference(row: Mapping[str, Any]) -> str:
    return (
        f"difference {row['mean']:+.3g} ({100 * row['confidence']:.3g}% interval "
        f"{row['low']:+.3g} to {row['high']:+.3g})"
    )


def _saved(row: Mapping[str, Any]) -> str:
    ratio = row["sample_ratio"]
    if ratio is None:
        return ""
    return (
        f" It is as good as AdamW with {ratio['value']:.2f} ({ratio['low']:.2f} to "
        f"{ratio['high']:.2f}) times the samples."
    )


def _slower(found: Mapping[str, Any], name: str) -> str:
    cost = found["costs"].get(name)
    if cost is None:
        return ""
    return f" A training step takes {cost['time_ratio']:.2f} times as long as with AdamW."


def _rates(found: Mapping[str, Any]) -> Iterator[str]:
    names, first = found["optimizers"], [row for row in found["tuned"] if row["multiple"] == 1]
    known = [row for row in first if math.isfinite(min(row["tried"]["0"].values()))]
    if known:
        trials = sum(map(len, first[0]["tried"].values()))
        rates = listed(f"{names[row['optimizer']]} {row['lr']:.3g}" for row in known)
        yield f"Best learning rates of {trials} trials each: {rates}."
    edges = [names[row["optimizer"]] for row in known if not row["interior"]]
    if edges:
        yield f"The best rate of {listed(edges)} is at the end of those tried: it may be better."
    defaults = {row["optimizer"]: row["default_loss"] for row in first}
    if defaults.get(BASELINE) is not None and len({*defaults.values()} - {None}) > 1:
        said = (f"{names[n]} {loss:.4g}" for n, loss in defaults.items() if loss is not None)
        yield f"Without tuning, at the default rates: {listed(said)}."


def _failures(found: Mapping[str, Any]) -> Iterator[str]:
    if found["diverged"]:
        yield f"{found['diverged']} of {found['trained']} trainings diverged."
