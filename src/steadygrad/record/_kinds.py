"""Kinds of values that a record may hold: how to name them in a message, and how to tell them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ABOVE_ZERO",
    "COUNT",
    "COUNTS",
    "CURVE",
    "FLAG",
    "NUMBER",
    "NUMBERS_BY_NAME",
    "OBJECT",
    "PAIR",
    "POSITIVE",
    "SEED",
    "TEXT",
    "TEXTS",
    "TOLERANCE",
    "Fields",
    "Kind",
    "list_of",
    "number",
    "object_of",
    "one_of",
    "or_null",
]


@dataclass(frozen=True)
class Kind:
    """A kind of value: how to name it in a message, and how to tell it."""

    words: str
    holds: Callable[[Any], bool]


def number(value: Any) -> bool:
    """Whether it is a number that arithmetic can take."""
    # Beyond that an integer is no float: arithmetic on it would fail.
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 62)


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < 1 << 62


def list_of(kind: Kind, words: str) -> Kind:
    """A list, not empty, of one kind."""

    def holds(value: Any) -> bool:
        return isinstance(value, list) and len(value) > 0 and all(map(kind.holds, value))

    return Kind(f"a list of {words}", holds)


def object_of(fields: Mapping[str, Kind]) -> Kind:
    """An object with such fields, and perhaps more."""

    def holds(value: Any) -> bool:
        return isinstance(value, dict) and all(
            name in value and kind.holds(value[name]) for name, kind in fields.items()
        )

    return Kind(f"an object with {', '.join(fields)}", holds)


def or_null(kind: Kind) -> Kind:
    """A kind, or null."""
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.holds(value))


def one_of(*choices: str) -> Kind:
    """One of some texts."""
    return Kind(f"one of {', '.join(choices)}", lambda value: value in choices)


TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
NUMBER = Kind("a number", number)
ABOVE_ZERO = Kind(
    "a finite number above 0", lambda value: number(value) and value > 0 and math.isfinite(value)
)
TOLERANCE = Kind("a number from 0.01 to 1", lambda value: number(value) and 0.01 <= value <= 1)
TEXTS = Kind(
    "a list of texts", lambda value: isinstance(value, list) and all(map(TEXT.holds, value))
)
SEED = Kind("an integer of at least 0", lambda value: type(value) is int and value >= 0)
COUNT = Kind("an integer of at least 0", _whole(0))
POSITIVE = Kind("an integer of at least 1", _whole(1))
COUNTS = list_of(POSITIVE, "integers of at least 1")
PAIR = Kind("a pair", lambda value: isinstance(value, list) and len(value) == 2)
CURVE = Kind(
    "a list of pairs of numbers",
    lambda value: (
        isinstance(value, list)
        and all(PAIR.holds(pair) and all(map(number, pair)) for pair in value)
    ),
)
NUMBERS_BY_NAME = Kind(
    "an object of numbers",
    lambda value: isinstance(value, dict) and all(map(number, value.values())),
)
Fields = Mapping[str, Kind]
"""Paths, such as ``"task.name"``, and what is there; an object comes before its fields."""
