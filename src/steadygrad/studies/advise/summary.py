"""A record becomes a summary: a pure function of the header and the events."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from steadygrad.record import SCHEMA
from steadygrad.studies.advise.critical import Critical
from steadygrad.studies.advise.recommend import WholeRun, schedule, tradeoff_rows, whole_run
from steadygrad.studies.advise.surface import Measured
from steadygrad.studies.advise.units import branches_of, critical_at
from steadygrad.studies.advise.words import Findings, megatron, sentences
from steadygrad.studies.ledger import Ledger

__all__ = ["summarize"]


def summarize(header: Mapping[str, Any], ledger: Ledger, status: str) -> dict[str, Any]:
    """Says what the recorded events mean.

    Args:
        header: The record's header.
        ledger: Its events.
        status: ``"complete"``, ``"interrupted"``, ``"budget"`` or ``"failed"``.

    Returns:
        The content of ``summary.json``; the recommendation's batch size is None when no critical
        batch size was measured.
    """
    criticals = _criticals(header, ledger)
    noises = {event["point"]: _public(event) for event in ledger.select("noise")}
    found = _findings(header, ledger, status, criticals)
    return {
        "schema": SCHEMA,
        "study": "advise",
        "status": status,
        "task": header["task"]["name"],
        "sample": found.sample,
        "recommendation": _recommendation(found),
        "points": [
            {
                "samples": event["samples"],
                "valid_loss": event["valid_loss"],
                "noise": noises.get(event["point"]),
                "critical": criticals[i].event() if (i := event["point"]) in criticals else None,
            }
            for event in ledger.select("point")
        ],
        "tradeoff": _tradeoff(found.run),
    }


def _findings(
    header: Mapping[str, Any], ledger: Ledger, status: str, criticals: Mapping[int, Critical]
) -> Findings:
    settings, plan = header["settings"], header["plan"]
    measured = [
        Measured(plan["points"][i], plan["branch_samples"][i], critical)
        for i, critical in criticals.items()
        if not math.isnan(critical.value)
    ]
    noises = ledger.select("noise")
    tolerance, lr, rule = (settings[name] for name in ("tolerance", "lr", "lr_rule"))
    run = whole_run(measured, tolerance) if measured else None
    return Findings(
        sample=header["task"]["sample"],
        settings=settings,
        status=status,
        run=run,
        last=measured[-1] if measured else None,
        planned=len(plan["points"]),
        points=len(criticals),
        unresolved=[plan["points"][i] for i, found in criticals.items() if math.isnan(found.value)],
        noise=noises[-1] if noises else None,
        schedule=schedule(measured, tolerance, lr, rule) if measured else [],
        warmup=_warmup(run, measured, rule),
    )


def _criticals(header: Mapping[str, Any], ledger: Ledger) -> dict[int, Critical]:
    """Critical batch sizes by point; of a point cut short, from two whole repeats at least."""
    found = {}
    events = ledger.select("branch")
    for i, multiples in enumerate(header["plan"]["multiples_by_point"]):
        branches = branches_of(events, i)
        repeats = [branch.repeat for branch in branches]
        whole = [repeat for repeat in set(repeats) if repeats.count(repeat) == len(multiples)]
        if len(whole) >= 2:
            kept = [branch for branch in branches if branch.repeat in whole]
            tolerance = header["settings"]["tolerance"]
            found[i] = critical_at(kept, tolerance, header["seed"], i)
    return found


def _public(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("event", "point", "time")}


def _recommendation(found: Findings) -> dict[str, Any]:
    run = found.run
    if run is None:
        trust = "noise" if found.noise and found.noise["resolved"] else "none"
        nothing = dict.fromkeys(
            ("batch_size", "samples", "value", "low", "high", "lr", "warmup_samples", "now")
        )
        return {
            **nothing,
            "words": sentences(found),
            "trust": trust,
            "schedule": [],
            "megatron": "",
        }
    return {
        "batch_size": run.batch_size,
        "samples": run.samples,
        "value": run.value,
        "low": run.low,
        "high": run.high,
        "lr": found.lr,
        "warmup_samples": found.warmup,
        "now": found.now,
        "words": sentences(found),
        "trust": "critical",
        "schedule": found.schedule,
        "megatron": megatron(found.schedule),
    }


def _warmup(run: WholeRun | None, measured: Sequence[Measured], rule: str) -> int:
    """Until the first point nothing says what learning rate the model can bear."""
    raised = run is not None and run.batch_size > run.sizes[0] and rule != "constant"
    return measured[0].samples if raised else 0


def _tradeoff(run: WholeRun | None) -> dict[str, Any] | None:
    if run is None or math.isinf(run.fitted):
        return None
    rows: Sequence[Mapping[str, Any]] = tradeoff_rows(run.fitted, run.sizes)
    measured = zip(rows, run.excess, strict=True)
    return {
        "critical_batch": run.fitted,
        "rows": [{**row, "excess": excess} for row, excess in measured],
    }
