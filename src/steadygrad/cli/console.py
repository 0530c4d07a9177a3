"""What a person sees in the terminal: progress, a table, the recommendation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from steadygrad.cli.progress import BarMonitor, LineMonitor, SilentMonitor

__all__ = ["Console", "make_monitor", "print_summary", "print_words"]


class Console:
    """Where things are printed.

    Args:
        json: Keep stdout free for JSON.
    """

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self.errors = RichConsole(stderr=True, highlight=False)
        self.output = self.errors if json else RichConsole(highlight=False)


@contextmanager
def make_monitor(
    console: Console, is_main: bool, budget_left: Callable[[], float]
) -> Iterator[SilentMonitor | LineMonitor | BarMonitor]:
    """A bar in a terminal, plain lines elsewhere, silence on all ranks but the first.

    Args:
        console: Its stderr is written to.
        is_main: Whether this is the first rank.
        budget_left: Seconds of the budget that are left.
    """
    if not is_main:
        yield SilentMonitor()
    elif not console.errors.is_terminal:
        yield LineMonitor(budget_left)
    else:
        columns = (
            TextColumn("{task.description:<40}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
        )
        with Progress(*columns, console=console.errors, transient=True) as progress:
            yield BarMonitor(progress, budget_left)


def print_summary(summary: Mapping[str, Any], report: Path, console: Console) -> None:
    """Prints the table of points, the recommendation in words, and where the report is."""
    out = console.output
    if summary["points"]:
        out.print(_table(summary))
    print_words(summary["recommendation"]["words"], report, console)


def print_words(words: Sequence[str], report: Path, console: Console) -> None:
    """Prints sentences, and where the report is."""
    out = console.output
    for sentence in words:
        out.print(escape(sentence))
    # Not wrapped: a path is there to be clicked or copied.
    out.print(f"\nReport: {escape(str(report))}", soft_wrap=True)


def _table(summary: Mapping[str, Any]) -> Table:
    sample = summary["sample"]
    table = Table(title=f"{summary['task']}: batch sizes in units of one {sample}")
    for heading in ("after", "validation loss", "noise scale", "critical batch size"):
        table.add_column(heading, justify="right")
    for point in summary["points"]:
        table.add_row(
            f"{point['samples']:,}",
            f"{point['valid_loss']:.4f}",
            _noise(point["noise"]),
            _critical(point["critical"]),
        )
    return table


def _noise(noise: Mapping[str, Any] | None) -> str:
    if noise is None:
        return "-"
    if not noise["resolved"]:
        return f"unresolved, above {noise['low']:,.0f}"
    return f"{noise['value']:,.0f} ({noise['low']:,.0f} to {noise['high']:,.0f})"


def _critical(critical: Mapping[str, Any] | None) -> str:
    if critical is None or math.isnan(critical["value"]):
        return "-" if critical is None else "unresolved"
    if critical["at_edge"] == "above":
        return f"{critical['value']:,.0f} or more"
    high = f"to {critical['high']:,.0f}" if math.isfinite(critical["high"]) else "or more"
    return f"{critical['value']:,.0f} ({critical['low']:,.0f} {high})"
