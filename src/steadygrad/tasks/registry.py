"""Tasks by their names: built-in ones and ``path/file.py:make_task``."""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any
from unittest.mock import patch

from steadygrad._checks import InputError, shown
from steadygrad.tasks.char_lm import char_lm
from steadygrad.tasks.digits import digits_autoencoder, digits_classifier
from steadygrad.tasks.digits_deep import digits_deep
from steadygrad.tasks.guard import TaskError, first_line, reason
from steadygrad.tasks.neighbours import UncachedLoader, importable
from steadygrad.tasks.task import Task

__all__ = ["BUILT_IN", "DEFAULT", "TaskFactoryError", "load_function", "load_task", "sources"]

BUILT_IN: Mapping[str, Callable[[], Task]] = MappingProxyType(
    {
        "char-lm": char_lm,
        "digits-classifier": digits_classifier,
        "digits-autoencoder": digits_autoencoder,
        "digits-deep": digits_deep,
    }
)
DEFAULT = "char-lm"
# A path, as Linux takes it at most.
LONGEST_SPEC = 4096


class TaskFactoryError(TaskError):
    """A user's own code raised while its file was imported or its task made.

    What it raised is the ``__cause__``, with its traceback.
    """


def load_task(spec: str) -> Task:
    """Makes the task that a user asked for.

    Files beside the task's file can be imported from then on, as with ``python file.py``: by the
    file, its factory and the task's functions. No byte code is written beside them.

    Args:
        spec: A name in ``BUILT_IN``, or ``"path/file.py:make_task"``.

    Returns:
        The task.

    Raises:
        InputError: If there is no such task, file or factory, or it returns something else.
        TaskFactoryError: If the user's code raises, chained from what it raised.
    """
    if not isinstance(spec, str):
        raise InputError(
            f"Parameter `spec` should be a str. Found {type(spec).__name__}. "
            f"Remedy: one of {', '.join(BUILT_IN)}, or path/file.py:make_task."
        )
    if len(spec) > LONGEST_SPEC:
        raise _unknown(spec)
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    path, factory = _split(spec)
    code = _compile(path)
    # A script that parses its arguments has none.
    with importable(path.parent), patch.object(sys, "argv", [str(path)]):
        module = _execute(path, code, spec)
        task = _call(_find_factory(module, factory, path), spec)
    if not isinstance(task, Task):
        raise InputError(
            f"{spec} should return a steadygrad.Task. Found {type(task).__name__}. "
            "Remedy: end the function with `return Task(...)`."
        )
    return task


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``path/file.py:name`` names, such as a maker of optimizers.

    Raises:
        InputError: If there is no such file or function.
        TaskFactoryError: If the file raises while it is imported.
    """
    path, name = _split(spec)
    code = _compile(path)
    with importable(path.parent), patch.object(sys, "argv", [str(path)]):
        return _find_factory(_execute(path, code, spec), name, path)


def sources(spec: str) -> list[Path]:
    """The file of a function that was loaded, and all files beside it that were imported so far."""
    path, _ = _split(spec)
    specs = [vars(m).get("__spec__") for m in sys.modules.values() if isinstance(m, ModuleType)]
    loaders = [getattr(spec, "loader", None) for spec in specs]
    beside = {Path(loader.path) for loader in loaders if isinstance(loader, UncachedLoader)}
    return [path, *sorted(other for other in beside if path.parent in other.parents)]


def _split(spec: str) -> tuple[Path, str]:
    """Splits at the last colon: a Windows path has one after its drive letter."""
    path, colon, factory = spec.rpartition(":")
    if not colon or not factory.isidentifier():
        if not _looks_like_a_file(spec):
            raise _unknown(spec)
        raise InputError(
            f"A task file should be named with its factory, as path/file.py:make_task. Found "
            f"{spec!r}. Remedy: {spec.rstrip(':')}:make_task."
        )
    file = Path(os.path.expanduser(path)).absolute()
    # Functions of os.path are False, not an error, for names that are too long for a file system.
    if not os.path.isfile(file):
        found = "a folder" if os.path.isdir(file) else "no such file"
        raise InputError(
            f"The file should exist. Found {found}: {path!r}. "
            f"Remedy: check the path, relative to {Path.cwd()}."
        )
    return file, factory


def _looks_like_a_file(spec: str) -> bool:
    return ".py" in spec or "/" in spec or "\\" in spec or ":" in spec


def _unknown(spec: str) -> InputError:
    near = get_close_matches(spec, BUILT_IN, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the default is {DEFAULT!r}."
    return InputError(
        f"The task should be one of {', '.join(BUILT_IN)}, or path/file.py:make_task. "
        f"Found {shown(spec)}. Remedy: {hint}"
    )


def _compile(path: Path) -> CodeType:
    try:
        return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise InputError(
            f"The file should be readable. Found {error.strerror}: {str(path)!r}. "
            "Remedy: check the file's permissions."
        ) from error
    # A null byte is a ValueError before Python 3.12.
    except (SyntaxError, ValueError) as error:
        lineno = getattr(error, "lineno", None)
        line = f" on line {lineno}" if lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise InputError(
            f"The file should be Python. Found {reason}{line} of {str(path)!r}. "
            "Remedy: fix the file."
        ) from error


def _execute(path: Path, code: CodeType, spec: str) -> ModuleType:
    name = "_steadygrad_task_" + hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    module = ModuleType(name)
    module.__file__ = str(path)
    # Dataclasses and pickles look their module up while the file is still being executed.
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _factory_error(f"Importing the file of {spec}", error) from error
    return module


def _find_factory(module: ModuleType, factory: str, path: Path) -> Callable[[], Any]:
    names = [
        name
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    ]
    if not hasattr(module, factory):
        near = get_close_matches(factory, names, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"define `def {factory}` in it."
        raise InputError(
            f"The file should define {factory!r}. Found "
            f"{', '.join(names) or 'no function'} in {str(path)!r}. Remedy: {remedy}"
        )
    found = getattr(module, factory)
    if not callable(found):
        raise InputError(
            f"{factory!r} in {str(path)!r} should be a function. Found {type(found).__name__}. "
            f"Remedy: name a function of the file{': ' + ', '.join(names) if names else ''}."
        )
    return found  # type: ignore[no-any-return]


def _call(factory: Callable[[], Any], spec: str) -> Any:
    try:
        return factory()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _factory_error(spec, error) from error


def _factory_error(where: str, error: BaseException) -> TaskFactoryError:
    # An InputError already says what was expected, found and the remedy.
    if isinstance(error, InputError):
        return TaskFactoryError(f"{where}: {first_line(error)}")
    return TaskFactoryError(
        f"{where} should make a task. Found {reason(error)}. Remedy: --debug shows the traceback."
    )
