"""Standard output and standard error, whatever they are connected to, and a study's progress."""

import io
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from steadygrad._checks import InputError

# Options of rich's console. No markup: a task may have any name.
PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
# Of a table: spaces between columns, and the characters that a column of words keeps.
GAP, LEAST = 2, 14
EVERY = 30.0  # seconds between two lines of a log


def printable(text: str) -> str:
    """Escapes control characters, with which a text could rewrite the terminal's lines."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def emit(text: str) -> None:
    """Writes to standard output."""
    _write(text, sys.stdout)


def note(text: str) -> None:
    """Writes to standard error. A study does not end because nobody can read its progress."""
    with suppress(InputError):
        _write(text, sys.stderr)


def _write(text: str, stream: TextIO | None) -> None:
    if stream is None:  # the process was started with it closed
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(f"{text}\n".encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        # What is left in the buffer would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            found = f"Expected room for what is printed. Found {error.strerror}."
            raise InputError(f"{found} Remedy: free some.") from error


def rendered(*parts: str | Mapping[str, Any] | None, stream: TextIO | None) -> str:
    """Texts, and a summary's table if it has one, as a stream shows them."""
    from rich.console import Console

    buffer, terminal = io.StringIO(), stream is not None and stream.isatty()
    console = Console(file=buffer, force_terminal=terminal or None, **PLAIN)
    for part in parts:
        if isinstance(part, str):
            console.print(printable(part))
        elif part is not None:
            console.print(drawn(part, console.width))
    return buffer.getvalue().rstrip("\n")


def drawn(table: Mapping[str, Any], width: int) -> str:
    """A summary's table: at most two lines of heads, and one for each row.

    Columns of words give way first: the ends of long texts stay, where they differ. Columns for
    which there is no room then are named below; those on the left come first.
    """
    from rich.cells import cell_len, set_cell_size

    words, given, room = table["text_columns"], dict[int, int](), width + GAP
    columns = [[*_head(x), *xs] for x, *xs in zip(table["columns"], *table["rows"], strict=True)]
    wide = [max(map(cell_len, column)) for column in columns]
    for i, own in enumerate(wide):
        least = min(own, LEAST) if i < words else own
        if least + GAP <= room:
            given[i], room = least, room - least - GAP
    for i in (i for i in given if i < words):
        more = min(wide[i] - given[i], room)
        given[i], room = given[i] + more, room - more

    def cell(i: int, text: str) -> str:
        if cell_len(text) > given[i]:
            text = f"…{set_cell_size(text[::-1], given[i] - 1)[::-1]}"
        return set_cell_size(text, given[i]) if i < words else text.rjust(given[i])

    cells = ([cell(i, row[i]) for i in given] for row in zip(*columns, strict=True))
    first, second, *rows = ((" " * GAP).join(row).rstrip() for row in cells)
    rule = (" " * GAP).join("─" * n for n in given.values())
    absent = ", ".join(name for i, name in enumerate(table["columns"]) if i not in given)
    rows += [f"On the page also: {absent}."] * bool(absent)
    lines = ["", table["title"], *[first] * bool(first), second, rule, *rows, ""]
    return "\n".join(map(printable, lines))


def _head(name: str) -> tuple[str, str]:
    """The two lines of a head of which the longer one is shortest."""
    parts = name.split(" ")
    heads = ((" ".join(parts[:i]), " ".join(parts[i:])) for i in range(len(parts)))
    return min(heads, key=lambda lines: max(map(len, lines)))


class Monitor:
    """Shows a study's progress, for a person or in a log, and when the work and the budget end.

    Args:
        is_shown: Whether anything is written: by the first rank alone, and not if it is quiet.
        budget_left: Seconds until the budget is over.
        clock: Seconds that only ever grow.
    """

    def __init__(
        self,
        is_shown: bool,
        budget_left: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True, **PLAIN)
        self.budget_left, self.clock = budget_left, clock
        self.drawn = is_shown and console.is_terminal
        self.write = note if is_shown else lambda line: None
        # What a line of a log holds, and a bar.
        self.columns = (
            progress.TextColumn("{task.description:<40}", markup=False),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[rest]}"),
        )
        self.bar = progress.Progress(
            progress.BarColumn(), *self.columns, console=console, get_time=clock,
            speed_estimate_period=600.0, transient=True, disable=not self.drawn,
        )  # fmt: skip
        self.bar.add_task("preparing", total=None, rest="")
        (self.task,) = self.bar.tasks

    def begin(self, total: int, done: int) -> None:
        """Starts the clock; ``done`` of the work was done before."""
        self.printed = self.clock()
        self.bar.reset(self.task.id, total=total, completed=done)
        if not self.drawn:
            self.write(f"work done: {done:,} of {total:,}")

    def advance(self, samples: int, what: str) -> None:
        """Counts samples of work that were done, and names their trial."""
        rest = f"left, budget {self.budget_left() / 60:.1f} min"
        self.bar.update(self.task.id, advance=samples, description=printable(what), rest=rest)
        if not self.drawn and self.clock() >= self.printed + EVERY:
            self.printed = self.clock()
            self.write(" ".join(str(column.render(self.task)) for column in self.columns))

    def say(self, line: str) -> None:
        """Prints a line for the user, above the bar."""
        self.write(f"steadygrad: {printable(line)}")
