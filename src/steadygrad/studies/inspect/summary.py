"""A record becomes a summary: a pure function of the header and the events."""

from collections.abc import Mapping
from typing import Any

from steadygrad.record import SCHEMA
from steadygrad.studies.inspect.plan import AFTER, BEFORE, PARTS
from steadygrad.studies.inspect.units import parts_in_order
from steadygrad.studies.inspect.verdict import Proposal, judge, layers_of, shares_of
from steadygrad.studies.inspect.words import Findings, code, sentences
from steadygrad.studies.ledger import Ledger

__all__ = ["summarize"]


def summarize(header: Mapping[str, Any], ledger: Ledger, status: str) -> dict[str, Any]:
    """Says what the recorded events mean.

    Args:
        header: The record's header.
        ledger: Its events.
        status: ``"complete"``, ``"interrupted"``, ``"budget"`` or ``"failed"``.

    Returns:
        The content of ``summary.json``.
    """
    parts = parts_in_order(ledger)
    proposed = ledger.find("proposal")
    proposal = Proposal(proposed["loss_scale"], proposed["layer_scales"]) if proposed else None
    phases = {phase: row for phase in (BEFORE, AFTER) if (row := _phase(ledger, phase))}
    # Before there is a proposal nothing is known to compare with.
    verdict = judge(parts if proposed else [])
    return {
        "schema": SCHEMA,
        "study": "inspect",
        "status": status,
        "task": header["task"]["name"],
        "sample": header["task"]["sample"],
        "verdict": {
            "fault": verdict.fault,
            "starved": dict(verdict.starved),
            "ceiling": dict(verdict.ceiling),
            "price": dict(verdict.price),
            "broken": dict(verdict.broken),
            "spilled": dict(verdict.spilled),
            "inside": dict(verdict.inside),
        },
        "proposal": None
        if proposal is None
        else {
            "loss_scale": proposal.loss_scale,
            "layer_scales": dict(proposal.layer_scales),
            "code": code(proposal),
        },
        "words": sentences(Findings(status, phases, verdict, proposal)),
        "phases": phases,
        "layers": _layers(parts),
    }


def _phase(ledger: Ledger, phase: str) -> dict[str, Any] | None:
    parts = parts_in_order(ledger, phase)
    if not parts:
        return None
    end = ledger.find("phase", phase)
    return {
        "steps": parts[-1]["steps"],
        "skipped": sum(part["skipped"] for part in parts),
        "loss": parts[-1]["loss"],
        "loss_scale": 2.0 ** parts[-1]["scales"][""],
        "valid_loss": end["valid_loss"] if end else None,
        "whole": len(parts) == PARTS,
    }


def _layers(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    shares = {phase: shares_of(parts, phase) for phase in (BEFORE, AFTER)}
    overflows = {
        phase: {
            name: sum(p["overflows"].get(name, 0) for p in parts if p["phase"] == phase)
            for name in layers_of(parts)
        }
        for phase in (BEFORE, AFTER)
    }
    return [
        {
            "name": name,
            **{
                phase: {**shares[phase].get(name, {}), "overflows": overflows[phase][name]}
                for phase in (BEFORE, AFTER)
            },
        }
        for name in layers_of(parts)
    ]
