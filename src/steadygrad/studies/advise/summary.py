"""A record becomes a summary: a pure function of the header and the events."""

import math
from typing import Any

import msgspec

from steadygrad.formulas.schedule import BatchSizeSchedule
from steadygrad.studies.advise.check import Checked
from steadygrad.studies.advise.explain import explain
from steadygrad.studies.advise.recommend import Evidence
from steadygrad.studies.advise.schema import Header, Noise, Point
from steadygrad.studies.folder import Results

__all__ = ["summarize"]

# Optimizers of torch whose weight decay is a part of the gradient.
COUPLED = {"SGD", "ASGD", "Adam", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop"}


def summarize(header: Header, results: Results, status: str) -> dict[str, Any]:
    """Draws the conclusions from the recorded events.

    Args:
        header: The record's header.
        results: The record's events.
        status: ``"complete"``, ``"interrupted"``, ``"budget"`` or ``"failed"``.

    Returns:
        The content of ``summary.json``; the recommendation's batch size is None when no critical
        batch size was measured.
    """
    evidence = Evidence(header, results)
    return {
        "task": header.task.name,
        "sample": header.task.sample,
        "words": explain(evidence, status),
        "recommendation": _recommendation(evidence),
        "schedule": _schedule(evidence),
        "going_on": _going_on(evidence),
        "rate": evidence.rate.as_dict(),
        "checked": [_checked(evidence, run) for run in evidence.checked],
        "points": [_point(evidence, event) for event in evidence.points],
    }


def _checked(evidence: Evidence, run: Checked) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(run)
    return fields | {"within": run.within(evidence.tolerance)}


def _point(evidence: Evidence, event: Point) -> dict[str, Any]:
    critical = evidence.criticals.get(event.point)
    noise = evidence.results.get(Noise, event.point)
    fields: dict[str, Any] = msgspec.to_builtins(noise) or {}
    measured = {name: fields[name] for name in fields if name not in ("kind", "time", "point")}
    return {
        "samples": event.samples,
        "valid_loss": event.valid_loss,
        "noise": measured or None,
        "critical": critical and critical.as_dict() | {"safe": evidence.safe(critical)},
        "resolved": critical is not None and critical.resolved,
    }


def _recommendation(evidence: Evidence) -> dict[str, Any]:
    """The fixed batch size for a run from scratch."""
    size, base, run = evidence.constant, evidence.plan.batch_size, evidence.passed
    if size is None:
        names = ["batch_size", "lr", "warmup_samples", "samples", "overhead", "low", "high"]
        names += ["half_life", "decay_half_life"]
        return {**dict.fromkeys(names), "basis": "none", "known": False}
    basis = "trained" if run or evidence.failed else "own" if size == base else "predicted"
    return {
        "batch_size": size,
        "lr": evidence.lr(size),
        "warmup_samples": 0 if size == base else evidence.warmup_samples,
        "samples": evidence.length,
        "overhead": run.overhead if run else None,
        "low": run.low if run else None,
        "high": run.high if run else None,
        "basis": basis,
        "known": evidence.known,
        **_half_lives(evidence, size),
    }


def _half_lives(evidence: Evidence, size: int) -> dict[str, float | None]:
    """Samples after which Adam's second moment, and weights that only decay, are halved."""
    task, kept = evidence.task, evidence.header.settings.keep_half_life
    at, beta2 = evidence.plan.batch_size if kept else size, task.beta2
    decay = 0.0 if task.optimizer in COUPLED else evidence.lr(at) * (task.weight_decay or 0.0)
    return {
        "half_life": at * math.log(0.5) / math.log(beta2) if beta2 and beta2 < 1 else None,
        "decay_half_life": at * math.log(2) / decay if decay else None,
    }


def _schedule(evidence: Evidence) -> dict[str, Any] | None:
    stages = evidence.schedule
    if not stages:
        return None
    rows = [{"from_samples": at, "batch_size": b, "lr": evidence.lr(b)} for at, b in stages]
    run, tokens = evidence.schedule_check, evidence.task.tokens_per_sample
    own = stages[0][1] == evidence.plan.batch_size
    return {
        "stages": rows,
        "steps": evidence.steps(stages),
        "warmup_samples": 0 if own else evidence.warmup_samples,
        "basis": "predicted" if run is None else "trained",
        "advised": run is not None and run.within(evidence.tolerance),
        "check": run and _checked(evidence, run),
        "megatron": BatchSizeSchedule(rows).to_megatron(tokens) if tokens else "",
    }


def _going_on(evidence: Evidence) -> dict[str, Any] | None:
    """Batch size and learning rate for continuing from the last resolved point."""
    if evidence.last is None:
        return None
    critical, plan = evidence.criticals[evidence.last], evidence.plan
    size = evidence.safe(critical)
    return {
        "from_samples": plan.points[evidence.last],
        "samples": plan.branch_samples[evidence.last],
        "batch_size": size,
        "lr": evidence.lr(size),
        "known": critical.known,
    }
