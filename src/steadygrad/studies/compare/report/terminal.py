"""The table that ``steadygrad compare`` prints before its words."""

from collections.abc import Mapping
from typing import Any

from rich.table import Column, Table

from steadygrad.studies.compare.report.tables import difference, mean_loss, saved
from steadygrad.studies.text import show

__all__ = ["table"]


def table(summary: Mapping[str, Any]) -> Table | None:
    """One row for each optimizer, batch size and horizon; None where nothing was judged."""
    if not summary["verdicts"]:
        return None
    heads = ("batch", "after", "loss", "difference", "AdamW's samples", "verdict")
    columns = [Column(name, justify="right") for name in heads]
    found = Table("optimizer", *columns, title=f"{summary['task']}: other optimizers beside AdamW")
    for row in summary["verdicts"]:
        place = summary["optimizers"][row["optimizer"]], f"x{row['multiple']}", show(row["samples"])
        found.add_row(*place, mean_loss(row), difference(row), saved(row), row["verdict"])
    return found
