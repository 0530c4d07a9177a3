"""The findings in words: one template for each kind, the answer, the remarks, and the table."""

import math
from collections.abc import Callable
from typing import Any

from steadygrad.studies.advise import schema
from steadygrad.studies.advise.schema import CAP, Checked, Recommendation, Summary
from steadygrad.studies.schema import Table
from steadygrad.studies.text import ENDS, listed, percent, percent_interval, plural, show

FALLS = {
    "zero": "is exactly 0",
    "slightly": "falls by less than three standard errors",
    "flat": "does not fall",
}
EXTRA = "extra {} (95% confidence interval)"
NO_VERDICT = {
    "same": "the validation losses at {others} are the same; check that Task.make_optimizer uses "
    "its learning rate.",
    "zero": "the validation loss is exactly 0, as it is at {others}; try a harder task, or a "
    "smaller --budget.",
    "rising": "the validation loss is above that of the evaluations before, where another rate "
    "looks better by overfitting less; try more data, or a smaller --budget.",
}


def answer(s: Summary) -> str:
    """The answer in one sentence; one that hangs on a condition opens with it."""
    said, then = _advice(s.recommendation, s)
    if s.rate.first:
        then = then or "no batch size can be advised"
        rate = f"The learning rate {s.lr:.3g} looks too {s.rate.verdict}"
        said = f"{rate}, so tune it first; until then {then}."
    if s.status != "complete" and s.recommendation.batch_size:
        said = f"Preliminary: {said[0].lower()}{said[1:]}"
    return said


