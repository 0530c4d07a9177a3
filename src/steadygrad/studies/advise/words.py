"""The findings in words: one template for each kind, the answer, the remarks, and the table."""

import math

from steadygrad.studies.advise import schema
from steadygrad.studies.advise.plan import LENGTHS
from steadygrad.studies.advise.schema import Checked, Summary
from steadygrad.studies.paired import FARTHEST
from steadygrad.studies.schema import Table
from steadygrad.studies.text import plural, show, unfinished

HEADS = ("batch size", "learning rate", "extra samples (95% interval)", "verdict", "steps", "seeds")


def answer(s: Summary) -> str:
    """The answer in one sentence; that of a study that was cut short is called preliminary."""
    said = _advice(s)
    known = s.recommendation.batch_size or (s.growth and s.growth.predicted)
    if s.status in ("interrupted", "failed") and known:
        said = f"Preliminary: {said[0].lower()}{said[1:]}"
    return said


def planned(header: schema.Header) -> tuple[str, ...]:
    """The plan of a ladder in one sentence, said before it begins; none without a ladder."""
    plan, task = header.plan, header.task
    if not plan.target:
        return ()
    lengths = "one length," if len(plan.rungs) == 1 else f"{len(plan.rungs)} lengths up to"
    whole = f"a training over {plan.target:,} {plural(task.sample)}"
    said = f"{whole} does not fit into the budget. The study trains over {lengths} "
    said += (
        f"1/{round(plan.target / plan.samples):,} of it, at many batch sizes and with many seeds"
    )
    if plan.stand_in:
        said += (
            f", a model with {_digits(100 * plan.stand_in / task.parameters)}% of the parameters"
        )
    minutes, share = _digits(header.settings.budget / 60), _digits(100 * plan.cost)
    return (f"{said}. That takes {minutes} minutes, {share}% of the whole training's time.",)


def _digits(number: float, form: str = ",g") -> str:
    """The number to two significant digits: more would be claimed than is known."""
    return f"{float(f'{number:.2g}'):{form}}"


def _longer(safe: str, found: schema.Growth, s: Summary) -> str:
    """The advice for a longer training than was tried: what is safe, what is likely, the costs."""
    parts = [safe]
    if grown := found.predicted:
        size, low, high = (_digits(x, ",.0f") for x in (grown.batch_size, grown.low, grown.high))
        sizes, ends = f"up to batch {size}", f"{low} to {high}"
        if not grown.is_closed:
            sizes, ends = f"batch {size} or more", f"{low} or more"
        interval = f"predicted, 95% confidence interval {ends}"
        parts.append(f"{sizes} is likely within {_tolerated(s)} ({interval})")
    cost = next((c for c in found.costs if c.batch_size == s.named), None)
    if s.named and (cost is None or (cost.low == 0 and math.isinf(cost.high))):
        parts.append(f"what batch {s.named:,} costs is not known")
    elif cost and s.named:
        extra = f"at least {_extra(cost.low, s)}" if math.isinf(cost.high) else _interval(cost, s)
        samples = f"{extra} more {plural(s.sample)} than batch {s.batch_size:,}"
        parts.append(f"batch {s.named:,} needs {samples} and {_saved(cost, s)} steps (predicted)")
    then = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"
    return f"For {_count(found.samples, s)}, {then}."


def _saved(cost: schema.Cost, s: Summary) -> str:
    """The interval of the steps that a batch size saves."""
    lowest = min(cost.low, LENGTHS[0] * s.tolerance)  # beyond that it is not known
    ends = cost.high, lowest
    least, most = (1 - (1 + end) * s.batch_size / cost.batch_size for end in ends)
    if math.isinf(cost.high) or least < 0:
        return f"at most {max(0.0, most):.0%} fewer"
    return f"{least:.0%} to {most:.0%} fewer"


def _growth(found: schema.Growth | None, s: Summary) -> str:
    """The remark on what would narrow a prediction, or allow one; empty where nothing would."""
    if found is None or not s.checked:
        return ""
    needs = f"surely need more than {_tolerated(s)} more {plural(s.sample)}"
    unknown = f"Which batch size {_count(found.samples, s)} allow is not known:"
    if found.why == "none":
        said = f"{unknown} at no length was a size surely within {_tolerated(s)}, or beyond;"
    elif found.why == "unchecked":
        said = f"{unknown} the real model was not compared with its stand-in;"
    elif found.why:
        said = f"{unknown} the stand-in was not seen to agree with the real model; another one or"
    elif found.predicted and not found.predicted.is_closed:
        count = _count(next(x.samples for x in reversed(found.lengths) if not x.is_closed), s)
        beyond = f"no batch size was surely beyond {_tolerated(s)}"
        said = f"Over {count} {beyond}, so no upper end is known; larger sizes or"
    elif not found.agree:
        said = "The lengths that were tried disagree on how the batch size grows;"
    elif sum(one.is_closed for one in found.lengths) == 1:
        power = f"the power {found.slope:.2g} is that of public trainings"
        said = f"At one length alone did a batch size {needs}, so growth was not measured: {power};"
    else:
        return ""
    return f"{said} a new run with a longer --budget would tell."


