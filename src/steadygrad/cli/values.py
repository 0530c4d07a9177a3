"""What the options' texts mean."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygrad._checks import InputError
from steadygrad.cli.options import Advise, Inspect

if TYPE_CHECKING:
    from steadygrad.studies import advise, inspect

__all__ = ["check_agreement", "folder_of", "given"]

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def _in_range(read: Callable[[str], Any], low: float, high: float) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        value = read(text)
        # A NaN is in no range.
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return checked


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    return lambda text: choices[choices.index(text)]  # a ValueError if it is none of them


# How to read a text, what it should be, and one that would do.
READERS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "steps": (_in_range(int, 16, 1 << 40), "an integer of at least 16", "200"),
    "seed": (_in_range(int, 0, math.inf), "an integer of at least 0", "0"),
    "tolerance": (_in_range(float, 0.01, 1), "a fraction from 0.01 to 1", "0.2"),
    "device": (_one_of(DEVICES), f"one of {', '.join(DEVICES)}", "auto"),
    "dtype": (_one_of(DTYPES), f"one of {', '.join(DTYPES)}", "float32"),
}


def given(options: Advise | Inspect) -> dict[str, Any]:
    """The settings that the command line names.

    Raises:
        InputError: If one of them cannot be read.
    """
    from steadygrad.studies.advise import parse_budget

    found: dict[str, Any] = {} if options.task is None else {"task": options.task}
    if options.budget is not None:
        found["budget_seconds"] = parse_budget(options.budget)
    for name, (read, expected, good) in READERS.items():
        text = getattr(options, name, None)
        if text is not None:
            try:
                found[name] = read(text)
            except ValueError:
                raise InputError(
                    f"--{name} should be {expected}. Found {text!r}. Remedy: --{name} {good}, or "
                    f"see steadygrad {options.command} --help."
                ) from None
    return found


def folder_of(name: str, text: str) -> Path:
    """The folder that a text names.

    Args:
        name: Of the option, for the message.
        text: Its value.

    Raises:
        InputError: If it is empty.
    """
    if not text.strip():
        raise InputError(
            f"{name} should name the folder of a run. Found {text!r}. Remedy: such as runs/mine."
        )
    return Path(text)


def check_agreement(
    found: Mapping[str, Any], settings: "advise.Settings | inspect.Settings"
) -> None:
    """Checks that flags given with ``--resume`` are those of the record.

    Args:
        found: What :func:`given` returned. Its budget is free: it bounds the time from now on.
        settings: Those of the record.

    Raises:
        InputError: If one of the others would change the result.
    """
    for name, value in found.items():
        recorded = getattr(settings, name)
        free = name == "budget_seconds" or (name, value) == ("device", "auto")
        if value != recorded and not free:
            flag = "TASK" if name == "task" else f"--{name}"
            raise InputError(
                f"--resume takes {name} = {recorded!r} from the record. Found {value!r}. "
                f"Remedy: leave {flag} away, or start a new run with --out."
            )
