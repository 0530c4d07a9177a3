"""The table that ``steadygrad compare`` prints before its words."""

from collections.abc import Mapping
from typing import Any

from rich.table import Column, Table

from steadygrad.report.compare.tables import HEAD, verdict_rows

__all__ = ["table"]


def table(summary: Mapping[str, Any]) -> Table | None:
    """One row for each optimizer, batch size and horizon; None where nothing was judged."""
    if not summary["verdicts"]:
        return None
    left, *right = HEAD
    columns = [Column(name, justify="right") for name in right]
    found = Table(left, *columns, title=f"{summary['task']}: validation loss, AdamW beside others")
    for row in verdict_rows(summary):
        found.add_row(*row)
    return found
