"""What a study found, in sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steadygrad.formulas.batch_size import learning_rate
from steadygrad.noise.schedule import BatchSizeSchedule
from steadygrad.record import plural
from steadygrad.studies.advise.recommend import WholeRun, rung
from steadygrad.studies.advise.surface import Measured

__all__ = ["Findings", "megatron", "sentences"]


@dataclass(frozen=True)
class Findings:
    """Everything the words are about.

    Attributes:
        sample: What one sample is called.
        settings: The record's settings.
        status: How the study ended.
        run: The batch size for a whole run; None when no critical batch size is known.
        last: The last point whose critical batch size is known.
        planned: Points of training planned.
        points: Points whose branches are measured.
        noise: The last noise scale measured.
        schedule: Batch sizes by samples seen.
        warmup: Samples over which to warm a raised learning rate up; 0 if it is not raised.
        unresolved: Samples seen at measured points whose critical batch size is not known.
    """

    sample: str
    settings: Mapping[str, Any]
    status: str
    run: WholeRun | None
    last: Measured | None
    planned: int
    points: int
    noise: Mapping[str, Any] | None
    schedule: Sequence[Mapping[str, Any]]
    warmup: int = 0
    unresolved: Sequence[int] = ()

    @property
    def now(self) -> dict[str, Any] | None:
        """Batch size and learning rate for going on from the last point: the last stage's."""
        if self.last is None:
            return None
        stage = {name: self.schedule[-1][name] for name in ("batch_size", "lr")}
        return {"samples": self.last.samples, **stage}

    @property
    def lr(self) -> float:
        """Learning rate at the batch size for a whole run; NaN when there is none."""
        if self.run is None:
            return math.nan
        lr, base, rule = (self.settings[name] for name in ("lr", "batch_size", "lr_rule"))
        return learning_rate(lr, self.run.batch_size, base, rule)

    def count(self, number: float) -> str:
        """A number of samples, with its unit."""
        return f"{_number(number)} {self.sample if number == 1 else plural(self.sample)}"


def sentences(found: Findings) -> list[str]:
    """The recommendation in words, the most important sentence first."""
    if found.run is None or found.last is None:
        return [_nothing(found), *_noise(found)]
    return [
        *_unfinished(found),
        _whole_run(found, found.run),
        _cost(found, found.run),
        *_unresolved(found),
        *_warmup(found),
        _now(found, found.last),
        *_schedule(found),
        _trust(found, found.run, found.last),
        *_noise(found),
    ]


def megatron(rows: Sequence[Mapping[str, Any]]) -> str:
    """A schedule as Megatron's ``--step-batch-size-schedule`` takes it, in samples."""
    return BatchSizeSchedule(rows).to_megatron()


def _whole_run(found: Findings, run: WholeRun) -> str:
    text = (
        f"Train at a batch of {found.count(run.batch_size)} with learning rate {found.lr:.3g}, "
        f"for a whole run of about {found.count(run.samples)}"
    )
    if run.value >= run.sizes[-1]:
        return (
            f"{text}; every batch size tried stayed within the tolerance, so larger ones may do "
            "as well (try a longer --budget)."
        )
    limit = (
        f"{_number(run.low)} to {_number(run.high)}"
        if math.isfinite(run.high)
        else (f"{_number(run.low)} or more")
    )
    tolerance = found.settings["tolerance"]
    return (
        f"{text}: up to {_number(run.value)} (95% interval {limit}) a batch costs at most "
        f"{tolerance:.0%} more {plural(found.sample)} than {_number(run.sizes[0])} does."
    )


def _cost(found: Findings, run: WholeRun) -> str:
    base = run.sizes[0]
    if run.batch_size == base:
        return (
            f"That is the task's own batch size: doubling it would already cost "
            f"{_extra(found, run.excess[1])}."
        )
    steps = base / run.batch_size * (1 + run.excess_here)
    return (
        f"Against batches of {_number(base)} that is {steps:.0%} of the steps for "
        f"{_extra(found, run.excess_here)}."
    )


def _extra(found: Findings, fraction: float) -> str:
    """So many samples more or fewer, in whole per cent."""
    percent = round(100 * fraction)
    return f"{abs(percent)}% {'fewer' if percent < 0 else 'more'} {plural(found.sample)}"


def _warmup(found: Findings) -> list[str]:
    if not found.warmup:
        return []
    over = f"over about the first {found.count(found.warmup)}"
    why = "the branches began with trained weights, and untrained ones may not bear it at once"
    return [f"From scratch, warm that learning rate up {over}: {why}."]


def _now(found: Findings, last: Measured) -> str:
    assert found.now is not None
    size = found.now["batch_size"]
    later = any(samples > last.samples for samples in found.unresolved)
    place = "the last point that tells" if later else "where the study ended"
    text = (
        f"From {place}, after {found.count(last.samples)}, go on at "
        f"{_number(size)} with learning rate {found.now['lr']:.3g}: the critical batch size there "
        f"is {_interval(found, last)}"
    )
    if size != rung(last.critical.value, last.critical.sizes[0]):
        return f"{text}; {_number(size)} is what the fit through all points gives there."
    return f"{text}."


