"""Strict JSON that keeps NaN and infinities."""

import json
import math
import re
from typing import Any

import msgspec

_LOOKS_NON_FINITE = re.compile(r"\\*(nan|inf|-inf)")


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and _LOOKS_NON_FINITE.fullmatch(value):
        return "\\" + value  # a text that says "nan" stays a text
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, str) and _LOOKS_NON_FINITE.fullmatch(value):
        return value[1:] if value.startswith("\\") else float(value)
    return value


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Writes strict JSON, with non-finite floats as the strings ``"nan"``, ``"inf"``, ``"-inf"``.

    Structs become objects. The text is ASCII, and one line unless ``indent`` says the spaces for
    each level.

    Raises:
        TypeError: If ``value`` holds what JSON cannot, such as a tensor.
    """
    return json.dumps(_encode(msgspec.to_builtins(value)), indent=indent, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Reads a text of :func:`dumps`; ``"nan"``, ``"inf"`` and ``"-inf"`` become floats again.

    Raises:
        ValueError: If ``text`` is not JSON.
    """
    return _decode(json.loads(text))
