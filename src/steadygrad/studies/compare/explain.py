"""The findings of ``compare`` in words."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from steadygrad.record import listed, plural
from steadygrad.record.schema.compare import BASELINE, LEAST_RATIO, MOST_RATIO, Header
from steadygrad.studies.compare.optimizers import KNOWN

__all__ = ["explain"]

Found = Mapping[str, Any]

# In the order in which they are said.
VERDICTS = "better", "worse", "cannot tell"
ENDS = {
    "interrupted": "The study was stopped; --resume continues it.",
    "budget": "The budget was over; --resume continues the study.",
    "failed": "The study failed; what was trained until then is kept.",
}


def explain(header: Header, found: Found, status: str) -> list[str]:
    """Sentences, the most important first.

    Args:
        header: The record's header.
        found: The summary so far.
        status: As of :func:`steadygrad.studies.compare.summary.summarize`.
    """
    none = "No optimizer could be judged yet: a verdict needs two seeds of each."
    words = [*_flips(header, found), *_verdicts(header, found)] or [none]
    words += [*_critical(header, found), *_rates(header, found), *_failures(header, found)]
    return [*words, ENDS[status]] if status in ENDS else words


def _flips(header: Header, found: Found) -> Iterator[str]:
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


def _verdicts(header: Header, found: Found) -> Iterator[str]:
    """Sentences on the longest horizon that was judged, one for each optimizer and batch size.

    Larger batch sizes of an optimizer with the same verdict share one sentence.
    """
    rows: dict[tuple[str, int], list[Found]] = {}
    for row in found["verdicts"]:
        rows.setdefault((row["optimizer"], row["multiple"]), []).append(row)
    alike = _alike(rows)
    said_first = sorted(rows.items(), key=lambda item: VERDICTS.index(item[1][-1]["verdict"]))
    for (name, multiple), own in said_first:
        short, long = own[0], own[-1]
        if name in alike and multiple > 1:
            if multiple == alike[name][0]["multiple"]:
                yield _at_larger(header, found["optimizers"][name], alike[name])
            continue
        place = f"{long['samples']:,} {plural(header.task.sample)}{_at(header, multiple)}"
        # Steps were timed at the task's own batch size.
        cost = found["costs"].get(name) if multiple == 1 else None
        said = _verdict(found["optimizers"][name], place, long, cost)
        verdicts = short["verdict"], long["verdict"]
        if verdicts.count("cannot tell") == 1:
            said += f" After {short['samples']:,}: {short['verdict']}."
        yield said


def _alike(rows: Mapping[tuple[str, int], list[Found]]) -> dict[str, list[Found]]:
    """Rows of the larger batch sizes by optimizer, where there are several with one verdict."""
    larger: dict[str, list[Found]] = {}
    for (name, multiple), own in rows.items():
        if multiple > 1:
            larger.setdefault(name, []).append(own[-1])
    return {
        name: own
        for name, own in larger.items()
        if len(own) > 1
        and len({row["verdict"] for row in own}) == 1
        and len({row["samples"] for row in own}) == 1
        and not any(_lost(row, "losses") or _lost(row, "baseline_losses") for row in own)
    }


def _at_larger(header: Header, title: str, rows: Sequence[Found]) -> str:
    batches = listed(f"{row['multiple'] * header.plan.batch_size:,}" for row in rows)
    verdict, differences = rows[0]["verdict"], listed(f"{row['mean']:+.3g}" for row in rows)
    said = f"{title} is {verdict} than AdamW"
    if verdict == "cannot tell":
        said = f"{title} against AdamW: cannot tell"
    said += f" at batch sizes {batches}: differences {differences}."
    if all(row["sample_ratio"] for row in rows):
        times = listed(_times(row["sample_ratio"]["value"]) for row in rows)
        said += f" AdamW would need {times} times the samples for those losses."
    return said


def _verdict(title: str, place: str, row: Found, cost: Mapping[str, float] | None) -> str:
    seeds, lost, lost_base = len(row["losses"]), _lost(row, "losses"), _lost(row, "baseline_losses")
    if lost or lost_base:
        both = f"it diverged on {lost} of {seeds} seeds, AdamW on {lost_base}"
        if row["verdict"] == "worse":
            return f"{title} is worse than AdamW over {place}: {both}."
        return f"{title} against AdamW over {place}: cannot tell, as {both}."
    if row["verdict"] == "cannot tell":
        needed = row["needed"]
        more = f"about {needed:,} seeds would" if needed else "even 10,000 seeds would not"
        return (
            f"{title} against AdamW over {place}: cannot tell after {seeds} seeds, "
            f"{_difference(row)}; {more} be enough."
        )
    own, base = (sum(row[key].values()) / seeds for key in ("losses", "baseline_losses"))
    return (
        f"{title} is {row['verdict']} than AdamW over {place}: loss {own:.4g} against {base:.4g} "
        f"on {seeds} seeds, {_difference(row)}.{_saved(row)}{_time(row, cost)}"
    )


def _lost(row: Found, which: str) -> int:
    return sum(map(math.isinf, row[which].values()))


def _difference(row: Found) -> str:
    return (
        f"difference {row['mean']:+.3g} ({100 * row['confidence']:.3g}% interval "
        f"{row['low']:+.3g} to {row['high']:+.3g})"
    )


def _saved(row: Found) -> str:
    ratio = row["sample_ratio"]
    if ratio is None:
        return ""
    value, low, high = (_times(ratio[name]) for name in ("value", "low", "high"))
    return f" AdamW would need {value} times the samples for that loss ({low} to {high})."


def _times(ratio: float) -> str:
    """A ratio of samples; at its bounds it is only known to be beyond."""
    if not LEAST_RATIO < ratio < MOST_RATIO:
        return f"more than {MOST_RATIO:g}" if ratio > 1 else f"less than {LEAST_RATIO:g}"
    return f"{ratio:.3f}" if 0.995 <= ratio < 1.005 else f"{ratio:.2f}"


def _time(row: Found, cost: Mapping[str, float] | None) -> str:
    if cost is None:
        return ""
    said = f" A step takes {cost['time_ratio']:.2f} times as long as AdamW's"
    ratio, time = row["sample_ratio"], row["time_ratio"]
    if time is None or not LEAST_RATIO < ratio["low"] <= ratio["high"] < MOST_RATIO:
        return f"{said}."
    value, low, high = (f"{time[name]:.2f}" for name in ("value", "low", "high"))
    return f"{said}: that loss takes {value} ({low} to {high}) of AdamW's time."


def _critical(header: Header, found: Found) -> Iterator[str]:
    said = []
    for row in found["critical"]:
        beyond = row["beyond"]
        said.append(
            f"{found['optimizers'][row['optimizer']]} "
            + (f"{row['within']:,} to {beyond:,}" if beyond else f"at least {row['within']:,}")
        )
    if said:
        yield f"Critical batch size, a fifth more {plural(header.task.sample)}: {listed(said)}."


def _rates(header: Header, found: Found) -> Iterator[str]:
    names, first = found["optimizers"], [row for row in found["tuned"] if row["multiple"] == 1]
    done = [row for row in first if row["lr"] is not None]
    known = [r for r in done if all(math.isfinite(min(t.values())) for t in r["tried"].values())]
    if known:
        # AdamW's, the first: an optimizer without knobs has no points.
        trials = sum(map(len, known[0]["tried"].values())) + header.plan.points - 1
        longest = header.plan.horizons[2 if header.plan.full else 1]
        rates = listed(f"{names[row['optimizer']]} {row['lr']:.3g}" for row in known)
        yield (
            f"Best learning rates of {trials} trials each, over up to {longest:,} "
            f"{plural(header.task.sample)}: {rates}."
        )
    edges = [
        names[row["optimizer"]] + _at(header, row["multiple"])
        for row in found["tuned"]
        if row["interior"] is False and math.isfinite(min(row["tried"]["0"].values()))
    ]
    if edges:
        yield f"The best rate of {listed(edges)} is at the end of those tried: it may be better."
    fixed = [names[row["optimizer"]] for row in done if row["optimizer"] not in KNOWN]
    if fixed and header.plan.points > 1:
        yield f"Of {listed(fixed)} only the learning rate was tuned."
    defaults = {row["optimizer"]: row["default_loss"] for row in first}
    if defaults[BASELINE] is not None and len({*defaults.values()} - {None}) > 1:
        said = (f"{names[n]} {_loss(loss)}" for n, loss in defaults.items() if loss is not None)
        yield f"Without tuning, at the default rates: {listed(said)}."


def _loss(loss: float) -> str:
    return f"{loss:.4g}" if math.isfinite(loss) else "diverged"


def _failures(header: Header, found: Found) -> Iterator[str]:
    names, lost = found["optimizers"], found["diverged_by"]
    if found["diverged"]:
        by = listed(f"{names[name]} {count}" for name, count in lost.items() if count)
        yield f"{found['diverged']} of {found['trained']} trainings diverged: {by}."
    for row in found["tuned"]:
        losses = [loss for tried in row["tried"].values() for loss in tried.values()]
        if losses and not any(map(math.isfinite, losses)):
            at = _at(header, row["multiple"])
            yield f"{names[row['optimizer']]} diverged at every learning rate that was tried{at}."
