"""The table that ``steadygrad advise`` prints before its words."""

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

__all__ = ["table"]

COLUMNS = (
    "after",
    "validation\nloss",
    "noise\nscale",
    "largest batch\nwithin\ntolerance",
    "limit",
    "trained\nfrom\nscratch",
)


def table(summary: Mapping[str, Any]) -> Table | None:
    """One row for each point of training; None where no point was reached.

    Args:
        summary: The content of ``summary.json``.
    """
    if not summary["points"]:
        return None
    found = Table(title=f"{summary['task']}: batch sizes in units of one {summary['sample']}")
    for heading in COLUMNS:
        found.add_column(heading, justify="right")
    length = summary["recommendation"]["samples"]
    for point in summary["points"]:
        critical = point["critical"]
        found.add_row(
            f"{point['samples']:,}",
            f"{point['valid_loss']:.4f}",
            _noise(point["noise"]),
            _within(critical),
            _limit(critical),
            # The runs from scratch are as long as the way to the last point that tells.
            _scratch(summary) if point["samples"] == length else "-",
        )
    return found


def _noise(noise: Mapping[str, Any] | None) -> str:
    if noise is None:
        return "-"
    if not noise["resolved"]:
        return f"unresolved, above {noise['low']:,.0f}"
    return f"{noise['value']:,.0f} ({noise['low']:,.0f} to {noise['high']:,.0f})"


def _within(critical: Mapping[str, Any] | None) -> str:
    if critical is None:
        return "-"
    if math.isnan(critical["value"]):
        return "unresolved"
    return f"{critical['within']:,}{' (all tried)' if math.isinf(critical['beyond']) else ''}"


def _limit(critical: Mapping[str, Any] | None) -> str:
    if critical is None or math.isnan(critical["value"]):
        return "-"
    low, high = f"{critical['low']:,.0f}", critical["high"]
    if math.isinf(critical["beyond"]):
        return f"{low} or more"
    upper = f"to {high:,.0f}" if math.isfinite(high) else "or more"
    return f"{critical['value']:,.0f} ({low} {upper})"


def _scratch(summary: Mapping[str, Any]) -> str:
    """Extra samples of each batch size that was trained from scratch."""
    lines = []
    for run in summary["checked"]:
        # 3 stands for a run that diverged, or fell further behind than can be told.
        extra = f"{run['overhead']:+.0%}" if run["overhead"] < 3 else "failed"
        lines.append(f"{run['batch_size']:,}: {extra}")
    return "\n".join(lines) or "-"