def _advice(s: Summary) -> str:
    found, base = s.recommendation, f"batch {s.batch_size:,}"
    if found.why == "unmeasured":
        return "Nothing can be said yet: no batch size was compared with another."
    if found.why == "flat":
        fall = f"the validation loss of {base} does not fall"
        remedy = "try another Task.lr, more data, or another --budget"
        return f"No batch size can be advised: {fall}; {remedy}."
    samples = _count(found.samples or 0, s)
    size = found.batch_size or s.batch_size
    settings = f"batch {size:,} with learning rate {found.lr or s.lr:.3g}"
    run = next((run for run in s.checked if run.batch_size == found.batch_size), None)
    above = (run for run in s.checked if run.batch_size > size and not run.within)
    larger = next(above, None)
    why = f"batch {larger.batch_size:,} {_needs(larger, s)}" if larger else "none was decided"
    if s.growth and s.checked:
        unsafe = f"no larger batch than {s.batch_size:,} is known to be safe"
        passed = "it" if run else "no larger one"
        safe = f"{settings} is safe ({passed} passed over {samples})"
        safe = safe if found.batch_size else unsafe
        return _longer(safe, s.growth, s)
    if found.batch_size is None:
        more = "--resume with more --seeds" if s.status == "complete" else "--resume"
        unknown = f"For {samples} it is not known whether a larger batch can be used"
        return f"{unknown}: {why}; {more} may tell, till then stay at {base}."
    if run:
        saved = 1 - run.steps * (1 + run.overhead) / ((found.samples or 0) // s.batch_size)
        steps = f"{abs(saved):.0%} {'fewer' if saved >= 0 else 'more'} optimizer steps"
        said = f"For {samples}, train at {settings}: it {_needs(run, s)} and {steps} "
        return said + "for the same loss."
    assert larger is not None
    if not larger.beyond:
        why += f", so it is not certain whether it stays within {_tolerated(s)}"
    return f"For {samples}, stay at {settings}: {why}."


def remarks(s: Summary) -> tuple[str, ...]:
    """At most three more sentences, the most important first."""
    said = [_growth(s.growth, s)]
    if s.growth and abs(s.growth.drift) >= 1:
        way = (
            f"{'fell' if s.growth.drift < 0 else 'rose'} {_digits(2.0 ** abs(s.growth.drift))}-fold"
        )
        whole = f"over {_count(s.growth.samples, s)} another one may be better"
        said.append(
            f"From the shortest length to the longest the best learning rate {way}: {whole}."
        )
    if abs(s.octaves) >= FARTHEST:
        rate = f"{_digits(2.0**s.octaves)} times the task's, the last that is tried"
        said.append(
            f"The search for the learning rate of batch {s.batch_size:,} ended at {rate}; another "
            "Task.lr would tell whether a better one lies beyond."
        )
    # A budget is over by design.
    return tuple([*unfinished(s.status.replace("budget", "complete")), *filter(None, said)][:3])


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
    title = f"{'a stand-in of ' if s.stand_in else ''}{s.task} over {found.samples:,} {samples}"
    title += f"; larger batches warmed up over {warmup:,} {samples}" * (warmup > 0)
    costs = {cost.batch_size: _interval(cost, s) for cost in s.growth.costs} if s.growth else {}
    if not costs:
        return Table(title, HEADS, tuple(rows))
    sizes = [s.batch_size, *(run.batch_size for run in s.checked)]
    known = dict(zip(sizes, rows, strict=True))
    # Named sizes may be too large for the lengths that were tried, or lie between those.
    known |= {size: (show(size), "–", "–", "not tried", "–", "–") for size in costs.keys() - known}
    # In the place of the steps over this length.
    predicted = (
        (*known[size][:4], costs.get(size, "–").replace("more than", ">"), known[size][5])
        for size in sorted(known)
    )
    return Table(title, (*HEADS[:4], "predicted for your run", HEADS[5]), tuple(predicted))


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


def _interval(run: schema.Cost, s: Summary) -> str:
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
