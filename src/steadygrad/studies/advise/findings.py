"""The findings of a study: a pure function of the header and the results."""

import math

from msgspec.structs import replace

from steadygrad.studies.advise import words
from steadygrad.studies.advise.analysis import BatchSizes, Pairs
from steadygrad.studies.advise.growth import growth_of, longest, rungs_of
from steadygrad.studies.advise.plan import named_sizes, rate_of, warmup_samples
from steadygrad.studies.advise.schema import Checked, Header, Noise, Recommendation, Summary
from steadygrad.studies.folder import Results

# Optimizers of torch whose weight decay is a part of the gradient.
COUPLED = {"SGD", "ASGD", "Adam", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop"}


def summarize(header: Header, results: Results, status: str) -> Summary:
    """Draws the conclusions from the results; ``status`` is that of the summary."""
    # Of the model itself the first value is known, and of a stand-in none.
    rise = "" if header.plan.stand_in else header.rise(results)
    rungs, real = rungs_of(header, Results() if rise else results)
    found, grown, named = longest(rungs), growth_of(rungs, real), named_sizes(header.settings)
    measured = results.get(Noise, found.samples)
    recommendation = Recommendation(why="flat") if rise else _recommendation(found, real)
    if grown and grown.why and header.plan.stand_in and recommendation.batch_size:
        # What a stand-in passed says nothing of a model that was not seen to agree with it.
        recommendation = Recommendation(why="undecided", samples=found.samples)
    if grown and (then := grown.predicted):
        # To two digits, as more would be claimed than is known, and no size that cannot be used.
        size = round(float(f"{then.batch_size:.2g}"))
        size = max(header.plan.arms[0], size - size % header.runtime.world_size)
        usable = (header.plan.arms[0], *named) if header.settings.batch_sizes else (size, *named)
        size = max((one for one in usable if one <= size), default=min(usable))
        grown = replace(grown, likely=_advice(found, real, size, grown.samples))
    said = Summary(
        study="advise",
        status=status,
        task=header.task.name,
        stand_in=header.plan.stand_in,
        sample=header.task.sample,
        batch_size=header.plan.arms[0],
        lr=rate_of(header.task, header.plan.arms[0], found.tuned or 0.0),
        octaves=(real or found).tuned or 0.0,
        tolerance=header.settings.tolerance,
        rise=rise,
        findings=(recommendation, *([grown] if grown else [])),
        recommendation=recommendation,
        growth=grown,
        named=max(named, default=0),
        checked=tuple(_checked(found, arm, pairs) for arm, pairs in found.pairs.items()),
        noise=measured.points if measured else (),
    )
    return said.worded(words)


def _recommendation(found: BatchSizes, real: BatchSizes | None) -> Recommendation:
    arm = found.advised
    if found.is_flat:
        return Recommendation(why="flat")
    if not found.pairs:
        return Recommendation(why="unmeasured")
    if arm is None:
        return Recommendation(why="undecided", samples=found.samples)
    overhead, low, high = found.pairs[arm].overheads if arm else (None,) * 3
    known = _advice(found, real, found.plan.arms[arm], found.samples)
    return replace(known, overhead=overhead, low=low, high=high)


def _advice(found: BatchSizes, real: BatchSizes | None, size: int, samples: int) -> Recommendation:
    """Settings for a batch size, with the rate by the task's rule from the best one."""
    task, lr = found.task, rate_of(found.task, size, (real or found).tuned or 0.0)
    # Half-lives in samples, of Adam's second moment and of weights that only decay.
    at, rate = (task.batch_size, task.lr) if found.settings.keep_half_life else (size, lr)
    decay = 0.0 if task.optimizer in COUPLED else rate * (task.weight_decay or 0.0)
    beta2 = task.beta2 if task.beta2 and task.beta2 < 1 else None
    return Recommendation(
        batch_size=size,
        lr=lr,
        warmup_samples=warmup_samples(task, found.plan.target or samples, size),
        samples=samples,
        half_life=at * math.log(0.5) / math.log(beta2) if beta2 else None,
        decay_half_life=at * math.log(2) / decay if decay else None,
    )


def _checked(found: BatchSizes, arm: int, pairs: Pairs) -> Checked:
    size, (overhead, low, high) = found.plan.arms[arm], pairs.overheads
    return Checked(
        batch_size=size,
        lr=pairs.runs[0].lr,
        warmup_samples=warmup_samples(found.task, found.samples, size),
        steps=found.samples // size,
        seeds=len(pairs),
        loss=float(pairs.finals.mean()),
        overhead=overhead,
        low=low,
        high=high,
        within=pairs.passed,
        beyond=pairs.failed,
    )
