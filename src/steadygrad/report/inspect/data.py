"""What an ``inspect`` record holds, gathered by phase and layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steadygrad.record import End, Run
from steadygrad.record.schema import inspect as schema
from steadygrad.record.schema.inspect import AFTER, BEFORE, KINDS, PARTS, Header, Part

__all__ = ["TITLES", "Histogram", "Inspection", "gather"]

TITLES = {BEFORE: "one loss scale", AFTER: "the proposed scales"}


@dataclass(frozen=True)
class Histogram:
    """Shares of a layer's scaled gradients by binary exponent.

    Attributes:
        zero: Share of zeros.
        over: Share of values that were not finite.
        exponents: Shares of the others, by exponent.
    """

    zero: float
    over: float
    exponents: Mapping[int, float]


@dataclass(frozen=True)
class Inspection:
    """The whole record of an ``inspect`` run.

    Attributes:
        header: The record's header.
        layers: Names in the order of the model; the loss has an empty one.
        histograms: Of the second half of a phase, by phase, kind and layer.
        losses: ``(step, loss)`` by phase.
        rows: The summary's rows by layer.
        phases: The summary's rows by phase.
        diagnosis: The summary's, by finding and layer.
        proposal: The summary's; empty before there is one.
        words: The summary's sentences.
        finished: Whether the record has an end and a summary.
    """

    header: Header
    layers: Sequence[str]
    histograms: Mapping[str, Mapping[str, dict[str, Histogram]]]
    losses: Mapping[str, Sequence[tuple[float, float]]]
    rows: Mapping[str, Mapping[str, Any]]
    phases: Mapping[str, Mapping[str, Any]]
    diagnosis: Mapping[str, Any]
    proposal: Mapping[str, Any]
    words: Sequence[str]
    finished: bool

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.header.task.name

    def names(self, finding: str) -> list[str]:
        """Layers with a finding of the diagnosis."""
        return [name for name in self.layers if name in self.diagnosis.get(finding, ())]


def gather(run: Run) -> Inspection:
    """Sorts a record; what a summary would hold is empty as long as there is none."""
    summary = run.summary or {}
    parts = run.select(Part)
    seen = {name for part in parts for kind in KINDS for name in getattr(part, kind)}
    return Inspection(
        header=run.header,
        layers=[name for name in (parts[0].scales if parts else ()) if name in seen],
        histograms={phase: _histograms(parts, phase) for phase in TITLES},
        losses={
            phase: [(float(part.steps), part.loss) for part in parts if part.phase == phase]
            for phase in TITLES
        },
        rows={row["name"]: row for row in summary.get("layers", ())},
        phases=summary.get("phases", {}),
        diagnosis=summary.get("diagnosis", {}),
        proposal=summary.get("proposal") or {},
        words=summary.get("words", ()),
        finished=bool(summary and run.events and isinstance(run.events[-1], End)),
    )


def _histograms(parts: Sequence[Part], phase: str) -> dict[str, dict[str, Histogram]]:
    settled = [part for part in parts if part.phase == phase and part.part >= PARTS // 2]
    found: dict[str, dict[str, Histogram]] = {}
    for kind in KINDS:
        counted: list[dict[str, schema.Histogram]] = [getattr(part, kind) for part in settled]
        names = dict.fromkeys(name for each in counted for name in each)
        found[kind] = {
            name: _sum([each[name] for each in counted if name in each]) for name in names
        }
    return found


def _sum(pieces: Sequence[schema.Histogram]) -> Histogram:
    counts: dict[int, int] = {}
    for piece in pieces:
        for exponent, count in enumerate(piece.counts, start=piece.low):
            counts[exponent] = counts.get(exponent, 0) + count
    zero, over = sum(piece.zero for piece in pieces), sum(piece.over for piece in pieces)
    total = max(1, zero + over + sum(counts.values()))
    return Histogram(zero / total, over / total, {e: n / total for e, n in counts.items() if n})
