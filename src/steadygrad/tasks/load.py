"""Tasks by their names: built-in ones and ``path/file.py:make_task``."""

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from steadygrad._checks import InputError, check_type, shown
from steadygrad.tasks.char_lm import char_lm
from steadygrad.tasks.check import guarded
from steadygrad.tasks.digits import digits_autoencoder, digits_classifier, digits_deep
from steadygrad.tasks.task import Task

BUILT_IN: Mapping[str, Callable[[], Task]] = {
    "char-lm": char_lm,
    "digits-classifier": digits_classifier,
    "digits-autoencoder": digits_autoencoder,
    "digits-deep": digits_deep,
}
# Folders of files that were loaded, which are first in ``sys.path``.
FOLDERS: set[str] = set()


def load_task(spec: str) -> Task:
    """Makes the task that a user asked for: one of ``BUILT_IN``, or ``"path/file.py:make_task"``.

    The folder of the task's file is first in ``sys.path`` from then on, as with ``python file.py``.

    Raises:
        InputError: If there is no such task, file or factory, or it returns something else.
        TaskError: If the user's code raises, chained from what it raised.
    """
    remedy = f"one of {', '.join(BUILT_IN)}, or path/file.py:make_task"
    if check_type("spec", spec, str, remedy) in BUILT_IN:
        return BUILT_IN[spec]()
    make = load_function(spec)
    # A script that parses its arguments finds none of ours.
    with guarded(spec), patch.object(sys, "argv", [spec]):
        task = make()
    return check_type(spec, task, Task, "end the function with `return Task(...)`")


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``path/file.py:name`` names, such as a maker of optimizers."""
    path, name = _split(spec)
    folder = str(path.parent)
    # Python imports one module of each name: of two checkouts it would be the first one's.
    for file, other in _imported(FOLDERS - {folder}).items():
        own = path.parent / file.relative_to(other)
        if own.is_file():
            raise InputError(
                f"Expected modules of other names than {str(file)!r}, which is imported. Found "
                f"{str(own)!r}. Remedy: another process; in `steadygrad ab` commands."
            )
    FOLDERS.add(folder)
    sys.path[:] = [folder, *(other for other in sys.path if other != folder)]
    importlib.invalidate_caches()
    module = ModuleType("_steadygrad_task_" + hashlib.sha256(os.fsencode(path)).hexdigest()[:12])
    module.__file__ = str(path)
    # Dataclasses and pickles look their module up while the file is still being executed.
    sys.modules[module.__name__] = module
    with guarded(f"Importing the file of {spec}"), patch.object(sys, "argv", [str(path)]):
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(
            f"The file should define {name!r}, a function. Found {shown(function)} in "
            f"{str(path)!r}. Remedy: a function's name, or `def {name}` in it."
        )
    return function  # type: ignore[no-any-return]


def sources(spec: str) -> list[Path]:
    """The file of a function that was loaded, and all files beside it that were imported so far."""
    path, _ = _split(spec)
    return [path, *sorted(_imported({str(path.parent)}).keys() - {path})]


def _imported(folders: Collection[str]) -> dict[Path, str]:
    """Files that were imported from some folders, each with its folder."""
    found, known = {}, {os.path.join(folder, ""): folder for folder in folders}
    for name, module in list(sys.modules.items()):
        file = str(vars(module).get("__file__")) if isinstance(module, ModuleType) else ""
        for end in (".py", f"{os.sep}__init__.py"):
            if folder := known.get(file.removesuffix(name.replace(".", os.sep) + end)):
                found[Path(file)] = folder
    return found


def _split(spec: str) -> tuple[Path, str]:
    """Splits at the last colon: a Windows path has one after its drive letter."""
    path, _, name = spec.rpartition(":")
    file = Path(os.path.expanduser(path)).absolute()
    # Functions of os.path are False, not an error, for names that are too long for a file system.
    if not os.path.isfile(file) or not name.isidentifier():
        near = get_close_matches(spec, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"a path, relative to {Path.cwd()}."
        raise InputError(
            f"The task should be one of {', '.join(BUILT_IN)}, or a function in a file that is "
            f"there, as path/file.py:make_task. Found {spec[-100:]!r}. Remedy: {hint}"
        )
    return file, name