def _interval(found: Findings, last: Measured) -> str:
    critical = last.critical
    if critical.at_edge == "above":
        largest = critical.sizes[-1]
        if critical.low >= largest:
            return f"at least {found.count(largest)}, the largest batch tried"
        return (
            f"likely above {found.count(largest)}, the largest batch tried (95% interval from "
            f"{_number(critical.low)} on)"
        )
    high = _number(critical.high) if math.isfinite(critical.high) else "beyond the largest tried"
    text = f"{found.count(critical.value)} (95% interval {_number(critical.low)} to {high})"
    if critical.at_edge == "below":
        return f"{text}, so that even the smallest batch tried may be above it"
    return text


def _schedule(found: Findings) -> list[str]:
    rows = found.schedule
    if len(rows) < 2:
        return []
    steps = ", then ".join(
        f"{_number(row['batch_size'])} from {_number(row['from_samples'])}" for row in rows[1:]
    )
    text = (
        f"With a growing batch: start at {_number(rows[0]['batch_size'])}, then {steps} "
        f"{plural(found.sample)} on (Megatron: {megatron(rows)})."
    )
    return [text + _first_rate(rows, found.settings["lr"])]


def _first_rate(rows: Sequence[Mapping[str, Any]], lr: float) -> str:
    """Whether a schedule needs a warm-up; nothing where the learning rate stays."""
    if rows[0]["lr"] > lr:
        return " Its first learning rate needs the same warm-up."
    if rows[-1]["lr"] > lr:
        return (
            " It begins with the task's own learning rate and raises it only with the batch, so "
            "it is itself a warm-up."
        )
    return ""


def _trust(found: Findings, run: WholeRun, last: Measured) -> str:
    text = (
        "Trust the critical batch size: it was measured directly, by training on from the same "
        f"weights at each batch size, at {_points(found.points)}. The first {run.assumed:.0%} of "
        "the run lie before that: there it is taken to have grown from nothing, and the interval "
        "reaches up to what holds if it was the same from the start."
    )
    critical = last.critical
    bounded = critical.high if critical.at_edge != "above" else critical.sizes[-1]
    if bounded > 4 * max(1.0, critical.low):
        text += " Its interval is wide: a longer --budget narrows it."
    return text


def _points(count: int) -> str:
    return "one point of training" if count == 1 else f"{count} points of training"


def _noise(found: Findings) -> list[str]:
    return [_noise_scale(found, found.noise)] if found.noise else []


def _noise_scale(found: Findings, noise: Mapping[str, Any]) -> str:
    if not noise["resolved"]:
        return (
            "The gradient noise scale is unresolved: the measurements only say that it is above "
            f"{found.count(noise['low'])}."
        )
    text = (
        f"The gradient noise scale, {found.count(noise['value'])} (95% interval "
        f"{_number(noise['low'])} to {_number(noise['high'])}), is a diagnostic"
    )
    return (
        f"{text}: it predicts the critical batch size only roughly, and of language models trained "
        "with Adam it is known to underestimate it by orders of magnitude (Merrill et al. 2025)."
    )


def _unfinished(found: Findings) -> list[str]:
    if found.status == "complete":
        return []
    after = f"after measuring {found.points} of {found.planned} points"
    return [f"The study {_ending(found)} {after}: this is preliminary.{_go_on(found)}"]


def _unresolved(found: Findings) -> list[str]:
    """Points that were measured and say nothing."""
    if not found.unresolved:
        return []
    *before, last = (_number(samples) for samples in found.unresolved)
    places = f"{', '.join(before)} and {last}" if before else last
    text = f"After {places} {plural(found.sample)} the critical batch size is unresolved"
    why = "the validation loss did not fall there by more than its noise"
    return [f"{text}: {why}. All advice rests on the other points."]


def _nothing(found: Findings) -> str:
    if found.points:
        flat = "the validation loss did not fall by more than its noise along the branches"
        if found.status != "complete" and found.points < found.planned:
            return (
                f"No batch size can be recommended yet: the study {_ending(found)} after measuring "
                f"{found.points} of {found.planned} points, where {flat}.{_go_on(found)}"
            )
        return (
            f"No batch size can be recommended: {flat} at the smallest batch size. Try another "
            "Task.lr or an earlier stop."
        )
    return (
        f"No batch size can be recommended yet: the study {_ending(found)} before the branches of "
        f"the first point were trained.{_go_on(found)}"
    )


def _ending(found: Findings) -> str:
    ways = {"interrupted": "was interrupted", "budget": "ran out of its budget", "failed": "failed"}
    return ways.get(found.status, "ended")


def _go_on(found: Findings) -> str:
    return "" if found.status == "failed" else " --resume goes on with it."


def _number(value: float) -> str:
    """Whole, with thousands separators; infinity as a word."""
    return f"{value:,.0f}" if math.isfinite(value) else "no limit"
