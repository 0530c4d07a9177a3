"""Argument checks: what was expected, what was found, and the remedy where that is not plain."""

import math
from collections.abc import Collection
from difflib import get_close_matches
from typing import TypeVar

__all__ = ["InputError", "check_choice", "check_count", "check_number"]

T = TypeVar("T")


class InputError(ValueError):
    """Something the user handed in cannot be used; the message is one readable line.

    The command line prints it without a traceback and exits with code 2.
    """


def check_number(
    name: str,
    value: float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
) -> float:
    """Returns ``value`` when it is a finite number within the bounds.

    Raises:
        InputError: If it is not, naming the bounds and the value.
    """
    left, right = "(" if low_open else "[", ")" if high_open else "]"
    expected = f"a finite number in {left}{low:g}, {high:g}{right}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"Parameter `{name}` should be {expected}. Found `{name} = {value!r}`.")
    below = value <= low if low_open else value < low
    above = value >= high if high_open else value > high
    if not math.isfinite(value) or below or above:
        raise InputError(f"Parameter `{name}` should be {expected}. Found `{name} = {value!r}`.")
    return value


def check_count(name: str, value: int, *, low: int = 1) -> int:
    """Returns ``value`` when it is an integer of at least ``low``.

    Raises:
        InputError: If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(
            f"Parameter `{name}` should be an integer of at least {low}. "
            f"Found `{name} = {value!r}`."
        )
    return value


def check_choice(name: str, value: T, choices: Collection[T]) -> T:
    """Returns ``value`` when it is one of ``choices``.

    Raises:
        InputError: If it is not, with the nearest choice as the remedy.
    """
    if value in choices:
        return value
    near = get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(repr(choice) for choice in choices)
    raise InputError(
        f"Parameter `{name}` should be one of {listed}. Found `{name} = {value!r}`.{hint}"
    )
