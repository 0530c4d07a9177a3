"""Numbers and texts as people read them."""

import math
import re
from collections.abc import Iterable
from typing import Any

ENDS = {"interrupted": "was interrupted", "budget": "ran out of its budget", "failed": "failed"}

# HTML has no way to write these, and half a surrogate pair cannot be encoded.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def unfinished(status: str) -> list[str]:
    """A sentence on the end of a study; none where it is complete."""
    more = "" if status == "failed" else "; --resume continues it"
    return [f"The study {ENDS[status]}{more}."] if status in ENDS else []


def clean(text: str) -> str:
    """The text without characters that no page can hold; ``\ufffd`` takes their place."""
    return _FORBIDDEN.sub("\ufffd", text)


def show(value: Any, digits: int = 3) -> str:
    """Writes a value with ``digits`` significant digits: ``1,234``, ``0.0123``, ``1.2e−5``, ``∞``.

    ``None`` and NaN become a dash; text stays as it is.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "–")
    if value and not 1e-3 <= abs(value) < 1e7:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")
    decimals = digits if not value else max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")


def loss(value: float | None) -> str:
    """Writes a loss with four decimals, so that columns of losses can be compared."""
    if value is not None and 0.1 <= abs(value) < 1e4:
        return f"{value:.4f}".replace("-", "−")
    return show(value, digits=4)


def plural(word: str) -> str:
    """The plural of an ordinary English noun, such as a sample's name."""
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2:-1] not in tuple("aeiou"):
        return word[:-1] + "ies"
    return word + "s"


def listed(parts: Iterable[str]) -> str:
    """Texts as a sentence lists them: ``a, b and c``; at least one."""
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last
