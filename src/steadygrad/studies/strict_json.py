"""Strict JSON that keeps NaN and infinities."""

import json
import math
from typing import Any

import msgspec


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Writes strict JSON, with non-finite floats as the strings ``"nan"``, ``"inf"``, ``"-inf"``.

    ``msgspec.convert(..., strict=False)`` makes floats of them again. Structs become objects. The
    text is ASCII, and one line unless ``indent`` says the spaces for each level.

    Raises:
        TypeError: If ``value`` holds what JSON cannot, such as a tensor.
    """
    return json.dumps(_encode(msgspec.to_builtins(value)), indent=indent, allow_nan=False)
