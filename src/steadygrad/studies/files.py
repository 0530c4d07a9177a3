"""The user's files that a study runs: where they are, and whether they are those recorded.

A task and the optimizers of ``--add`` are functions in Python files. A study that goes on half-way
with other ones would give one verdict on two things.
"""

import hashlib
from collections.abc import Mapping
from os.path import expanduser
from pathlib import Path, PurePath
from shlex import quote
from typing import Any

from steadygrad._checks import InputError
from steadygrad.record import Run, is_own_run, read_file
from steadygrad.tasks import BUILT_IN, Task, load_task, sources

__all__ = ["agree", "check_trust", "digests", "load_recorded_task", "located"]

# Settings that name functions in files.
NAMING = ("task", "add")


def _specs(settings: Any, name: str) -> list[str]:
    """The functions in files that a setting names."""
    text = str(
        settings.get(name, "") if isinstance(settings, Mapping) else getattr(settings, name, "")
    )
    parts = [text] if name == "task" else [part.strip() for part in text.split(",")]
    return [part for part in parts if part and part not in BUILT_IN]


def agree(name: str, then: Any, now: Any) -> bool:
    """Whether a setting names the same functions, maybe in another folder: digests decide then."""
    names = [[PurePath(spec).name for spec in _specs({name: text}, name)] for text in (then, now)]
    return name in NAMING and names[0] == names[1] != []


def located(settings: Any, folder: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Absolute places of the functions that settings name.

    Args:
        settings: The settings, as recorded.
        folder: Folder in which the run was started.
        given: Settings that a user names now; their places count from the present folder.
    """
    found = {}
    for name in NAMING:
        now, start = (given, "") if name in given else (settings, folder)
        for spec, named in zip(_specs(settings, name), _specs(now, name), strict=True):
            found[spec] = str(Path(start, expanduser(named)).absolute())
    return found


def check_trust(run: Run, given: Mapping[str, Any]) -> None:
    """Refuses to run files that only the record names, unless this user's own run recorded them.

    Raises:
        InputError: With the command that names them.
    """
    named = {name: ",".join(_specs(run.header.settings, name)) for name in NAMING}
    strange = [text for name, text in named.items() if text and name not in given]
    if strange and not is_own_run(run.folder):
        task = run.header.settings.task
        add = f" --add {quote(named['add'])}" if named["add"] else ""
        raise InputError(
            "Expected a run that was begun by you on this machine: a record names Python files, "
            f"and --resume would run them. Found {', '.join(strange)} in the record of "
            f"{str(run.folder)!r}. Remedy: read them; if they are yours, name them: "
            f"steadygrad {run.header.study} {quote(task)}{add} --resume {quote(str(run.folder))}"
        )


def load_recorded_task(header: Any, files: Mapping[str, str]) -> Task:
    """The task of a record, whose files are still those recorded.

    Args:
        header: The record's header.
        files: Places of its functions.

    Raises:
        InputError: If one of the files has changed.
    """
    for spec, place in files.items():
        for name, digest in header.files.get(spec, {}).items():
            path = Path(place).parent / name
            if _digest(path) != digest:
                raise InputError(
                    f"Expected {str(path)!r} as it was when the run began. Found it changed "
                    "or gone. Remedy: restore it, or start a new run with --out."
                )
    # Not of the task's description: only the settings were looked at before.
    task = header.settings.task
    return load_task(files.get(task, task))


def digests(files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """SHA-256 of each function's file, and of the files beside it that it imported so far."""
    return {
        spec: {
            path.relative_to(Path(place).parent).as_posix(): _digest(path)
            for path in sources(place)
        }
        for spec, place in files.items()
    }


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(read_file(path)).hexdigest()
    except OSError:
        return ""
