"""The ``steadygrad`` command.

Importing this loads neither torch nor any extra; a command loads what it needs.
"""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile

from steadygrad import __version__
from steadygrad._checks import InputError, check_choice, launched
from steadygrad._studies import STUDIES
from steadygrad.cli.console import emit, note, printable
from steadygrad.cli.options import COMMANDS, options_of, parser

__all__ = ["main"]

HELP = {"-h", "--help"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, or those of the process; returns the exit code.

    That is 0, 2 for bad input, 3 or 4 for verdicts of ``ab`` (``Summary.exit_code``) and ``diff``,
    or 128 plus the number of the signal that ended it.
    """
    arguments, rank, size = list(sys.argv[1:] if argv is None else argv), 0, 1
    try:
        rank, size = launched()
        code = _run(arguments, time.monotonic())
    except InputError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        if rank == 0:
            note(f"steadygrad: {printable(' '.join(str(error).split()))}")
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
    own = [*takewhile("--".__ne__, arguments)]  # an arm of ab may be any word
    if "--version" in own or command in HELP:
        overview = parser(whole=False).format_help().rstrip()
        emit(f"steadygrad {__version__}" if "--version" in own else overview)
        return 0
    options = options_of(check_choice("COMMAND", command, (*STUDIES, *COMMANDS)))
    if HELP.intersection(own):
        emit(options.format_help().rstrip())
        return 0
    values = options.read(words)
    if command in COMMANDS:
        return getattr(import_module("steadygrad.cli.commands"), command)(values) or 0
    from steadygrad.cli import studies

    return studies.command(command, values, began)
