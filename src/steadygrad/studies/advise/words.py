"""The findings in words: one template for each kind, the answer, the remarks, and the table."""

import math

from steadygrad.studies.advise import schema
from steadygrad.studies.advise.plan import LENGTHS
from steadygrad.studies.advise.schema import Checked, Recommendation, Summary
from steadygrad.studies.schema import Table
from steadygrad.studies.text import plural, show, unfinished

HEADS = ("batch size", "learning rate", "extra samples (95% interval)", "verdict", "steps", "seeds")


def answer(s: Summary) -> str:
    """The answer in one sentence; one that hangs on a condition opens with it."""
    said, then = _advice(s.recommendation, s)
    if tune := tune_first(s):
        rate = f"The learning rate {tune.lr:.3g} is too {tune.verdict} at batch {tune.batch_size:,}"
        said = f"{rate}, so tune it first; until then {then or 'no batch size can be advised'}."
    if s.status in ("interrupted", "failed") and s.recommendation.batch_size:
        said = f"Preliminary: {said[0].lower()}{said[1:]}"
    return said


def tune_first(s: Summary) -> schema.RateVerdict | None:
    """The verdict on the smallest batch's learning rate, where another one is better."""
    return next((r for r in s.rates if r.batch_size == s.batch_size and r.better), None)


def _advice(found: Recommendation, s: Summary) -> tuple[str, str]:
    """The advice, and how it is said after a condition; empty where there is none."""
    base = f"batch {s.batch_size:,}"
    if found.why == "unmeasured":
        return "Nothing can be said yet: no batch size was compared with another.", ""
    if found.why == "flat":
        fall = f"the validation loss of {base} does not fall"
        remedy = "try another Task.lr, more data, or another --budget"
        return f"No batch size can be advised: {fall}; {remedy}.", ""
    samples = _count(found.samples or 0, s)
    size = found.batch_size or s.batch_size
    above = (run for run in s.checked if run.batch_size > size and not run.within)
    larger = next(above, None)
    why = f"batch {larger.batch_size:,} {_needs(larger, s)}" if larger else "none was decided"
    if found.batch_size is None:
        more = "--resume with more --seeds" if s.status == "complete" else "--resume"
        unknown = f"For {samples} it is not known whether a larger batch can be used"
        return f"{unknown}: {why}; {more} may tell, till then stay at {base}.", f"stay at {base}"
    run = next((run for run in s.checked if run.batch_size == found.batch_size), None)
    settings = f"batch {found.batch_size:,} with learning rate {found.lr:.3g}"
    if run is not None:
        saved = 1 - run.steps * (1 + run.overhead) / ((found.samples or 0) // s.batch_size)
        steps = f"{abs(saved):.0%} {'fewer' if saved >= 0 else 'more'} optimizer steps"
        said = f"For {samples}, train at {settings}: it {_needs(run, s)} and {steps} "
        return said + "for the same loss.", f"train at {settings}"
    assert larger is not None
    if not larger.beyond:
        why += f", so it is not certain whether it stays within {_tolerated(s)}"
    return f"For {samples}, stay at {settings}: {why}.", f"stay at {base}"


def remarks(s: Summary) -> tuple[str, ...]:
    """At most three more sentences, the most important first."""
    said = [_rate(found, s) for found in s.rates]
    # A budget is over by design.
    return tuple([*unfinished(s.status.replace("budget", "complete")), *filter(None, said)][:3])


def _rate(found: schema.RateVerdict, s: Summary) -> str:
    lr, where = f"{found.lr:.3g}", f"batch {found.batch_size:,} over {_count(found.samples, s)}"
    if found.verdict == "fits":
        return ""
    if not found.better:
        pairs = min(other.seeds for other in found.others)
        unknown = f"Whether the learning rate {lr} fits {where} is not known after {pairs} seeds"
        return f"{unknown} at half and at twice that rate."
    best = found.better
    interval = f"95% confidence interval {-best.high:.2g} to {-best.low:.2g}"
    lower = f"its validation loss is lower by {-best.mean:.2g} ({interval})"
    return f"Learning rate {best.lr:.3g} does better than {lr} at {where}: {lower}."


def too_little(s: Summary) -> str | None:
    """Without one batch size that was compared there is no advice."""
    if s.recommendation.why != "unmeasured":
        return None
    return "The budget was over before one batch size was compared with another"


def table(s: Summary) -> Table | None:
    """The numbers on which the answer rests; None where there is none."""
    found, samples = s.recommendation, plural(s.sample)
    if not s.checked or found.samples is None:
        return None

    own = "reference" + ", advised" * (found.batch_size == s.batch_size)
    seeds = show(max(run.seeds for run in s.checked))
    steps = show(found.samples // s.batch_size)
    rows: list[tuple[str, ...]] = [(show(s.batch_size), show(s.lr), "–", own, steps, seeds)]
    for run in s.checked:
        # The advice is the largest batch size within the tolerance, below all that are beyond it.
        size = run.batch_size
        note = ", advised" * (size == found.batch_size)
        note += ", above one beyond it" * (run.within and size > (found.batch_size or size))
        extra = f"{_extra(run.overhead, s)} ({_interval(run, s)})".replace("more than", ">")
        verdict, counts = f"{_verdict(run, s)}{note}", (show(run.steps), show(run.seeds))
        rows.append((show(size), show(run.lr), extra, verdict, *counts))
    warmup = max(run.warmup_samples for run in s.checked)
    title = f"{s.task} over {found.samples:,} {samples}"
    title += f"; larger batches warmed up over {warmup:,} {samples}" * (warmup > 0)
    return Table(title, HEADS, tuple(rows))


def _verdict(run: Checked, s: Summary) -> str:
    if math.isinf(run.loss):
        return "diverged"
    if run.within or run.beyond:
        return f"{'' if run.within else 'not '}within {_tolerated(s)}"
    return "uncertain"


def _count(number: int, s: Summary) -> str:
    return f"{number:,} {s.sample if number == 1 else plural(s.sample)}"


def _tolerated(s: Summary) -> str:
    return f"{100 * s.tolerance:.4g}%"


def _extra(overhead: float, s: Summary) -> str:
    """An overhead, with the decimals that tell it from the tolerance."""
    if math.isinf(overhead):
        return f"more than {LENGTHS[0] * s.tolerance:.0%}"
    most, within = round(100 * s.tolerance, 6), overhead <= s.tolerance
    fits = (digits for digits in range(3) if (round(100 * overhead, digits) <= most) == within)
    return f"{100 * overhead:.{next(fits, 3)}f}%"


def _interval(run: Checked, s: Summary) -> str:
    low = _extra(run.low, s)
    return low if math.isinf(run.low) else f"{low} to {_extra(run.high, s)}"


def _needs(run: Checked, s: Summary) -> str:
    """The extra samples of a run, with their confidence interval."""
    if math.isinf(run.loss):
        return "diverged"
    goal = f"more {plural(s.sample)} than batch {s.batch_size:,}"
    if math.isinf(run.low):
        return f"needs {_extra(run.low, s)} {goal}"
    extra = _extra(run.overhead, s) if round(100 * min(run.overhead, 1e6)) > 0 else "no"
    return f"needs {extra} {goal} (95% confidence interval {_interval(run, s)})"
