"""The ``steadygrad`` command.

Importing this loads neither torch nor any extra; a command loads what it needs.
"""

import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from steadygrad import __version__
from steadygrad._checks import InputError, launched
from steadygrad._studies import STUDIES
from steadygrad.cli.console import complain, emit, printable
from steadygrad.cli.options import OTHERS, folder_of, near, options_of, overview

__all__ = ["main"]

HELP = ("-h", "--help")
# What a command needs beyond the library itself: `pip install "steadygrad[cli]"`.
STUDY_EXTRAS = ("rich", "matplotlib", "msgspec", "numpy")
OWN_EXTRAS = {
    "report": ("matplotlib", "msgspec"),
    "compare": (*STUDY_EXTRAS, "scipy"),
    "tasks": (),
    "init": (),
    "doctor": (),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
        argv: The arguments. Default: those of the process.

    Returns:
        The exit code: 0, 2 for bad input, or 128 plus the number of the signal that ended it.
    """
    arguments, size = list(sys.argv[1:] if argv is None else argv), 1
    try:
        size = launched()[1]
        code = _run(arguments, time.monotonic())
    except InputError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        complain(str(error))
        code = 2
    except KeyboardInterrupt:
        code = 130
    if size > 1:
        # A process group's threads can outlive the interpreter and abort it: the launcher would be
        # notified of a crash instead of this code.
        os._exit(code)
    return code


def _run(arguments: list[str], began: float) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    command, *words = arguments or [""]
    if "--version" in arguments or command in HELP:
        emit(f"steadygrad {__version__}" if "--version" in arguments else overview())
        return 0
    commands = (*STUDIES, *OTHERS)
    if command not in commands:
        raise InputError(
            f"Expected a command: {', '.join(commands[:-1])} or {commands[-1]}. "
            f"Found {repr(command) if arguments else 'none'}. "
            f"Remedy: {near(command, commands, 'steadygrad ')}steadygrad --help."
        )
    needed = OWN_EXTRAS.get(command, STUDY_EXTRAS)
    _check_extras(needed and ("msgspec",) if any(word in HELP for word in words) else needed)
    options = options_of(command)
    values = options.read(words)
    if "help" in values:
        emit(options.help())
        return 0
    if command == "report":
        return _report(values)
    if command == "doctor":
        from steadygrad.cli import doctor

        return doctor.run(values)
    if command in OTHERS:
        from steadygrad.cli import own_tasks

        return own_tasks.run(command, values)
    from steadygrad.cli import studies

    return studies.run(command, values, began)


def _check_extras(names: Sequence[str]) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise InputError(
            f"This command needs {', '.join(names)}. Found no {', '.join(missing)}. "
            'Remedy: pip install "steadygrad[cli]".'
        )


def _report(values: Mapping[str, Any]) -> int:
    """Draws the page of a run again, and prints its path."""
    if "run" not in values:
        raise InputError(
            "Expected the folder of a run. Found none. Remedy: steadygrad report runs/mine."
        )
    folder = folder_of("RUN", values["run"])
    from steadygrad.studies.page import write

    emit(printable(str(write(folder))))
    return 0
