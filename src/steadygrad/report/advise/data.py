"""What an ``advise`` record holds, gathered by point of training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steadygrad.record import Run, plural
from steadygrad.report.numbers import number

__all__ = ["Advice", "Point", "batch_of", "gather", "rows_of"]


@dataclass(frozen=True)
class Point:
    """One point of training at which the study stopped and measured.

    Attributes:
        samples: Samples seen until then; NaN when the record does not say.
        steps: Optimizer steps until then.
        valid_loss: Validation loss there.
        noise: The ``noise`` event, or empty when it is missing.
        critical: The ``critical`` event, or empty when it is missing.
        branches: The ``branch`` events.
    """

    samples: float = math.nan
    steps: Any = None
    valid_loss: Any = None
    noise: Mapping[str, Any] = field(default_factory=dict)
    critical: Mapping[str, Any] = field(default_factory=dict)
    branches: Sequence[Mapping[str, Any]] = ()

    @property
    def batch_sizes(self) -> list[float]:
        """Batch sizes of the branches, ascending."""
        sizes = {batch_of(branch) for branch in self.branches}
        return sorted(size for size in sizes if not math.isnan(size))

    def losses(self, batch_size: float) -> list[float]:
        """Final losses of all repeats at one batch size, in the order of the record."""
        same = [branch for branch in self.branches if batch_of(branch) == batch_size]
        return [number(branch.get("loss")) for branch in same]

    def excess(self) -> dict[float, float]:
        """Extra samples, as a fraction, that each batch size needed."""
        given = self.critical.get("excess")
        if not isinstance(given, Mapping):
            return {}
        pairs = {_size(key): number(value) for key, value in given.items()}
        return {size: pairs[size] for size in sorted(pairs) if 0 < size < math.inf}

    @property
    def tolerance_level(self) -> float:
        """Mean loss of the smallest batch when its extra samples were still to come, or NaN.

        A batch size is acceptable when its branch ends at most this high.
        """
        return number(self.critical.get("level"))


@dataclass(frozen=True)
class Advice:
    """The whole record of an ``advise`` run.

    Attributes:
        samples: What several samples are called.
        points: In the order of training.
        training: ``(samples, loss)`` of the main trajectory, ascending.
        recommendation: That of the summary, or empty.
        tradeoff: That of the summary, or empty.
        status: ``"complete"``, ``"interrupted"``, ``"budget"``, ``"failed"``, or
            ``"unfinished"`` when the record has no end.
    """

    name: str
    sample: str
    samples: str
    header: Mapping[str, Any]
    task: Mapping[str, Any]
    settings: Mapping[str, Any]
    plan: Mapping[str, Any]
    points: Sequence[Point]
    training: Sequence[tuple[float, float]]
    recommendation: Mapping[str, Any]
    tradeoff: Mapping[str, Any]
    status: str
    tolerance: float

    @property
    def batch_size(self) -> float:
        """The recommended batch size, or NaN."""
        return batch_of(self.recommendation)

    @property
    def schedule(self) -> list[Mapping[str, Any]]:
        """Rows of the recommended schedule that name a batch size."""
        return [row for row in rows_of(self.recommendation, "schedule") if batch_of(row) > 0]

    def count(self, number: float) -> str:
        """What so many samples are called."""
        return self.sample if number == 1 else self.samples


def gather(run: Run) -> Advice:
    """Sorts a record; what is missing or malformed becomes empty or NaN."""
    task, settings = _mapping(run.header, "task"), _mapping(run.header, "settings")
    summary = run.summary or {}
    sample = str(task.get("sample") or "sample")
    training = [(number(e.get("samples")), number(e.get("loss"))) for e in run.select("train")]
    ends = run.select("end")
    return Advice(
        name=str(task.get("name") or "the task"),
        sample=sample,
        samples=plural(sample),
        header=run.header,
        task=task,
        settings=settings,
        plan=_mapping(run.header, "plan"),
        points=_points(run),
        training=sorted((x, y) for x, y in training if 0 < x < math.inf and math.isfinite(y)),
        recommendation=_mapping(summary, "recommendation"),
        tradeoff=_mapping(summary, "tradeoff"),
        status=str(ends[-1].get("status")) if ends else "unfinished",
        tolerance=number(settings.get("tolerance")),
    )


def _points(run: Run) -> list[Point]:
    found: dict[float, dict[str, Any]] = {}
    for kind in ("point", "noise", "critical", "branch"):
        for event in run.select(kind):
            index = number(event.get("point"))
            if math.isnan(index):
                continue
            entry = found.setdefault(index, {"branch": []})
            if kind == "branch":
                entry["branch"].append(event)
            else:
                entry[kind] = event
    # Of a point cut short the summary may know the critical batch size from fewer repeats.
    for index, row in enumerate(rows_of(run.summary or {}, "points")):
        if index in found and isinstance(row.get("critical"), Mapping):
            found[index].setdefault("critical", row["critical"])
    return [_point(found[index]) for index in sorted(found)]


def _point(events: Mapping[str, Any]) -> Point:
    at = events.get("point", {})
    samples = number(at.get("samples"))
    return Point(
        samples=samples if 0 < samples < math.inf else math.nan,
        steps=at.get("steps"),
        valid_loss=at.get("valid_loss"),
        noise=events.get("noise", {}),
        critical=events.get("critical", {}),
        branches=events["branch"],
    )


def batch_of(row: Mapping[str, Any]) -> float:
    """Batch size of a branch or of a row of a summary; NaN when it has no usable one."""
    size = number(row.get("batch_size"))
    return size if 0 < size < math.inf else math.nan


def rows_of(parent: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The rows of a list in a summary; empty when there is no such list."""
    rows = parent.get(key)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _mapping(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, Mapping) else {}


def _size(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
