"""The files of a run, and how they come into being: beside, then renamed into place."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from steadygrad._checks import InputError

__all__ = ["RECORD", "SUMMARY", "RecordError", "replace_file", "write_report", "writing"]

RECORD, SUMMARY = "record.jsonl", "summary.json"


class RecordError(InputError):
    """A run record is missing, damaged, too new, or cannot be written."""


@contextmanager
def writing(path: Path, what: str = "to", remedy: str = "") -> Iterator[None]:
    """Turns a failure to write ``path`` into one line with the reason and the remedy.

    Raises:
        RecordError: From an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        # A run that is begun continues in its own folder.
        begun = any(os.path.exists(place / RECORD) for place in (path, *path.parents[:2]))
        other = "name a folder with --out that you may write to, on a disk with free space."
        remedy = remedy or f"Remedy: {'free space there, then --resume.' if begun else other}"
        raise RecordError(
            f"Cannot write {what} {str(path)!r}: {error.strerror or error}. {remedy}"
        ) from error


def replace_file(path: Path, data: bytes) -> None:
    """Writes ``path`` in one step: a reader sees the old file or the whole new one.

    Raises:
        RecordError: If the file cannot be written; the old one is then still there.
    """
    with writing(path):
        _write_beside(path, data)


def write_report(folder: Path, html: str) -> Path:
    """Replaces a run's ``report.html`` in one step, and returns its path.

    Raises:
        RecordError: If the page cannot be written; the old one is then still there.
    """
    path = Path(folder) / "report.html"
    again = f"make room for it, then `steadygrad report {path.parent}`."
    with writing(path, "the page", f"The results are kept. Remedy: {again}"):
        _write_beside(path, html.encode("utf-8", "replace"))
    return path


def _write_beside(path: Path, data: bytes) -> None:
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
    # The rename itself is on the disk only after this; Windows cannot open a folder and
    # some network file systems refuse to sync one.
    with suppress(OSError):
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
