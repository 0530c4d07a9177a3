"""``steadygrad inspect``: where float16 gradients underflow or overflow."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from steadygrad._checks import InputError
from steadygrad.cli.console import Console, print_words
from steadygrad.cli.options import Inspect
from steadygrad.cli.studying import run_study

if TYPE_CHECKING:
    from steadygrad.studies.inspect import Outcome

__all__ = ["run"]


def run(options: Inspect, began: float) -> int:
    """Runs, or goes on with, a study; writes its report and prints what it found.

    Args:
        options: The command line.
        began: Reading of ``time.monotonic()`` from which the budget counts.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that ended it.

    Raises:
        InputError: For anything that cannot be used.
    """
    from steadygrad.studies import inspect

    return run_study(inspect, options, began, check=_refuse_nothing, show=_show)


def _refuse_nothing(outcome: "Outcome") -> None:
    """A budget too small to compare anything is an error, not a verdict."""
    if outcome.summary["status"] == "budget" and outcome.summary["proposal"] is None:
        remedy = "go on by --resume RUN --budget TIME."
        if not outcome.summary["phases"]:
            # A part that is cut short leaves no trace: as much time again would come no further.
            remedy += " More time than this: not even an eighth of the first training was done."
        raise InputError(
            "The budget was over before scales were found: nothing is said of the layers. Found "
            f"{str(outcome.folder)!r} unfinished. Remedy: {remedy}"
        )


def _show(outcome: "Outcome", page: Path, console: Console) -> None:
    summary = outcome.summary
    if summary["layers"]:
        console.output.print(_table(summary))
    print_words(summary["words"], page, console)


def _table(summary: Mapping[str, Any]) -> Table:
    table = Table(title=f"{summary['task']}: gradients in float16, one loss scale / proposed")
    for heading in ("layer", "zero", "subnormal", "overflowed"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for layer in summary["layers"]:
        cells = [_both(layer, name) for name in ("zero", "subnormal")]
        steps = (layer[phase]["overflows"] for phase in ("before", "after"))
        overflowed = " / ".join(f"{count}" for count in steps)
        table.add_row(escape(layer["name"] or "(outside)"), *cells, f"{overflowed} steps")
    return table


def _both(layer: Mapping[str, Any], share: str) -> str:
    """The larger of activations' and weights' shares, before and after."""
    cells = []
    for phase in ("before", "after"):
        kinds = (layer[phase].get(kind) for kind in ("activations", "weights"))
        found = [kind[share] for kind in kinds if kind is not None]
        cells.append(f"{max(found):.1%}" if found else "-")
    return " / ".join(cells)
