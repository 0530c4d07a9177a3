"""Strict JSON that keeps NaN and infinities."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["dumps", "loads"]

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LOOKS_NON_FINITE = re.compile(r"\\*(nan|inf|-inf)")


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, str) and _LOOKS_NON_FINITE.fullmatch(value):
        return "\\" + value  # a text that says "nan" stays a text
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, str) and _LOOKS_NON_FINITE.fullmatch(value):
        return _NON_FINITE[value] if value in _NON_FINITE else value[1:]
    return value


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Writes strict JSON, with non-finite floats as the strings ``"nan"``, ``"inf"``, ``"-inf"``.

    Args:
        value: Nest of mappings, lists, tuples, strings, numbers, booleans and ``None``.
        indent: Spaces for each level; ``None`` writes one line. The text is ASCII.

    Raises:
        TypeError: If ``value`` holds anything else, such as a tensor.
    """
    return json.dumps(_encode(value), indent=indent, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Reads what :func:`dumps` wrote; ``"nan"``, ``"inf"`` and ``"-inf"`` become floats again.

    Raises:
        ValueError: If ``text`` is not JSON.
    """
    return _decode(json.loads(text))
