"""The findings of a study: a pure function of the header and the results."""

import math
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from steadygrad.noise.schedule import BatchSizeSchedule
from steadygrad.studies.advise import schema, words
from steadygrad.studies.advise.analysis import RATES, Evidence
from steadygrad.studies.advise.pairs import Better, Pairs
from steadygrad.studies.advise.plan import BRANCHES, OTHER_RATES, lengths_of
from steadygrad.studies.advise.schema import (
    Checked,
    Header,
    Noise,
    Point,
    Recommendation,
    Stage,
    Summary,
)
from steadygrad.studies.folder import Results
from steadygrad.studies.sequential import LOOKS

# Optimizers of torch whose weight decay is a part of the gradient.
COUPLED = {"SGD", "ASGD", "Adam", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop"}


def summarize(header: Header, results: Results, status: str) -> Summary:
    """Draws the conclusions from the results; ``status`` is that of the summary."""
    rise, plan = header.rise(results), header.plan
    evidence = Evidence(header, Results(results.select(Noise)) if rise else results)
    recommendation = Recommendation(why="flat") if rise else _recommendation(evidence)
    schedule, going_on, rates = _schedule(evidence), _going_on(evidence), _rates(evidence)
    findings = (
        recommendation,
        schema.Unfinished() if status in ("interrupted", "failed") else None,
        *rates,
        _larger(evidence),
        _flat(evidence),
        schedule,
        going_on,
    )
    found = Summary(
        study="advise",
        status=status,
        task=header.task.name,
        sample=header.task.sample,
        batch_size=plan.batch_size,
        lr=evidence.task.lr * (evidence.tuned(evidence.base) or 1.0),
        tolerance=evidence.tolerance,
        rise=rise,
        findings=tuple(finding for finding in findings if finding is not None),
        recommendation=recommendation,
        rates=rates,
        schedule=schedule,
        going_on=going_on,
        checked=tuple(_checked(evidence, pairs) for pairs in evidence.sizes.values()),
        points=tuple(_measured(evidence, point) for point in results.select(Point)),
    )
    return found.worded(words)


def _recommendation(evidence: Evidence) -> Recommendation:
    size, base, task = evidence.constant, evidence.plan.batch_size, evidence.task
    if not evidence.length:
        return Recommendation(why="flat")
    if not evidence.sizes:
        return Recommendation(why="unmeasured")
    if size is None:
        minutes = _minutes(evidence)
        return Recommendation(why="undecided", samples=evidence.length, minutes=minutes)
    # Half-lives in samples, of Adam's second moment and of weights that only decay.
    lr = evidence.lr(size) * (evidence.tuned(str(size)) or 1.0)
    at, rate = (base, task.lr) if evidence.header.settings.keep_half_life else (size, lr)
    decay = 0.0 if task.optimizer in COUPLED else rate * (task.weight_decay or 0.0)
    beta2 = task.beta2 if task.beta2 and task.beta2 < 1 else None
    overhead, low, high = evidence.sizes[size].overheads if size > base else (None,) * 3
    return Recommendation(
        batch_size=size,
        lr=lr,
        warmup_samples=0 if size == base else evidence.warmup_samples,
        samples=evidence.length,
        overhead=overhead,
        low=low,
        high=high,
        half_life=at * math.log(0.5) / math.log(beta2) if beta2 else None,
        decay_half_life=at * math.log(2) / decay if decay else None,
    )


def _minutes(evidence: Evidence) -> float:
    """Time for the pairs that would decide over the size that needs the fewest."""
    sizes, most = evidence.sizes.items(), evidence.failed or math.inf
    open_ = (pairs for size, pairs in sizes if size < most and not pairs.passed)
    missing = min((pairs.needed - len(pairs) for pairs in open_), default=LOOKS[0])
    decays = evidence.task.lr_decay != "none"
    own = sum(lengths_of(evidence.length, evidence.tolerance)) if decays else evidence.length
    # The other searches take their parts as well.
    samples = missing * (own + evidence.length) / (1 - BRANCHES - OTHER_RATES)
    speed = evidence.plan.samples_per_second * evidence.header.runtime.workers
    return samples / speed / 60


def _checked(evidence: Evidence, pairs: Pairs) -> Checked:
    first = pairs.runs[0]
    overhead, low, high = pairs.overheads
    return Checked(
        batch_size=first.batch_size,
        stages=first.stages,
        warmup_samples=first.warmup_samples,
        steps=first.steps,
        seeds=len(pairs),
        loss=float(pairs.finals.mean()),
        overhead=overhead,
        low=low,
        high=high,
        within=pairs.passed,
        beyond=pairs.failed,
    )


def _rates(evidence: Evidence) -> tuple[schema.RateVerdict, ...]:
    """Verdicts on the learning rates of the smallest batch and of the recommended one."""
    found = []
    for size in dict.fromkeys((evidence.plan.batch_size, evidence.constant)):
        known = evidence.rate(size) if size else {}
        if size is None or len(known) < len(RATES):
            continue
        others = tuple(
            schema.OtherRate(
                lr=evidence.lr(size) * rate,
                seeds=other.pairs,
                mean=other.mean,
                low=other.low,
                high=other.high,
            )
            for rate, other in known.items()
        )
        found.append(
            schema.RateVerdict(
                verdict=verdict(known),
                batch_size=size,
                lr=evidence.lr(size),
                samples=evidence.length,
                others=others,
            )
        )
    return tuple(found)


def verdict(others: Mapping[float, Better]) -> str:
    """Of a learning rate beside others; empty where it is not known, or both are better."""
    better = [rate for rate, other in others.items() if other.sure]
    if len(better) == 1:
        return "low" if better[0] > 1 else "high"
    return "fits" if all(other.never for other in others.values()) else ""


def _larger(evidence: Evidence) -> schema.Larger | None:
    least = evidence.constant or evidence.plan.batch_size
    above = (pairs for size, pairs in evidence.sizes.items() if size > least)
    pairs = next((pairs for pairs in above if not pairs.passed), None)
    return schema.Larger(run=_checked(evidence, pairs)) if pairs else None


def _flat(evidence: Evidence) -> schema.Flat | None:
    flat = [i for i, critical in evidence.criticals.items() if not critical.resolved]
    if not flat:
        return None
    seen = tuple(evidence.plan.points[i] for i in flat)
    return schema.Flat(points=seen, epochs=seen[-1] / evidence.task.train_size)


def _schedule(evidence: Evidence) -> schema.Schedule | None:
    if not evidence.schedule:
        return None
    pairs, tokens = evidence.schedule_pairs, evidence.task.tokens_per_sample
    rows = [
        {"from_samples": n, "batch_size": b, "lr": evidence.lr(b)} for n, b in evidence.schedule
    ]
    own = evidence.schedule[0][1] == evidence.plan.batch_size
    return schema.Schedule(
        stages=msgspec.convert(rows, tuple[Stage, ...]),
        steps=evidence.steps(evidence.schedule),
        warmup_samples=0 if own else evidence.warmup_samples,
        advised=pairs is not None and pairs.passed,
        check=_checked(evidence, pairs) if pairs else None,
        megatron=BatchSizeSchedule(rows).to_megatron(tokens) if tokens else "",
    )


def _going_on(evidence: Evidence) -> schema.GoingOn | None:
    """Batch size and learning rate for continuing from the last resolved point."""
    # A point whose file is damaged is there again when the study goes on.
    there = {point.point for point in evidence.results.select(Point)}
    known = (i for i, c in evidence.criticals.items() if c.resolved and i in there)
    last = max(known, default=None)
    if last is None:
        return None
    critical, plan = evidence.criticals[last], evidence.plan
    size = evidence.safe(critical)
    return schema.GoingOn(
        from_samples=plan.points[last],
        samples=plan.branch_samples[last],
        batch_size=size,
        lr=evidence.lr(size),
        known=critical.known,
        diverged=int(evidence.diverged) if critical.known and size < critical.within else None,
    )


def _measured(evidence: Evidence, point: Point) -> schema.Measured:
    critical = evidence.criticals.get(point.point)
    noise = evidence.results.get(Noise, point.point)
    return schema.Measured(
        samples=point.samples,
        valid_loss=point.valid_loss,
        noise=noise and replace(noise, time={}),
        critical=critical and replace(critical, safe=evidence.safe(critical)),
        resolved=critical is not None and critical.resolved,
    )
