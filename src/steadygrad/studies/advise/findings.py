"""The findings of a study: a pure function of the header and the results."""

import math

import msgspec
from msgspec.structs import replace

from steadygrad.noise.schedule import BatchSizeSchedule
from steadygrad.studies.advise import schema, words
from steadygrad.studies.advise.analysis import Evidence
from steadygrad.studies.advise.schema import Header, Noise, Point, Recommendation, Stage, Summary
from steadygrad.studies.folder import Results

# Optimizers of torch whose weight decay is a part of the gradient.
COUPLED = {"SGD", "ASGD", "Adam", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop"}


def summarize(header: Header, results: Results, status: str) -> Summary:
    """Draws the conclusions from the results; ``status`` is that of the summary."""
    evidence, plan = Evidence(header, results), header.plan
    recommendation, rate = _recommendation(evidence), evidence.rate
    schedule, going_on = _schedule(evidence), _going_on(evidence)
    ended = schema.Unfinished(measured=len(evidence.criticals), planned=len(plan.points))
    unplanned = schema.Unplanned() if recommendation.batch_size and not plan.candidates else None
    findings = (
        recommendation,
        None if status == "complete" else ended,
        rate if rate.samples else None,
        unplanned or _larger(evidence),
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
        lr=evidence.task.lr,
        tolerance=evidence.tolerance,
        findings=tuple(finding for finding in findings if finding is not None),
        recommendation=recommendation,
        rate=rate,
        schedule=schedule,
        going_on=going_on,
        checked=tuple(evidence.checked),
        points=tuple(_measured(evidence, point) for point in results.select(Point)),
    )
    return found.worded(words)


def _recommendation(evidence: Evidence) -> Recommendation:
    size, base = evidence.constant, evidence.plan.batch_size
    run, task = evidence.passed, evidence.task
    if size is None:
        why = "runs" if evidence.measured else _fall(evidence, [*evidence.criticals])
        return Recommendation(why=why if evidence.criticals else "unmeasured")
    # Half-lives in samples, of Adam's second moment and of weights that only decay.
    at = base if evidence.header.settings.keep_half_life else size
    decay = 0.0 if task.optimizer in COUPLED else evidence.lr(at) * (task.weight_decay or 0.0)
    beta2 = task.beta2 if task.beta2 and task.beta2 < 1 else None
    return Recommendation(
        batch_size=size,
        lr=evidence.lr(size),
        warmup_samples=0 if size == base else evidence.warmup_samples,
        samples=evidence.length,
        overhead=run.overhead if run else None,
        low=run.low if run else None,
        high=run.high if run else None,
        basis="trained" if run or evidence.failed else "own" if size == base else "predicted",
        known=evidence.known,
        half_life=at * math.log(0.5) / math.log(beta2) if beta2 else None,
        decay_half_life=at * math.log(2) / decay if decay else None,
    )


def _fall(evidence: Evidence, points: list[int]) -> str:
    """The fall of the smallest batch's loss along branches that tell of no batch size."""
    if {p.point for p in evidence.results.select(Point) if not p.valid_loss}.issuperset(points):
        return "zero"
    falls = any(not evidence.criticals[i].fall <= 0 for i in points)
    return "slightly" if falls else "flat"


def _larger(evidence: Evidence) -> schema.Larger | None:
    if evidence.constant is None or not evidence.checked:
        return None
    run, most = evidence.failed, evidence.checked[-1].batch_size
    sure = run is not None and run.low > evidence.tolerance
    lost = int(evidence.diverged) if evidence.constant < evidence.diverged <= most else None
    gap = sure and not evidence.known and evidence.passed is None
    return schema.Larger(run=run, gap=gap, diverged=lost if run is None else None)


def _flat(evidence: Evidence) -> schema.Flat | None:
    flat = [i for i, critical in evidence.criticals.items() if not critical.resolved]
    if not flat or not evidence.measured:
        return None
    seen = tuple(evidence.plan.points[i] for i in flat)
    epochs = seen[-1] / evidence.task.train_size
    return schema.Flat(points=seen, epochs=epochs, how=_fall(evidence, flat))


def _schedule(evidence: Evidence) -> schema.Schedule | None:
    if not evidence.schedule:
        return None
    run, tokens = evidence.schedule_check, evidence.task.tokens_per_sample
    rows = [
        {"from_samples": n, "batch_size": b, "lr": evidence.lr(b)} for n, b in evidence.schedule
    ]
    own = evidence.schedule[0][1] == evidence.plan.batch_size
    return schema.Schedule(
        stages=msgspec.convert(rows, tuple[Stage, ...]),
        steps=evidence.steps(evidence.schedule),
        warmup_samples=0 if own else evidence.warmup_samples,
        basis="predicted" if run is None else "trained",
        advised=run is not None and run.within,
        check=run,
        megatron=BatchSizeSchedule(rows).to_megatron(tokens) if tokens else "",
    )


def _going_on(evidence: Evidence) -> schema.GoingOn | None:
    """Batch size and learning rate for continuing from the last resolved point."""
    last = max((i for i, c in evidence.criticals.items() if c.resolved), default=None)
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
