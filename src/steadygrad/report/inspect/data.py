"""What an ``inspect`` record holds, gathered by phase and layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steadygrad.record import Run
from steadygrad.report.numbers import number

__all__ = ["AFTER", "BEFORE", "KINDS", "TITLES", "Histogram", "Inspection", "gather", "shown"]

BEFORE, AFTER = "before", "after"
TITLES = {BEFORE: "one loss scale", AFTER: "the scales proposed"}
KINDS = ("activations", "weights")
# Of a phase: what is drawn is its second half.
PARTS = 8


@dataclass(frozen=True)
class Histogram:
    """Shares of a layer's gradients by binary exponent, as float16 was to hold them.

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
        layers: Names in the order of the model; the loss's is empty.
        histograms: By phase, kind and layer.
        losses: ``(step, loss)`` by phase.
        rows: The summary's rows by layer.
        phases: The summary's rows by phase.
        status: ``"complete"``, ``"interrupted"``, ``"budget"``, ``"failed"``, or ``"unfinished"``
            when the record has no end.
    """

    name: str
    header: Mapping[str, Any]
    layers: Sequence[str]
    histograms: Mapping[str, Mapping[str, Mapping[str, Histogram]]]
    losses: Mapping[str, Sequence[tuple[float, float]]]
    rows: Mapping[str, Mapping[str, Any]]
    phases: Mapping[str, Mapping[str, Any]]
    verdict: Mapping[str, Any]
    proposal: Mapping[str, Any]
    words: Sequence[str]
    status: str

    def names(self, finding: str) -> list[str]:
        """Layers of which the verdict says this."""
        found = self.verdict.get(finding)
        return [name for name in self.layers if isinstance(found, Mapping) and name in found]


def shown(name: str) -> str:
    """A layer's name; that of the loss is empty."""
    return name or "(outside)"


def gather(run: Run) -> Inspection:
    """Sorts a record; what is missing becomes empty or NaN."""
    summary = run.summary or {}
    parts, ends = run.select("part"), run.select("end")
    words = summary.get("words")
    task = _mapping(run.header, "task")
    rows, phases = summary.get("layers"), _mapping(summary, "phases")
    return Inspection(
        name=str(task.get("name") or "the task"),
        header=run.header,
        layers=_layers(parts),
        histograms={phase: _histograms(parts, phase) for phase in (BEFORE, AFTER)},
        losses={phase: _losses(parts, phase) for phase in (BEFORE, AFTER)},
        rows={
            str(row.get("name")): row
            for row in (rows if isinstance(rows, list) else [])
            if isinstance(row, Mapping)
        },
        phases={p: _mapping(phases, p) for p in TITLES if _mapping(phases, p)},
        verdict=_mapping(summary, "verdict"),
        proposal=_mapping(summary, "proposal"),
        words=[str(word) for word in words] if isinstance(words, list) else [],
        status=str(ends[-1].get("status")) if ends else "unfinished",
    )


def _layers(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    seen = {name for part in parts for kind in KINDS for name in part[kind]}
    return [name for name in (parts[0]["scales"] if parts else ()) if name in seen]


def _losses(parts: Sequence[Mapping[str, Any]], phase: str) -> list[tuple[float, float]]:
    own = sorted((part["steps"], number(part["loss"])) for part in parts if part["phase"] == phase)
    return [(float(step), loss) for step, loss in own]


def _histograms(parts: Sequence[Mapping[str, Any]], phase: str) -> dict[str, dict[str, Histogram]]:
    settled = [p for p in parts if p["phase"] == phase and p["part"] >= PARTS // 2]
    found: dict[str, dict[str, Histogram]] = {}
    for kind in KINDS:
        names = dict.fromkeys(name for part in settled for name in part[kind])
        pieces = {name: [p[kind][name] for p in settled if name in p[kind]] for name in names}
        found[kind] = {name: _sum(some) for name, some in pieces.items()}
    return found


def _sum(pieces: Sequence[Mapping[str, Any]]) -> Histogram:
    counts: dict[int, int] = {}
    for piece in pieces:
        for exponent, count in enumerate(piece["counts"], start=piece["low"]):
            counts[exponent] = counts.get(exponent, 0) + count
    zero, over = (sum(piece[name] for piece in pieces) for name in ("zero", "over"))
    total = max(1, zero + over + sum(counts.values()))
    return Histogram(zero / total, over / total, {e: n / total for e, n in counts.items() if n})


def _mapping(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, Mapping) else {}
