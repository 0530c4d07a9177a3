"""The user's files that a study runs: a task and the optimizers of ``--add`` are Python functions.

A record may be a stranger's, and name any file: only what this user's own run recorded is taken at
its word. That this user began a run is remembered in an empty file outside of the run's folder.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from steadygrad._checks import InputError
from steadygrad._files import read_file
from steadygrad._studies import module_of
from steadygrad.studies.folder import Run, identity, replace_file
from steadygrad.tasks import BUILT_IN, Task, load_task, sources
from steadygrad.tasks.start import digest_of

# Packages of optimizers that `compare` imports even if only a record names them.
LIBRARIES = ("heavyball", "pytorch_optimizer", "schedulefree", "timm", "torch")
# Stands in the settings for a task that no other process can load.
OBJECT = "a Task object"


def located(settings: Any, folder: str = "", typed: Any = ()) -> dict[str, str]:
    """Absolute places of the functions in files that settings name.

    They count from ``folder``, and those of settings in ``typed`` from the present folder.
    """
    # A command, as `ab` runs it, is no function in a file.
    without = settings.task == OBJECT or getattr(settings, "metric", "")
    add = map(str.strip, getattr(settings, "add", "").split(","))
    named = {"task": [] if without else settings.words, "add": add}
    return {
        spec: str(Path("" if name in typed else folder, os.path.expanduser(spec)).absolute())
        for name, specs in named.items()
        for spec in specs
        if spec and spec not in BUILT_IN
    }


def trusted(run: Run, given: Mapping[str, Any]) -> dict[str, str]:
    """Places of the functions that a run goes on with; refused if only a stranger names them."""
    settings, study = run.header.settings, run.header.study
    add, optimizers = (getattr(settings, name, "") for name in ("add", "optimizers"))
    named = map(str.strip, optimizers.split(","))
    modules = [name for name in named if ":" in name and name.split(":")[0] not in LIBRARIES]
    metric, folder = getattr(settings, "metric", ""), str(run.header.time.get("folder", ""))
    task = bool(metric) or not {*settings.words} <= {*BUILT_IN}
    code = {"task": task, "add": add, "optimizers": modules}
    unsaid, known = any(found and name not in given for name, found in code.items()), False
    with suppress(OSError, RuntimeError):
        known = _mark(run.folder).is_file()
    if unsaid and not known:
        flags = (["--add", add] if add else []) + (["--optimizers", optimizers] if modules else [])
        words = [*settings.words, *flags, "--resume", str(run.folder)]
        read = [*located(settings), *modules] or settings.words
        raise InputError(
            "Expected a run that you began here: the record names code, and --resume runs "
            f"it. Found no trace of it. Remedy: read {', '.join(read)}; "
            f"if you trust it: steadygrad {study} {' '.join(map(quote, words))}"
        )
    # Commands would find other files there than those that were read.
    if metric and not (os.path.isdir(folder) if known else os.getcwd() == folder):
        raise InputError(
            f"Expected the folder of the record's commands, {folder!r}. Found {os.getcwd()!r}. "
            "Remedy: restore it and cd there, if you trust what the commands find in it."
        )
    return located(settings, folder, given)


def remember(folder: Path) -> None:
    """Remembers that this user began a run; where that fails, a resume has to name its files."""
    with suppress(OSError, RuntimeError, InputError):
        mark = _mark(folder)
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(mark, b"")


def _mark(folder: Path) -> Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    # A relative one would lie in whatever folder is the present one.
    home = Path(given) if os.path.isabs(given) else Path.home().absolute() / ".local/state"
    return home / "steadygrad/runs" / identity(folder)


def load(study: str, settings: Any, files: Mapping[str, str]) -> Task:
    """What the settings name; functions in files are at the places in ``files``."""
    own = getattr(module_of(study, "trials"), "load", None)
    task: Task = own(settings, files) if own else load_task(files.get(settings.task, settings.task))
    return task


def load_recorded_task(header: Any, files: Mapping[str, str]) -> Task:
    """The task of a record; refused if one of the functions' ``files`` has changed."""
    for spec, place in files.items():
        for name, digest in header.files.get(spec, {}).items():
            path = Path(place).parent / name
            if _digest(path) != digest:
                raise InputError(
                    f"Expected {str(path)!r} as it was when the run began. Found it changed or "
                    "gone. Remedy: restore it, or start a new run with --out."
                )
    # Not `header.task.spec`: only the settings were looked at before.
    task = load(header.study, header.settings, files)
    # A training that goes on may write its checkpoint anew: a worker would begin elsewhere.
    starts = {name: x for name, x in task.provenance.items() if name.endswith("Task.start")}
    if task.start:
        starts["Task.start"] = digest_of(task.start)
    for name, digest in starts.items():
        if header.task.provenance.get(name) != digest:
            raise InputError(
                f"Expected {name} as it was when the run began. Found it changed. Remedy: restore "
                "it, or start a new run with --out."
            )
    return task


def digests(files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """SHA-256 of each function's file, and of the files beside it that were imported so far."""
    found = {spec: (Path(place).parent, sources(place)) for spec, place in files.items()}
    return {
        spec: {path.relative_to(folder).as_posix(): _digest(path) for path in paths}
        for spec, (folder, paths) in found.items()
    }


def _digest(path: Path) -> str:
    with suppress(OSError):
        return hashlib.sha256(read_file(path)).hexdigest()
    return ""
