"""What a person sees in the terminal: progress, a table, the recommendation."""

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

__all__ = ["Console", "make_monitor", "print_summary"]


class Console:
    """Where things are printed.

    Args:
        json: Keep stdout free for JSON.
    """

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self.errors = RichConsole(stderr=True, highlight=False)
        self.output = self.errors if json else RichConsole(highlight=False)


class SilentMonitor:
    """Says nothing, as on all ranks but one."""

    def begin(self, total: int, done: int) -> None:
        """Ignored."""

    def advance(self, samples: int, what: str) -> None:
        """Ignored."""

    def say(self, line: str) -> None:
        """Ignored."""


class LineMonitor:
    """Prints a plain line at every twentieth of the work."""

    def __init__(self) -> None:
        self._total, self._done, self._first, self._printed = 1, 0, 0, 0
        self._began, self._what = time.monotonic(), ""

    def begin(self, total: int, done: int) -> None:
        """Starts the clock."""
        self._total, self._done, self._first = total, done, done
        self._printed = 20 * done // total
        self._began = time.monotonic()
        print(f"{total:,} samples of work, {done:,} of them done", file=sys.stderr, flush=True)

    def advance(self, samples: int, what: str) -> None:
        """Prints how far the study is, when it is a twentieth further."""
        self._done += samples
        self._what = what or self._what
        if 20 * self._done // self._total == self._printed:
            return
        self._printed = 20 * self._done // self._total
        speed = (self._done - self._first) / max(1e-9, time.monotonic() - self._began)
        left = max(0, self._total - self._done) / speed
        part = min(1.0, self._done / self._total)
        line = f"{part:4.0%}  {left:4.0f}s left  {self._what}"
        print(line, file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Prints the line."""
        print(f"steadygrad: {line}", file=sys.stderr, flush=True)


class BarMonitor:
    """Draws a progress bar with the time left."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("preparing", total=None)

    def begin(self, total: int, done: int) -> None:
        """Starts the bar."""
        self._progress.reset(self._task, total=total, completed=done)

    def advance(self, samples: int, what: str) -> None:
        """Moves the bar."""
        self._progress.update(self._task, advance=samples, description=what or None)

    def say(self, line: str) -> None:
        """Prints the line above the bar."""
        self._progress.console.print(f"steadygrad: {escape(line)}")


@contextmanager
def make_monitor(
    console: Console, is_main: bool
) -> Iterator[SilentMonitor | LineMonitor | BarMonitor]:
    """A bar in a terminal, plain lines elsewhere, silence on all ranks but the first."""
    if not is_main:
        yield SilentMonitor()
    elif not console.errors.is_terminal:
        yield LineMonitor()
    else:
        columns = (
            TextColumn("{task.description:<40}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        with Progress(*columns, console=console.errors, transient=True) as progress:
            yield BarMonitor(progress)


def print_summary(summary: Mapping[str, Any], report: Path, console: Console) -> None:
    """Prints the table of points, the recommendation in words, and where the report is."""
    out = console.output
    if summary["points"]:
        out.print(_table(summary))
    for sentence in summary["recommendation"]["words"]:
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
