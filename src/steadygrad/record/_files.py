"""The files of a run, and how they come into being: beside, then renamed into place.

A run may come from a stranger: no name in its folder is trusted to be a file, nor to be small.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from steadygrad._checks import InputError

__all__ = [
    "RECORD",
    "SUMMARY",
    "RecordError",
    "open_file",
    "read_file",
    "replace_file",
    "write_report",
    "writing",
]

RECORD, SUMMARY = "record.jsonl", "summary.json"
# Bytes of a file of a run; a record with ten thousand layers has half as many.
MOST = 1 << 28


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


def open_file(path: Path, mode: str = "rb", buffering: int = -1) -> IO[Any]:
    """Opens a file, and neither a pipe nor a device, nor a link to write to; ``OSError`` if so."""
    # Windows has neither.
    names = ("O_NONBLOCK", "O_NOFOLLOW") if "+" in mode else ("O_NONBLOCK",)
    safe = sum(getattr(os, name, 0) for name in names)
    opener = lambda name, flags: os.open(name, flags | safe)  # noqa: E731
    file = open(path, mode, buffering, opener=opener)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "It is no regular file", str(path))
    return file


def read_file(path: Path, most: int = MOST) -> bytes:
    """The content of a file of at most ``most`` bytes; ``OSError`` if it is anything else."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Files such as those of /proc have no size.
        data: bytes = b"" if size > most else file.read((size or most) + 1) or b""
    if max(size, len(data)) > most:
        raise OSError(errno.EFBIG, f"It is larger than {most:,} bytes", str(path))
    return data


def _write_beside(path: Path, data: bytes) -> None:
    # A name that nobody can guess, made anew: it is no link that came with the folder, and no
    # other process writes it. The rename replaces a link at `path`, and does not follow it.
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
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
