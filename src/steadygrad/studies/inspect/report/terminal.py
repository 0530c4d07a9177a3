"""The table that ``steadygrad inspect`` prints before its words."""

from collections.abc import Mapping
from typing import Any

from rich.table import Column, Table

from steadygrad.studies.inspect.schema import AFTER, BEFORE, KINDS, layer_title

__all__ = ["table"]


def table(summary: Mapping[str, Any]) -> Table | None:
    """One row for each layer in ``summary.json``; None where no gradient was counted."""
    if not summary["layers"]:
        return None
    columns = [Column(name, justify="right") for name in ("zero", "subnormal", "overflowed")]
    title = f"{summary['task']}: gradients in float16, one loss scale / proposed"
    found = Table("layer", *columns, title=title)
    for layer in summary["layers"]:
        cells = [_both(layer, share) for share in ("zero", "subnormal")]
        overflowed = " / ".join(f"{layer[phase]['overflows']}" for phase in (BEFORE, AFTER))
        found.add_row(layer_title(layer["name"]), *cells, f"{overflowed} steps")
    return found


def _both(layer: Mapping[str, Any], share: str) -> str:
    """The larger of the activations' and the weights' shares, before and after."""
    cells = []
    for phase in (BEFORE, AFTER):
        shares = [layer[phase][kind][share] for kind in KINDS if layer[phase].get(kind)]
        cells.append(f"{max(shares):.1%}" if shares else "-")
    return " / ".join(cells)
