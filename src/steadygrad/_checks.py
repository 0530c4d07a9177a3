"""Argument checks: what was expected, what was found, and the remedy where that is not plain."""

import math
import os
import sys
from collections.abc import Collection
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")
# What each of several processes needs to find the others.
LAUNCHED = ("RANK", "MASTER_ADDR", "MASTER_PORT")


class InputError(ValueError):
    """Something the user handed in cannot be used; the message is one readable line.

    The command line prints it without a traceback and exits with code 2.
    """


def install(extra: str) -> str:
    """The command that installs an extra: no package index has the package yet."""
    return f'pip install -e ".[{extra}]" in the clone'


def from_extra(module: str, extra: str) -> Any:
    """Imports a module that an extra brings."""
    try:
        return import_module(module)
    except ImportError as error:
        found = f"Expected the package {module.partition('.')[0]}. Found none ({error})"
        raise InputError(f"{found}. Remedy: {install(extra)}.") from error


def check_number(
    name: str,
    value: float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
    remedy: str = "",
) -> float:
    """Returns ``value`` when it is a finite number within the bounds, else raises InputError.

    ``name`` is what the caller knows the value by; the remedy is by default what the bounds say.
    """
    left = "(" if low_open or low == -math.inf else "["
    right = ")" if high_open or high == math.inf else "]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        wrong = _other_type(value, "number")
    elif not -sys.float_info.max <= value <= sys.float_info.max:
        wrong = "look where it is computed"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        # No tensor holds it.
        wrong = f"a float, {float(value):g}"
    elif value < low or (low_open and value == low):
        wrong = f"more than {low:g}" if low_open else f"{low:g} or more"
    elif value > high or (high_open and value == high):
        wrong = f"less than {high:g}" if high_open else f"{high:g} or less"
    else:
        return value
    raise InputError(
        f"Parameter `{name}` should be a finite number in {left}{low:g}, {high:g}{right}. "
        f"Found `{name} = {shown(value)}`. Remedy: {remedy or wrong}."
    )


def check_count(name: str, value: int, *, low: int = 1, remedy: str = "") -> int:
    """Returns ``value`` when it is an integer of at least ``low``, else raises InputError."""
    if isinstance(value, bool) or not isinstance(value, int):
        wrong = _other_type(value, "integer")
    elif value < low:
        wrong = f"{low} or more"
    else:
        return value
    raise InputError(
        f"Parameter `{name}` should be an integer of at least {low}. "
        f"Found `{name} = {shown(value)}`. Remedy: {remedy or wrong}."
    )


def _other_type(value: object, kind: str) -> str:
    if isinstance(value, float) and value.is_integer():
        return f"{int(value)}, an int"
    if isinstance(value, str):
        return f"the {kind} itself, without quotes"
    if hasattr(value, "item"):
        return f"a plain {kind}, as by `.item()`"
    return f"a plain {kind}"


def shown(value: object) -> str:
    """The repr of a value in one line of at most 80 characters."""
    # An array's repr has many lines, and a message one.
    line = " ".join(repr(value).split())
    return line if len(line) <= 80 else f"{line[:76]} ..."


def check_type(name: str, value: object, kind: type[T], remedy: str) -> T:
    """Returns ``value`` when it is an instance of ``kind``, else raises InputError."""
    if isinstance(value, kind):
        return value
    raise InputError(
        f"Parameter `{name}` should be of type {kind.__name__}. "
        f"Found {shown(value)}, of type {type(value).__name__}. Remedy: {remedy}."
    )


def check_choice(name: str, value: T, choices: Collection[T]) -> T:
    """Returns ``value`` when it is one of ``choices``.

    Raises:
        InputError: If it is not, with the nearest choice as the remedy, if one is near.
    """
    if value in choices:
        return value
    near = get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "one of these."
    listed = ", ".join(repr(choice) for choice in choices)
    raise InputError(
        f"Parameter `{name}` should be one of {listed}. "
        f"Found `{name} = {shown(value)}`. Remedy: {hint}"
    )


def launched() -> tuple[int, int]:
    """Rank of this process and number of processes, as ``torchrun`` says them; 0 and 1 without it.

    Raises:
        InputError: If ``RANK`` or ``WORLD_SIZE`` is not a whole number, or several processes do
            not know where they find each other.
    """
    size, rank = _environment_count("WORLD_SIZE", 1), _environment_count("RANK", 0)
    if size <= 1:
        return 0, 1
    missing = [name for name in LAUNCHED if not os.environ.get(name, "").strip()]
    if missing:
        raise InputError(
            f"The environment should hold {', '.join(LAUNCHED)} where WORLD_SIZE = {size}, as "
            f"torchrun sets them. Found no {', '.join(missing)}. Remedy: unset WORLD_SIZE, or "
            "start with torchrun."
        )
    _environment_count("MASTER_PORT", 0)
    return rank, size


def _environment_count(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isdigit():
        raise InputError(
            f"The environment variable {name} should be a whole number, as torchrun sets it. "
            f"Found {text!r}. Remedy: unset {name}, or start with torchrun."
        )
    return int(text)
