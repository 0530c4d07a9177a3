"""Runs that this user began: one empty file for each, outside of the run's folder.

A record names Python files, and a stranger's record may name any: only what is remembered here is
taken at its word.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from steadygrad.record._files import RECORD, open_file, replace_file

__all__ = ["is_own_run", "remember_run"]


def remember_run(folder: Path) -> None:
    """Remembers that this user began a run; where that fails, it is a stranger's later on."""
    # A home that does not exist is a RuntimeError.
    with suppress(OSError, RuntimeError, ValueError):
        mark = _mark(folder)
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(mark, b"")


def is_own_run(folder: Path) -> bool:
    """Whether this user began a run, by the first line of its record."""
    with suppress(OSError, RuntimeError, ValueError):
        return _mark(folder).is_file()
    return False


def _mark(folder: Path) -> Path:
    with open_file(folder / RECORD) as file:
        header = hashlib.sha256(file.readline()).hexdigest()
    given = os.environ.get("XDG_STATE_HOME", "")
    # A relative one would lie in whatever folder is the present one.
    home = Path(given) if os.path.isabs(given) else Path.home().absolute() / ".local" / "state"
    return home / "steadygrad" / "runs" / header