def _advice(found: Recommendation, s: Summary) -> tuple[str, str]:
    """The advice, and how it is said after a condition; empty where there is none."""
    base, more = f"batch {s.batch_size:,}", f"at most {_tolerated(s)} more {plural(s.sample)}"
    if found.batch_size is None or found.samples is None:
        loss = f"No batch size can be advised: the validation loss of {base}"
        if found.why == "unmeasured":
            return "Nothing can be said yet: no point of training was measured.", ""
        if found.why == "runs":
            fall = "did not fall significantly over the second half of the run up to any point"
            return f"{loss} {fall}; try a lower Task.lr, more data, or another --budget.", ""
        remedy = "try another Task.lr, more data, or a longer --budget"
        return f"{loss} {FALLS[found.why]} along its branches; {remedy}.", ""
    settings = f"batch {found.batch_size:,} with learning rate {found.lr:.3g}"
    if found.basis == "predicted":
        said = f"B{settings[1:]} should need {more} than {base}: predicted, not trained."
        return said, f"try {settings} (predicted, not trained)"
    run = next((run for run in s.checked if run.batch_size == found.batch_size), None)
    if run is not None:
        steps = _fewer(run.steps * (1 + run.overhead), found.samples // s.batch_size)
        said = f"Train at {settings}: it {_needs(run, s)} and {steps} for the same loss."
        return said, f"train at {settings}"
    larger = next((f.run for f in s.findings if isinstance(f, schema.Larger)), None)
    why = _failed(larger, s) if larger else f"no larger batch was shown to need {more}"
    return f"Stay at {base}: {why}.", f"stay at {base}"


def remarks(s: Summary) -> tuple[str, ...]:
    """At most three more sentences, the most important first."""
    said = (TEMPLATES[type(found)](found, s) for found in s.findings[1:])
    return tuple([text for text in said if text][:3])


def _unfinished(found: schema.Unfinished, s: Summary) -> str:
    more = "" if s.status == "failed" else "; --resume continues it"
    points = f"{found.measured} of {found.planned} points of training measured"
    return f"The study {ENDS[s.status]} before all trainings were done ({points}){more}."


def _rate(found: schema.RateVerdict, s: Summary) -> str:
    lr, run = f"{s.lr:.3g}", f"a run of {_count(found.samples, s)}"
    if found.why:
        others = listed(f"{s.lr * float(rate):.3g}" for rate in found.losses if rate != "1")
        why = NO_VERDICT[found.why].format(others=others)
        return f"No verdict on the learning rate {lr}: over the last 40% of {run}, {why}"
    if found.verdict == "fits":
        return ""
    if not found.first:
        other = f"one of {_count(s.recommendation.samples or 0, s)}"
        return f"The learning rate {lr} looks too high for {run}, which says nothing of {other}."
    best = "2" if found.verdict == "low" else "0.5"
    losses = f"validation loss {found.losses[best]:.4g} against {found.losses['1']:.4g} at {lr}"
    said = f"Learning rate {s.lr * float(best):.3g} does better: {losses}"
    bound = f" Every batch size here was measured at {lr}, so take it as an upper bound."
    bound *= any(point.resolved for point in s.points)
    return f"{said}, both means over the last 40% of {run}.{bound}"


def _larger(found: schema.Larger, s: Summary) -> str:
    advised = s.recommendation.batch_size or 0
    if found.run is None:
        if found.diverged is None:
            return f"No batch above {advised:,} was tested in runs from the initial weights."
        return (
            f"Batch {found.diverged:,} diverged elsewhere in this study, which bounds the advice."
        )
    # Where the advice is to stay, the answer has said it, unless a condition took its place.
    said = "" if advised == s.batch_size and not s.rate.first else f"{_failed(found.run, s)}. "
    if found.gap:
        said += f"No size between {s.batch_size:,} and {found.run.batch_size:,} was tried."
    return said[:1].upper() + said[1:].rstrip()


def _unplanned(found: schema.Unplanned, s: Summary) -> str:
    none = "The budget was too short for a run from the initial weights"
    return f"{none}, and --resume adds none: start a new study with a longer --budget."


def _flat(found: schema.Flat, s: Summary) -> str:
    seen = f" (data seen {found.epochs:.0f} times by then)" if found.epochs >= 1.5 else ""
    where = f"{listed(f'{point:,}' for point in found.points)} {plural(s.sample)}{seen}"
    loss = f"along the branches there, the validation loss of batch {s.batch_size:,}"
    return f"No batch size can be judged after {where}: {loss} {FALLS[found.how]}."


def _schedule(found: schema.Schedule, s: Summary) -> str:
    if found.check is None or not found.advised:
        return ""
    stages = listed(f"{stage.batch_size:,} from {stage.from_samples:,}" for stage in found.stages)
    size, samples = s.recommendation.batch_size or 1, s.recommendation.samples or 1
    others = samples // size * (1 + (s.recommendation.overhead or 0.0))
    steps = f"{_fewer(found.steps * (1 + found.check.overhead), others)} than batch {size:,}"
    needs = f"{_needs(found.check, s)} and {steps}, for the same loss"
    return f"A growing batch, {stages} {plural(s.sample)} on, {needs}."


def _going_on(found: schema.GoingOn, s: Summary) -> str:
    critical = next(point.critical for point in s.points if point.samples == found.from_samples)
    assert critical is not None
    use = f"batch {found.batch_size:,} with learning rate {found.lr:.3g}"
    high = f"to {critical.high:,.0f}" if math.isfinite(critical.high) else "or more"
    span = f"95% confidence interval {critical.low:,.0f} {high}"
    why = f": the critical batch size there is {critical.value:,.0f} ({span})"
    if not found.known:
        why = f": the critical batch size there is not known well enough for more ({span})"
    elif found.diverged is not None:
        why = f": batch {found.diverged:,} diverged elsewhere in this study"
    elif math.isinf(critical.beyond):
        more = f"at most {_tolerated(s)} more {plural(s.sample)} than the best"
        why = f", the largest that was tried: all need {more}"
    return f"A run that has seen {_count(found.from_samples, s)} can continue at {use}{why}."


TEMPLATES: dict[type, Callable[[Any, Summary], str]] = {
    schema.Unfinished: _unfinished,
    schema.RateVerdict: _rate,
    schema.Larger: _larger,
    schema.Unplanned: _unplanned,
    schema.Flat: _flat,
    schema.Schedule: _schedule,
    schema.GoingOn: _going_on,
}


def too_little(s: Summary) -> str | None:
    """Without one measured point there is no advice."""
    if any(point.critical for point in s.points):
        return None
    return "The budget was over before the first point of training was measured"


def table(s: Summary) -> Table | None:
    """The numbers on which the answer rests; None where there is none."""
    found, schedule, samples = s.recommendation, s.schedule, plural(s.sample)
    if found.batch_size is None or found.samples is None:
        return None

    def row(size: str, lr: float, steps: int, verdict: str, run: Checked | None) -> None:
        extra = f"{_extra(run.overhead, s)} ({percent_interval(run.low, run.high)})" if run else "–"
        basis = f"trained, {run.seeds} seeds" if run else "predicted" if rows else "trained"
        rows.append((size, show(lr), show(steps), extra, basis, verdict))

    rows: list[tuple[str, ...]] = []
    own = "reference" + ", advised" * (found.batch_size == s.batch_size)
    row(show(s.batch_size), s.lr, found.samples // s.batch_size, own, None)
    for run in s.checked:
        verdict = _verdict(run, s)
        if run.within:  # the advice is the largest batch size below all that failed
            verdict += ", advised" * (run.batch_size == found.batch_size)
            verdict += ", above one that failed" * (run.batch_size > found.batch_size)
        row(show(run.batch_size), run.stages[-1].lr, run.steps, verdict, run)
    if found.basis == "predicted":
        steps = found.samples // found.batch_size
        row(show(found.batch_size), found.lr or 0, steps, f"within {_tolerated(s)}", None)
    if schedule:
        verdict = _verdict(schedule.check, s) if schedule.check else "not advised"
        row("growing", schedule.stages[-1].lr, schedule.steps, verdict, schedule.check)
    warmup = max((run.warmup_samples for run in s.checked), default=found.warmup_samples or 0)
    title = f"{s.task}: {found.samples:,} {samples} from the initial weights"
    return Table(
        title + f"; higher learning rates warmed up over the first {warmup:,}" * (warmup > 0),
        ("batch size", "learning rate", "steps", EXTRA.format(samples), "basis", "verdict"),
        tuple(rows),
    )


def _verdict(run: Checked, s: Summary) -> str:
    if run.within or run.low > s.tolerance:
        text = f"{'' if run.within else 'not '}within {_tolerated(s)}"
        return "diverged" if math.isinf(run.loss) else text
    return "uncertain"


def _count(number: int, s: Summary) -> str:
    return f"{number:,} {s.sample if number == 1 else plural(s.sample)}"


def _tolerated(s: Summary) -> str:
    return f"{100 * s.tolerance:.4g}%"


def _fewer(steps: float, others: float) -> str:
    """Optimizer steps to the same loss, against those of another run."""
    saved = 1 - steps / others
    return f"{abs(saved):.0%} {'fewer' if saved >= 0 else 'more'} optimizer steps"


def _extra(overhead: float, s: Summary) -> str:
    """An overhead, with the decimals that tell it from the tolerance."""
    most, within = round(100 * s.tolerance, 6), overhead <= s.tolerance
    fits = (digits for digits in range(3) if (round(100 * overhead, digits) <= most) == within)
    digits = next(fits, 3)
    return f"{100 * overhead:.{digits}f}%" if digits and overhead < CAP else percent(overhead)


def _needs(run: Checked, s: Summary) -> str:
    """The extra samples of a run, with their confidence interval."""
    if math.isinf(run.loss):
        return "diverged"
    goal = f"more {plural(s.sample)} than batch {s.batch_size:,}"
    if run.diverged:
        return f"needs at least {CAP:.0%} {goal}"
    extra = _extra(run.overhead, s) if round(100 * run.overhead) > 0 else "no"
    return f"needs {extra} {goal} (95% confidence interval {percent_interval(run.low, run.high)})"


def _failed(run: Checked, s: Summary) -> str:
    """A batch size that was trained and is not advised."""
    batch, needs = f"batch {run.batch_size:,}", _needs(run, s)
    if run.diverged or run.low > s.tolerance:
        return f"{batch} {needs}"
    return f"whether {batch} stays within {_tolerated(s)} is not certain, for it {needs}"
