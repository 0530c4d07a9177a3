"""A record becomes a summary: a pure function of the header and the events."""

import math
from typing import Any

import msgspec

from steadygrad.noise.schedule import BatchSizeSchedule
from steadygrad.record.schema.advise import Header, Noise
from steadygrad.studies.advise.explain import explain
from steadygrad.studies.advise.recommend import Evidence
from steadygrad.studies.journal import Journal

__all__ = ["summarize"]


def summarize(header: Header, journal: Journal, status: str) -> dict[str, Any]:
    """Says what the recorded events mean.

    Args:
        header: The record's header.
        journal: Its events.
        status: ``"complete"``, ``"interrupted"``, ``"budget"`` or ``"failed"``.

    Returns:
        The content of ``summary.json``; the recommendation's batch size is None when no critical
        batch size was measured.
    """
    evidence = Evidence(header, journal)
    noises = {event.point: event for event in journal.select(Noise)}
    return {
        "task": header.task.name,
        "sample": header.task.sample,
        "words": explain(evidence, status),
        "recommendation": _recommendation(evidence),
        "schedule": _schedule(evidence),
        "going_on": _going_on(evidence),
        "rate": evidence.rate.as_dict(),
        "checked": [run.as_dict() for run in evidence.checked],
        "points": [
            {
                "samples": event.samples,
                "valid_loss": event.valid_loss,
                "noise": _noise(noises.get(event.point)),
                "critical": evidence.criticals[event.point].as_dict()
                if event.point in evidence.criticals
                else None,
                "resolved": event.point in evidence.criticals
                and evidence.criticals[event.point].resolved,
            }
            for event in evidence.points
        ],
    }


def _noise(event: Noise | None) -> dict[str, Any] | None:
    if event is None:
        return None
    fields = msgspec.to_builtins(event)
    return {name: value for name, value in fields.items() if name not in ("event", "time", "point")}


def _recommendation(evidence: Evidence) -> dict[str, Any]:
    """The fixed batch size for a run from scratch."""
    size, base = evidence.constant, evidence.header.plan.batch_size
    if size is None:
        names = ("batch_size", "lr", "warmup_samples", "samples", "overhead", "low", "high")
        return {**dict.fromkeys(names), "basis": "none", "half_life": None}
    run, trained = evidence.passed, bool(evidence.checked)
    own = size == base
    zero = 0.0 if own else None
    return {
        "batch_size": size,
        "lr": evidence.lr(size),
        "warmup_samples": 0 if own else evidence.warmup_samples,
        "samples": evidence.length,
        "overhead": run.overhead if run else zero,
        "low": run.low if run else zero,
        "high": run.high if run else zero,
        "basis": "trained" if trained else "predicted",
        "half_life": half_life(evidence, size),
    }


def half_life(evidence: Evidence, size: int) -> float | None:
    """Samples after which Adam's second moment has forgotten half, at a batch size."""
    header = evidence.header
    beta2 = header.task.beta2
    if beta2 is None or not 0 < beta2 < 1:
        return None
    if header.settings.keep_half_life:
        size = header.plan.batch_size
    return size * math.log(0.5) / math.log(beta2)


def _schedule(evidence: Evidence) -> dict[str, Any] | None:
    stages = evidence.schedule
    if not stages:
        return None
    rows = [
        {"from_samples": start, "batch_size": size, "lr": evidence.lr(size)}
        for start, size in stages
    ]
    run, tokens = evidence.schedule_check, evidence.header.task.tokens_per_sample
    within = run is not None and run.within(evidence.header.settings.tolerance)
    return {
        "stages": rows,
        "steps": evidence.steps(stages),
        "warmup_samples": evidence.warmup_samples
        if stages[0][1] > evidence.header.plan.batch_size
        else 0,
        "basis": "predicted" if run is None else "trained",
        "advised": within,
        "check": run.as_dict() if run else None,
        "megatron": BatchSizeSchedule(rows).to_megatron(tokens) if tokens else "",
    }


def _going_on(evidence: Evidence) -> dict[str, Any] | None:
    """Batch size and learning rate for going on from the last point that tells."""
    if evidence.last is None:
        return None
    critical, plan = evidence.criticals[evidence.last], evidence.header.plan
    return {
        "from_samples": plan.points[evidence.last],
        "samples": plan.branch_samples[evidence.last],
        "batch_size": critical.safe,
        "lr": evidence.lr(critical.safe),
        "known": critical.known,
    }
