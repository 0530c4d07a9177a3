"""The table that ``steadygrad advise`` prints before its words."""

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Column, Table

__all__ = ["table"]

HEAD = (
    "after",
    "validation\nloss",
    "noise\nscale",
    "largest batch\nwithin\ntolerance",
    "limit",
    "trained\nfrom\nscratch",
)


def table(summary: Mapping[str, Any]) -> Table | None:
    """One row for each point of training in ``summary.json``; None where none was reached."""
    if not summary["points"]:
        return None
    title = f"{summary['task']}: batch sizes in units of one {summary['sample']}"
    found = Table(*(Column(name, justify="right") for name in HEAD), title=title)
    for point in summary["points"]:
        # The runs from scratch end at one of the points.
        last = point["samples"] == summary["recommendation"]["samples"]
        found.add_row(
            f"{point['samples']:,}",
            f"{point['valid_loss']:.4f}",
            _noise(point["noise"]),
            *_critical(point["critical"]),
            "\n".join(map(_scratch, summary["checked"])) or "-" if last else "-",
        )
    return found


def _noise(noise: Mapping[str, Any] | None) -> str:
    if noise is None:
        return "-"
    if not noise["resolved"]:
        return f"unresolved, above {noise['low']:,.0f}"
    return f"{noise['value']:,.0f} ({noise['low']:,.0f} to {noise['high']:,.0f})"


def _critical(critical: Mapping[str, Any] | None) -> tuple[str, str]:
    """The largest batch size within the tolerance, and the limit."""
    if critical is None:
        return "-", "-"
    if math.isnan(critical["value"]):
        return "unresolved", "-"
    within, low, high = f"{critical['within']:,}", f"{critical['low']:,.0f}", critical["high"]
    if math.isinf(critical["beyond"]):
        return f"{within} (all tried)", f"{low} or more"
    upper = f"to {high:,.0f}" if math.isfinite(high) else "or more"
    return within, f"{critical['value']:,.0f} ({low} {upper})"


def _scratch(run: Mapping[str, Any]) -> str:
    """Extra samples of one batch size that was trained from scratch."""
    # 3 stands for a run that diverged, or fell further behind than is measured.
    extra = f"{run['overhead']:+.0%}" if run["overhead"] < 3 else "failed"
    return f"{run['batch_size']:,}: {extra}"
