"""The commands ``steadygrad tasks`` and ``steadygrad init``."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from steadygrad._checks import InputError
from steadygrad.cli.console import emit, printable

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
    path, template = Path(name), resources.files("steadygrad.tasks") / "template.py"
    if not name.endswith(".py") or "\0" in name:
        raise InputError(
            f"FILE should name a file of Python. Found {name!r}. Remedy: such as my_task.py."
        )
    text = template.read_text(encoding="utf-8").replace("examples/my_task.py", path.as_posix())
    try:
        # A file that exists is never written over.
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(
            f"FILE should be a new file that can be written. Found {printable(name)}: "
            f"{error.strerror}. Remedy: another name, or another folder."
        ) from None
    emit(f"{printable(name)}: now run `steadygrad advise {printable(name)}:make_task --budget 2m`")
    return 0
