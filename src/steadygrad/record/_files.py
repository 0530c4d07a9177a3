"""The files of a run, and how they come into being: beside, then renamed into place."""

import os
from contextlib import suppress
from pathlib import Path

from steadygrad._checks import InputError

__all__ = [
    "RECORD",
    "REPORT",
    "SUMMARY",
    "RecordError",
    "cannot_write",
    "make_empty_folder",
    "remove_folders",
    "replace_file",
    "write_beside",
    "write_report",
    "wrong_line",
]

RECORD, SUMMARY, REPORT = "record.jsonl", "summary.json", "report.html"


class RecordError(InputError):
    """A run record is missing, damaged, too new, or cannot be written."""


def cannot_write(path: Path, error: OSError) -> str:
    """One line that says what could not be written, why, and the remedy."""
    return (
        f"Cannot write to {str(path)!r}: {error.strerror or error}. "
        "Remedy: name a folder with --out that you may write to, on a disk with free space."
    )


def wrong_line(folder: Path, number: int, expected: str, found: str) -> str:
    """The message about a line that is whole, and not what it should be.

    Args:
        folder: The run's folder.
        number: Of the line, from 1; 0 stands for the summary.
        expected: What it should hold.
        found: What it holds.
    """
    if number == 0:
        where = repr(str(folder / SUMMARY))
        remedy = "delete it; --resume writes it again."
    else:
        where = f"line {number} of {str(folder / RECORD)!r}"
        remedy = "restore the file from a copy, or start a new run."
    return f"Expected {expected} in {where}. Found {found}. Remedy: {remedy}"


def replace_file(path: Path, data: bytes) -> None:
    """Writes ``path`` in one step: whoever looks sees the old file or the whole new one.

    Raises:
        RecordError: If the file cannot be written; the old one is then still there.
    """
    try:
        write_beside(path, data)
    except OSError as error:
        raise RecordError(cannot_write(path, error)) from error


def write_report(folder: Path, html: str) -> Path:
    """Replaces a run's ``report.html`` in one step.

    Returns:
        The path of the page.

    Raises:
        RecordError: If the page cannot be written; the old one is then still there.
    """
    path = Path(folder) / REPORT
    try:
        write_beside(path, html.encode("utf-8", "replace"))
    except OSError as error:
        raise RecordError(
            f"Cannot write the page {str(path)!r}: {error.strerror or error}. The results are "
            f"kept. Remedy: make room for it, then `steadygrad report {path.parent}`."
        ) from error
    return path


def write_beside(path: Path, data: bytes) -> None:
    """Like :func:`replace_file`, with the plain ``OSError``."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # The rename itself is on the disk only after this; Windows cannot open a folder and
    # some network file systems refuse to sync one.
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_empty_folder(folder: Path) -> list[Path]:
    """Makes ``folder`` and its missing parents, unless it is there and empty.

    Returns:
        The folders that were made, innermost first, so that a failure can be undone.

    Raises:
        InputError: If ``folder`` is not empty, not a folder, or cannot be made.
    """
    made: list[Path] = []
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir()
            made.insert(0, path)
        found = next(folder.iterdir(), None)
    except OSError as error:
        remove_folders(made)
        raise InputError(cannot_write(folder, error)) from error
    if found is not None:
        go_on = " or go on with that run by --resume" if (folder / RECORD).exists() else ""
        raise InputError(
            f"Expected an absent or empty folder. Found {str(folder)!r} with {found.name!r} in "
            f"it. Remedy: name another folder with --out{go_on}."
        )
    return made


def remove_folders(folders: list[Path]) -> None:
    """Removes those of ``folders`` that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
