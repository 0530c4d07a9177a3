"""The commands beside the studies: functions of their options' values that give the exit code."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from shlex import quote
from typing import Any

from steadygrad._checks import InputError
from steadygrad.cli.console import emit, printable
from steadygrad.cli.doctor import run as doctor

__all__ = ["doctor", "init", "report", "tasks"]


def report(values: Mapping[str, Any]) -> int:
    """Draws the page of a run again, and prints its path."""
    from steadygrad.studies.page import write

    emit(printable(str(write(values["RUN"]))))
    return 0


def tasks(values: Mapping[str, Any]) -> int:
    """Prints the name and the first line of each built-in task."""
    from steadygrad.tasks import BUILT_IN

    width = max(map(len, BUILT_IN))
    for name, make_task in BUILT_IN.items():
        about = (make_task.__doc__ or "").partition("\n")[0]
        emit(f"{name:{width}}  {about}")
    emit("\nOne of your own: steadygrad init my_task.py")
    return 0


def init(values: Mapping[str, Any]) -> int:
    """Writes a task that runs as it is; a file that exists is left alone."""
    name, path = values["FILE"], Path(values["FILE"])
    # A name that is not printable cannot be pasted; bytes that are no UTF-8 are not printable.
    if not name.endswith(".py") or not path.suffix or not name.isprintable():
        raise InputError(
            "FILE should name a file of Python, in characters that can be printed. "
            f"Found {name!r}. Remedy: such as my_task.py."
        )
    text = (resources.files("steadygrad.tasks") / "template.py").read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("examples/my_task.py", "FILE"))
    except OSError as error:
        raise InputError(
            f"FILE should be a new file that can be written. Found {name}: "
            f"{error.strerror}. Remedy: another name, or another folder."
        ) from None
    emit(f"{name}: now run `steadygrad advise {quote(f'{name}:make_task')} --budget 2m`")
    return 0
