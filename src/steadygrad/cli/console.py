"""Standard output and standard error, whatever they are connected to."""

import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

from steadygrad._checks import InputError, launched

# Options of rich's console. No markup: a task may have any name.
PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}


def printable(text: str) -> str:
    """Escapes control characters, with which a text could rewrite the terminal's lines."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def cleaned(value: Any) -> Any:
    """A nest of plain values in which every text is printable."""
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def emit(text: str) -> None:
    """Writes to standard output."""
    _write(text, sys.stdout)


def note(text: str) -> None:
    """Writes to standard error. A study does not end because nobody can read its progress."""
    with suppress(InputError):
        _write(text, sys.stderr)


def complain(message: str) -> None:
    """Writes an error as one line, from one process however many run."""
    try:
        rank = launched()[0]
    except InputError:
        rank = 0
    if rank == 0:
        note(f"steadygrad: {printable(' '.join(message.split()))}")


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


def rendered(*parts: Any, stream: TextIO | None) -> str:
    """Texts and rich's tables as a stream shows them."""
    from rich.console import Console

    buffer, terminal = io.StringIO(), stream is not None and stream.isatty()
    console = Console(file=buffer, force_terminal=terminal or None, **PLAIN)
    for part in parts:
        console.print(part)
    return buffer.getvalue().rstrip("\n")


def drawn(table: Mapping[str, Any]) -> Any:
    """A summary's table as rich draws it."""
    from rich.table import Table

    found = Table(title=table["title"])
    for number, name in enumerate(table["columns"]):
        side: Any = "left" if number < table["text_columns"] else "right"
        found.add_column(name, justify=side, overflow="fold")
    for row in table["rows"]:
        found.add_row(*row)
    return found
