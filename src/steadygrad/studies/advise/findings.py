"""The findings of a study: a pure function of the header and the results."""

import math
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from steadygrad.studies.advise import schema, words
from steadygrad.studies.advise.analysis import RATES, BatchSizes, Pairs
from steadygrad.studies.advise.growth import growth_of, longest, rungs_of
from steadygrad.studies.advise.plan import named_sizes, rate_of, warmup_samples
from steadygrad.studies.advise.schema import Checked, Header, Noise, Recommendation, Summary
from steadygrad.studies.folder import Results

# Optimizers of torch whose weight decay is a part of the gradient.
COUPLED = {"SGD", "ASGD", "Adam", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop"}


def summarize(header: Header, results: Results, status: str) -> Summary:
    """Draws the conclusions from the results; ``status`` is that of the summary."""
    rise = header.rise(results)
    rungs, real = rungs_of(header, Results() if rise else results)
    found, grown, named = longest(rungs), growth_of(rungs, real), named_sizes(header.settings)
    measured = results.get(Noise, found.length)
    recommendation = Recommendation(why="flat") if rise else _recommendation(found, real)
    if grown and grown.why and header.plan.stand_in and recommendation.batch_size:
        # What a stand-in passed says nothing of a model that was not seen to agree with it.
        recommendation = Recommendation(why="undecided", samples=found.length)
    if grown and (then := grown.predicted):
        # To two digits, as more would be claimed than is known, and no size that cannot be used.
        size = round(float(f"{then.batch_size:.2g}"))
        usable = (header.plan.arms[0], *named) if header.settings.batch_sizes else (size, *named)
        size = max((one for one in usable if one <= size), default=min(usable))
        grown = replace(grown, likely=_advice(found, real, size, grown.samples))
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
        findings=(recommendation, *([grown] if grown else []), *rates),
        recommendation=recommendation,
        growth=grown,
        named=max(named, default=0),
        rates=rates,
        checked=tuple(_checked(found, arm, pairs) for arm, pairs in found.pairs.items()),
        noise=measured.points if measured else (),
    )
    return said.worded(words)


def _recommendation(found: BatchSizes, real: BatchSizes | None) -> Recommendation:
    arm = found.advised
    if not found.length:
        return Recommendation(why="flat")
    if not found.pairs:
        return Recommendation(why="unmeasured")
    if arm is None:
        return Recommendation(why="undecided", samples=found.length)
    overhead, low, high = found.pairs[arm].overheads if arm else (None,) * 3
    known = _advice(found, real, found.plan.arms[arm], found.length)
    return replace(known, overhead=overhead, low=low, high=high)


def _advice(found: BatchSizes, real: BatchSizes | None, size: int, samples: int) -> Recommendation:
    """Settings for a batch size, with the rate of the nearest one whose rate is known."""
    task, known = found.task, real or found
    near = sorted(range(len(known.sizes)), key=lambda arm: abs(math.log(known.sizes[arm] / size)))
    steps = (known.tuned(arm) for arm in near)
    lr = rate_of(task, size, next((step for step in steps if step is not None), 0.0))
    # Half-lives in samples, of Adam's second moment and of weights that only decay.
    at, rate = (task.batch_size, task.lr) if found.settings.keep_half_life else (size, lr)
    decay = 0.0 if task.optimizer in COUPLED else rate * (task.weight_decay or 0.0)
    beta2 = task.beta2 if task.beta2 and task.beta2 < 1 else None
    return Recommendation(
        batch_size=size,
        lr=lr,
        warmup_samples=warmup_samples(task, found.plan.target or samples, size, tunes=found.tunes),
        samples=samples,
        half_life=at * math.log(0.5) / math.log(beta2) if beta2 else None,
        decay_half_life=at * math.log(2) / decay if decay else None,
    )


def _checked(found: BatchSizes, arm: int, pairs: Pairs) -> Checked:
    size, (overhead, low, high) = found.plan.arms[arm], pairs.overheads
    return Checked(
        batch_size=size,
        lr=pairs.runs[0].lr,
        warmup_samples=warmup_samples(found.task, found.length, size, tunes=found.tunes),
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
