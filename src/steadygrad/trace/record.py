"""A traced step as a file of JSON."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from steadygrad.trace.equations import PROJECTIONS
from steadygrad.trace.sketches import Key, Sketch

__all__ = ["AFTER", "Row", "encoded", "file_name", "scaled"]

Row = tuple[Key, Sketch, list[float]]
# What a step begins with is what the step before ended with.
AFTER = {"start": "weight", "before": "state"}

SCHEMA = 1


def file_name(step: int, rank: int) -> str:
    """Name of the file of a step and a process."""
    return f"step-{step:09d}-rank-{rank:05d}.json"


def scaled(one: Sketch, sums: list[float]) -> tuple[list[float], float]:
    """Projections and norm: of a mean over rows where rows are counted."""
    rows = max(one.rows, 1)
    return [z / rows for z in sums[:PROJECTIONS]], math.sqrt(sums[PROJECTIONS] / rows)


def encoded(
    header: Mapping[str, Any],
    rows: Iterable[Row],
    noise: Mapping[Key, float],
    after: Mapping[Key, list[float]],
) -> bytes:
    """The file of a step: its header, and a record of each sketch.

    Weights and states at the start are named only, where they are those ``after`` the file before.
    """
    records = []
    for key, one, sums in rows:
        *projections, square, bad = sums
        same = after.get(key._replace(kind=AFTER.get(key.kind, ""))) == sums
        found = {
            **key._asdict(),
            "same": same,
            "type": one.type,
            "count": one.count,
            "rows": one.rows,
            "bad": int(bad),
            "copy": one.copy,
            "maker": one.maker,
            "drew": one.drew,
            "took": one.made[0],
            "since": one.made[1],
            "noise": noise.get(key),
        }
        # JSON has no infinity.
        if all(map(math.isfinite, sums)):
            found |= {"z": [_short(z) for z in projections], "square": _short(square)}
        found = {**key._asdict(), "same": True} if same else found
        records.append({name: value for name, value in found.items() if value})
    whole = {"schema": SCHEMA, **header, "records": records}
    return json.dumps(whole, separators=(",", ":"), default=str).encode()


def _short(value: float) -> float:
    """Nine digits, of which float32 has seven."""
    return float(f"{value:.9g}")
