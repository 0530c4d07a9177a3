"""The contents of an ``inspect`` record, gathered by phase and layer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steadygrad.studies.folder import Run
from steadygrad.studies.inspect import schema as schema
from steadygrad.studies.inspect.schema import AFTER, BEFORE, KINDS, PARTS, Part, layers_of

__all__ = ["TITLES", "Histogram", "Inspection"]

TITLES = {BEFORE: "one loss scale", AFTER: "the proposed scales"}


@dataclass(frozen=True)
class Histogram:
    """Shares of a layer's scaled gradients: zeros, not finite, the others by binary exponent."""

    zero: float
    over: float
    exponents: Mapping[int, float]


class Inspection:
    """The whole record of an ``inspect`` run. What a missing summary would hold is empty."""

    def __init__(self, run: Run) -> None:
        summary, parts = run.summary or {}, run.select(Part)
        self.name: str = run.header.task.name
        self.steps: int = run.header.settings.steps
        # Names in the order of the model; the loss has an empty one.
        self.layers = layers_of(parts)
        # Histograms of the second half of a phase, by phase, kind and layer.
        self.histograms = {phase: _histograms(parts, phase) for phase in TITLES}
        # Steps and loss, by phase.
        self.losses = {
            phase: [
                (float(part.steps), part.loss)
                for part in parts
                if part.phase == phase and part.loss is not None
            ]
            for phase in TITLES
        }
        self.rows: Sequence[Mapping[str, Any]] = summary.get("layers", ())
        self.phases: Mapping[str, Mapping[str, Any]] = summary.get("phases", {})
        self.proposal: Mapping[str, Any] = summary.get("proposal") or {}
        self.finished = bool(summary)
        self._diagnosis: Mapping[str, Any] = summary.get("diagnosis", {})
        # Steps whose forward pass was not finite, by the cause in words.
        self.forward: Mapping[str, int] = self._diagnosis.get("forward", {})

    def names(self, finding: str) -> list[str]:
        """Layers with a finding of the diagnosis."""
        return [name for name in self.layers if name in self._diagnosis.get(finding, ())]


def _histograms(parts: Sequence[Part], phase: str) -> dict[str, dict[str, Histogram]]:
    settled = [part for part in parts if part.phase == phase and part.part >= PARTS // 2]
    found: dict[str, dict[str, Histogram]] = {}
    for kind in KINDS:
        pieces: dict[str, list[schema.Histogram]] = {}
        for part in settled:
            for name, piece in getattr(part, kind).items():
                pieces.setdefault(name, []).append(piece)
        found[kind] = {name: _shares(own) for name, own in pieces.items()}
    return found


def _shares(pieces: Sequence[schema.Histogram]) -> Histogram:
    counts: Counter[int] = Counter()
    for piece in pieces:
        counts.update(dict(enumerate(piece.counts, start=piece.low)))
    zero, over = sum(piece.zero for piece in pieces), sum(piece.over for piece in pieces)
    total = max(1, zero + over + counts.total())
    return Histogram(zero / total, over / total, {e: n / total for e, n in counts.items() if n})
