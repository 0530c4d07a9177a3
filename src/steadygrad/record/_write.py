"""Writes a run's folder."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from steadygrad._checks import InputError
from steadygrad.record._events import Event, Header
from steadygrad.record._files import RECORD, SUMMARY, RecordError, open_file, replace_file, writing
from steadygrad.record._json import dumps
from steadygrad.record._read import checked_line, checksum, crc_of, read_record

__all__ = ["RunWriter"]


class RunWriter:
    """Writes one run's folder; get one from :meth:`create` or :meth:`resume`.

    It is a context manager that closes itself.

    Attributes:
        folder: Where the run is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = open_file(folder / RECORD, "r+b", 0)
        try:
            _lock(self._file, folder)
            # Only now: the process that wrote it before has finished.
            self._end = read_record(folder)[2]
        except BaseException:
            self._file.close()
            raise
        self._cut()
        # The end of the last line, which is longer than that.
        self._file.seek(self._end - 16)
        self._crc = crc_of(self._file.read(16))

    def _cut(self) -> None:
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
        folder, absent = Path(folder), list[Path]()
        data = checked_line(msgspec.to_builtins(header))
        try:
            with writing(folder):
                absent += [path for path in (folder, *folder.parents) if not path.exists()]
                if absent:
                    folder.mkdir(parents=True)
                _check_empty(folder)
                replace_file(folder / RECORD, data)
                return cls(folder)
        except InputError:
            for path in absent:
                with suppress(OSError):
                    path.rmdir()
            raise

    @classmethod
    def resume(cls, folder: Path) -> "RunWriter":
        """Goes on with a record after its last whole line; a broken last line is cut off.

        Raises:
            RecordError: If the record cannot be read (see :func:`read_run`) or written, or another
                process is writing it.
        """
        folder = Path(folder)
        read_record(folder)
        for path in folder.iterdir():
            if path.is_symlink() and (path.name == RECORD or path.is_dir()):
                raise RecordError(
                    f"Expected the files and folders of a run in {str(folder)!r}. Found "
                    f"{path.name!r}, a link. Remedy: put in its place what it leads to."
                )
        with writing(folder):
            return cls(folder)

    def append(self, event: Event) -> None:
        """Appends one line; it is on the disk when this returns.

        Raises:
            RecordError: If the disk does not take it. The record then ends with the line before.
        """
        data = checked_line(event.as_dict(), self._crc)
        with writing(self.folder):
            try:
                view = memoryview(data)
                while view:
                    view = view[self._file.write(view) :]
                os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):
                    self._cut()
                raise
        self._end += len(data)
        self._crc = crc_of(data)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces ``summary.json`` in one step; its last field is its checksum."""
        data = dumps({**summary, "crc": checksum(summary)}, indent=2)
        replace_file(self.folder / SUMMARY, data.encode() + b"\n")

    def close(self) -> None:
        """Closes the record; calling it again does nothing."""
        self._file.close()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_empty(folder: Path) -> None:
    found = next(folder.iterdir(), None)
    if found is not None:
        more = " or continue that run with --resume" if (folder / RECORD).exists() else ""
        raise InputError(
            f"Expected an absent or empty folder. Found {str(folder)!r} with {found.name!r} in "
            f"it. Remedy: name another folder with --out{more}."
        )


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
