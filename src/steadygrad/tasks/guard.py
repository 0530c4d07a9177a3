"""Errors in a user's own code, separated from the library's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from steadygrad._checks import InputError

# CUDA's and MPS's allocators, the CPU's (Windows, Linux), cuBLAS and cuSOLVER.
PHRASES = ("out of memory", "not enough memory", "can't allocate memory", "status_alloc_failed")


class TaskError(InputError):
    """A task's own code raised, or returned a value that cannot be used.

    What it raised is the ``__cause__``, with its traceback.
    """


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turns whatever a piece of the user's code raises, but Ctrl-C, into one readable line.

    Raises:
        TaskError: From what was raised, unless that is a readable line; ``what`` names the piece.
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
    """The kind of an error and the first line of its message, if it has one."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}".rstrip(": ")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    if isinstance(error, RuntimeError) and any(phrase in text for phrase in PHRASES):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)
