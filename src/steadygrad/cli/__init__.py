"""The ``steadygrad`` command: one file for each subcommand, which parses, calls a study and prints.

Importing this loads neither torch nor any extra; a subcommand loads what it needs.
"""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.util import find_spec

from steadygrad._checks import InputError

__all__ = ["main"]

# What the commands need beyond the library itself: `pip install "steadygrad[cli]"`.
EXTRAS = ("tyro", "rich", "matplotlib", "safetensors")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
        argv: The arguments; None: those of the process.

    Returns:
        The exit code: 0, 2 for bad input, or 128 plus the number of the signal that ended it.
    """
    code = _run(list(sys.argv[1:] if argv is None else argv))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # The threads of a process group can outlive the interpreter's end and abort it, and the
        # launcher would be told of a crash instead of this code.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(arguments: list[str]) -> int:
    began = time.monotonic()
    if "--version" in arguments:
        from steadygrad import __version__

        print(f"steadygrad {__version__}")
        return 0
    try:
        _check_extras()
        return _dispatch(arguments, began)
    except InputError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        _complain(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


def _check_extras() -> None:
    missing = [name for name in EXTRAS if find_spec(name) is None]
    if missing:
        raise InputError(
            f"The command line needs {', '.join(EXTRAS)}. Found no {', '.join(missing)}. "
            'Remedy: pip install "steadygrad[cli]".'
        )


def _dispatch(arguments: list[str], began: float) -> int:
    from steadygrad.cli.options import Advise, Inspect, parse

    command = parse(arguments)
    if isinstance(command, Advise):
        from steadygrad.cli import advise

        return advise.run(command, began)
    if isinstance(command, Inspect):
        from steadygrad.cli import inspect

        return inspect.run(command, began)
    from steadygrad.cli import report
    from steadygrad.cli.values import folder_of

    return report.run(folder_of("RUN", command.run))


def _complain(message: str) -> None:
    # One line from one process, whatever the message and however many processes run.
    if os.environ.get("RANK", "0") == "0":
        print(f"steadygrad: {' '.join(message.split())}", file=sys.stderr)
