"""The commands ``steadygrad tasks`` and ``steadygrad init``."""

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from shlex import quote
from typing import Any

from steadygrad._checks import InputError
from steadygrad.cli.console import emit

__all__ = ["run"]


def run(command: str, values: Mapping[str, Any]) -> int:
    """Runs one of the two commands."""
    return _tasks() if command == "tasks" else _init(str(values.get("file", "")))


def _tasks() -> int:
    """Prints the name and the first line of each built-in task."""
    from steadygrad.tasks import BUILT_IN

    width = max(map(len, BUILT_IN))
    for name, make_task in BUILT_IN.items():
        about = (make_task.__doc__ or "").partition("\n")[0]
        emit(f"{name:{width}}  {about}")
    emit("\nOne of your own: steadygrad init my_task.py")
    return 0


def _init(name: str) -> int:
    """Writes a task that runs as it is; a file that exists is left alone."""
    path = Path(name)
    # A name that is not printable cannot be pasted; bytes that are no UTF-8 are not printable.
    if not name.endswith(".py") or not path.suffix or not name.isprintable():
        raise InputError(
            "FILE should name a file of Python, in characters that can be printed. "
            f"Found {name!r}. Remedy: such as my_task.py."
        )
    try:
        _write_new(path, _template(path).encode())
    except OSError as error:
        raise InputError(
            f"FILE should be a new file that can be written. Found {name}: "
            f"{error.strerror}. Remedy: another name, or another folder."
        ) from None
    emit(f"{name}: now run `steadygrad advise {quote(f'{name}:make_task')} --budget 2m`")
    return 0


def _template(path: Path) -> str:
    """The text of the task. Its docstring names the file, unless that would need quotes."""
    text = (resources.files("steadygrad.tasks") / "template.py").read_text(encoding="utf-8")
    plain = re.fullmatch(r"[\w./-]+", path.as_posix())
    return text.replace("examples/my_task.py", path.as_posix() if plain else "FILE")


def _write_new(path: Path, data: bytes) -> None:
    """Writes a file that does not exist, or leaves none behind."""
    with path.open("xb") as file:
        try:
            file.write(data)
            file.flush()
        except BaseException:
            path.unlink()
            raise
