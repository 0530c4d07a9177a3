"""The ``steadygrad`` command.

Importing this loads neither torch nor any extra; a command loads what it needs.
"""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.util import find_spec

from steadygrad import __version__
from steadygrad._checks import InputError, launched
from steadygrad._studies import STUDIES
from steadygrad.cli.console import complain, emit
from steadygrad.cli.options import overview, unknown_command

__all__ = ["main"]

HELP = ("-h", "--help")
# What a command needs beyond the library itself: `pip install "steadygrad[cli]"`.
REPORT_EXTRAS = ("matplotlib", "msgspec")
STUDY_EXTRAS = ("rich", "matplotlib", "msgspec", "numpy", "scipy")


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
        # told of a crash instead of this code.
        os._exit(code)
    return code


def _run(arguments: list[str], began: float) -> int:
    command, *words = arguments or [""]
    if "--version" in arguments or command in HELP:
        emit(f"steadygrad {__version__}" if "--version" in arguments else overview())
        return 0
    if command not in (*STUDIES, "report"):
        raise unknown_command(arguments)
    needed = REPORT_EXTRAS if command == "report" else STUDY_EXTRAS
    _check_extras(("msgspec",) if any(word in HELP for word in words) else needed)
    if command == "report":
        from steadygrad.cli import report

        return report.run(words)
    from steadygrad.cli import studies

    return studies.run(command, words, began)


def _check_extras(names: Sequence[str]) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise InputError(
            f"This command needs {', '.join(names)}. Found no {', '.join(missing)}. "
            'Remedy: pip install "steadygrad[cli]".'
        )
