"""A record becomes a summary: a pure function of the header and the events."""

from collections.abc import Sequence
from typing import Any

from steadygrad.record.schema.inspect import AFTER, BEFORE, PARTS, SEARCH, Header, Part, Phase
from steadygrad.studies.inspect.diagnosis import (
    Diagnosis,
    diagnose,
    in_order,
    layers_of,
    propose,
    shares_of,
)
from steadygrad.studies.inspect.explain import code, explain
from steadygrad.studies.journal import Journal

__all__ = ["summarize"]


def summarize(header: Header, journal: Journal, status: str) -> dict[str, Any]:
    """Says what the recorded events mean.

    Args:
        header: The record's header.
        journal: Its events.
        status: ``"complete"``, ``"interrupted"``, ``"budget"`` or ``"failed"``.

    Returns:
        The content of ``summary.json``; the proposal is None, and the diagnosis empty, before one
        loss scale and scales for each layer can be compared.
    """
    parts = in_order(journal.select(Part))
    compared = [part for part in parts if part.phase in (BEFORE, SEARCH)]
    proposal = propose(parts) if len(compared) == 2 * PARTS else None
    diagnosis = diagnose(parts) if proposal else Diagnosis()
    phases = {
        phase: _phase(own, journal.get(Phase, phase))
        for phase in (BEFORE, AFTER)
        if (own := [part for part in parts if part.phase == phase])
    }
    return {
        "task": header.task.name,
        "sample": header.task.sample,
        "words": explain(status, phases, diagnosis, proposal),
        "diagnosis": {
            "fault": diagnosis.fault,
            **{name: dict(layers) for name, layers in vars(diagnosis).items()},
        },
        "proposal": proposal and {**proposal.as_dict(), "code": code(proposal)},
        "phases": phases,
        "layers": _layers(parts),
    }


def _phase(parts: Sequence[Part], end: Phase | None) -> dict[str, Any]:
    return {
        "steps": parts[-1].steps,
        "skipped": sum(part.skipped for part in parts),
        "loss": parts[-1].loss,
        "loss_scale": 2.0 ** parts[-1].scales[""],
        "valid_loss": end.valid_loss if end else None,
        "whole": len(parts) == PARTS,
    }


def _layers(parts: Sequence[Part]) -> list[dict[str, Any]]:
    shares = {phase: shares_of(parts, phase) for phase in (BEFORE, AFTER)}

    def row(name: str, phase: str) -> dict[str, Any]:
        overflows = sum(part.overflows.get(name, 0) for part in parts if part.phase == phase)
        return {**shares[phase].get(name, {}), "overflows": overflows}

    return [
        {"name": name, **{phase: row(name, phase) for phase in (BEFORE, AFTER)}}
        for name in layers_of(parts)
    ]
