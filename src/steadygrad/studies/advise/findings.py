"""The findings of a study: a pure function of the header and the results."""

import math
from collections.abc import Iterator, Mapping

from steadygrad.studies.advise import schema, words
from steadygrad.studies.advise.analysis import RATES, BatchSizes, Pairs
from steadygrad.studies.advise.plan import rate_of, warmup_samples
from steadygrad.studies.advise.schema import Checked, Header, Noise, Recommendation, Summary
from steadygrad.studies.folder import Results

# Optimizers of torch whose weight decay is a part of the gradient.
COUPLED = {"SGD", "ASGD", "Adam", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop"}


def summarize(header: Header, results: Results, status: str) -> Summary:
    """Draws the conclusions from the results; ``status`` is that of the summary."""
    rise = header.rise(results)
    found = BatchSizes(header, Results() if rise else results)
    measured = results.get(Noise, found.length)
    recommendation = Recommendation(why="flat") if rise else _recommendation(found)
    rates = tuple(_rates(found))
    said = Summary(
        study="advise",
        status=status,
        task=header.task.name,
        sample=header.task.sample,
        batch_size=header.plan.arms[0],
        lr=rate_of(header.task, header.plan.arms[0], found.tuned(0) or 0.0),
        tolerance=header.settings.tolerance,
        rise=rise,
        findings=(recommendation, *rates),
        recommendation=recommendation,
        rates=rates,
        checked=tuple(_checked(found, arm, pairs) for arm, pairs in found.pairs.items()),
        noise=measured.points if measured else (),
    )
    return said.worded(words)


def _recommendation(found: BatchSizes) -> Recommendation:
    arm, task = found.advised, found.task
    if not found.length:
        return Recommendation(why="flat")
    if not found.pairs:
        return Recommendation(why="unmeasured")
    if arm is None:
        return Recommendation(why="undecided", samples=found.length)
    # Half-lives in samples, of Adam's second moment and of weights that only decay.
    size = found.plan.arms[arm]
    lr = rate_of(task, size, found.tuned(arm) or 0.0)
    at, rate = (task.batch_size, task.lr) if found.settings.keep_half_life else (size, lr)
    decay = 0.0 if task.optimizer in COUPLED else rate * (task.weight_decay or 0.0)
    beta2 = task.beta2 if task.beta2 and task.beta2 < 1 else None
    overhead, low, high = found.pairs[arm].overheads if arm else (None,) * 3
    return Recommendation(
        batch_size=size,
        lr=lr,
        warmup_samples=warmup_samples(found.task, found.length, size, tunes=found.settings.tune),
        samples=found.length,
        overhead=overhead,
        low=low,
        high=high,
        half_life=at * math.log(0.5) / math.log(beta2) if beta2 else None,
        decay_half_life=at * math.log(2) / decay if decay else None,
    )


def _checked(found: BatchSizes, arm: int, pairs: Pairs) -> Checked:
    size, (overhead, low, high) = found.plan.arms[arm], pairs.overheads
    return Checked(
        batch_size=size,
        lr=pairs.runs[0].lr,
        warmup_samples=warmup_samples(found.task, found.length, size, tunes=found.settings.tune),
        steps=found.length // size,
        seeds=len(pairs),
        loss=float(pairs.finals.mean()),
        overhead=overhead,
        low=low,
        high=high,
        within=pairs.passed,
        beyond=pairs.failed,
    )


def _rates(found: BatchSizes) -> Iterator[schema.RateVerdict]:
    """Verdicts on the learning rates of the smallest batch and of the recommended one."""
    for arm, known in found.rates.items():
        if len(known) == len(RATES):
            yield schema.RateVerdict(
                verdict=verdict(known),
                batch_size=found.plan.arms[arm],
                lr=rate_of(found.task, found.plan.arms[arm]),
                samples=found.length,
                others=tuple(known.values()),
            )


def verdict(others: Mapping[float, schema.OtherRate]) -> str:
    """Of a learning rate beside others; empty where it is not known, or both are better."""
    better = [step for step, other in others.items() if other.verdict == "better"]
    if len(better) == 1:
        return "low" if better[0] > 0 else "high"
    return "fits" if all(other.verdict == "not better" for other in others.values()) else ""
