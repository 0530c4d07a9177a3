"""Errors in a user's own code, separated from the library's."""

from collections.abc import Iterator
from contextlib import contextmanager

from steadygrad._checks import InputError

__all__ = ["TaskError", "first_line", "guarded", "reason"]


class TaskError(InputError):
    """A task's own code raised, or returned a value that cannot be used.

    What it raised is the ``__cause__``, with its traceback.
    """


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turns whatever a piece of the user's code raises, but Ctrl-C, into one readable line.

    Args:
        what: Which piece, such as ``"Task.make_model"``.

    Raises:
        TaskError: From what was raised, unless that is a readable line already.
    """
    try:
        yield
    # GeneratorExit closes a generator around this block.
    except (InputError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise TaskError(
            f"{what} should run without an error. Found {reason(error)}. "
            "Remedy: --debug shows the traceback."
        ) from error


def reason(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}".rstrip(": ")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; empty when it has none."""
    return (str(error).strip().splitlines() or [""])[0]
