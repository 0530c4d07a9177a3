"""Writes a run's folder."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from steadygrad._checks import InputError
from steadygrad.record._events import Event, Header
from steadygrad.record._files import (
    RECORD,
    SUMMARY,
    RecordError,
    cannot_write,
    make_empty_folder,
    remove_folders,
    replace_file,
    write_beside,
)
from steadygrad.record._json import dumps
from steadygrad.record._read import checked_line, read_record

__all__ = ["RunWriter"]


def _lock(file: IO[bytes], folder: Path) -> None:
    """Keeps a second process out for as long as the file is open; a kill lets go of it."""
    if sys.platform == "win32":  # It has no such lock: two processes are not kept apart there.
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RecordError(
            f"Expected a run that nobody is writing. Found {str(folder)!r} in progress in another "
            "process. Remedy: wait for it or stop it, then --resume."
        ) from error


class RunWriter:
    """Writes one run's folder; get one from :meth:`create` or :meth:`resume`.

    It is a context manager that closes itself.

    Attributes:
        folder: Where the run is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = open(folder / RECORD, "r+b", buffering=0)  # noqa: SIM115
        try:
            _lock(self._file, folder)
            # Only now: whoever wrote it before has finished.
            self._end = read_record(folder)[2]
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(self._end)
        self._file.seek(self._end)

    @classmethod
    def create(cls, folder: Path, header: Header) -> "RunWriter":
        """Starts a record in a folder that is absent or empty.

        Args:
            folder: Made when absent, with its parents.
            header: The first line.

        Raises:
            InputError: If the folder is not empty or cannot be written. Nothing is written then.
        """
        folder = Path(folder)
        data = checked_line(msgspec.to_builtins(header))
        made = make_empty_folder(folder)
        try:
            write_beside(folder / RECORD, data)
            return cls(folder)
        except OSError as error:
            remove_folders(made)
            raise InputError(cannot_write(folder, error)) from error

    @classmethod
    def resume(cls, folder: Path) -> "RunWriter":
        """Goes on with a record after its last whole line; a broken last line is cut off.

        Raises:
            RecordError: If the record cannot be read (see :func:`read_run`) or written, or another
                process is writing it.
        """
        folder = Path(folder)
        read_record(folder)
        try:
            return cls(folder)
        except OSError as error:
            raise RecordError(cannot_write(folder, error)) from error

    def append(self, event: Event) -> None:
        """Appends one line; it is on the disk when this returns.

        Raises:
            RecordError: If the disk does not take it. The record then ends with the line before.
        """
        data = checked_line(event.as_dict())
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
                self._file.seek(self._end)
            raise RecordError(cannot_write(self.folder, error)) from error
        self._end += len(data)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces ``summary.json`` in one step."""
        replace_file(self.folder / SUMMARY, dumps(summary, indent=2).encode() + b"\n")

    def close(self) -> None:
        """Closes the record; calling it again does nothing."""
        self._file.close()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
