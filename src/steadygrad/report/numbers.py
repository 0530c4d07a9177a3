"""Numbers as people read them."""

import math
from typing import Any

__all__ = ["interval", "loss", "number", "short", "show", "size"]


def number(value: Any) -> float:
    """The value as a float, or NaN when it is absent or no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value)


def show(value: Any, digits: int = 3) -> str:
    """Writes a value with so many significant digits: ``1,234``, ``0.0123``, ``1.2e−5``, ``∞``.

    ``None`` and NaN become a dash; text stays as it is.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if not isinstance(value, float):
        return str(value)
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value and not 1e-3 <= abs(value) < 1e7:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    decimals = digits if not value else max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")


def loss(value: Any) -> str:
    """Writes a loss with four decimals, so that columns of losses can be compared."""
    figure = number(value)
    if math.isfinite(figure) and 0.1 <= abs(figure) < 1e4:
        return f"{figure:.4f}".replace("-", "−")
    return show(value, digits=4)


def short(value: float) -> str:
    """Writes a count for an axis: ``500``, ``2K``, ``1.5M``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def size(value: float) -> str:
    """Writes a batch size: ``38.6``, ``1024``, ``66K``; powers of two stay recognisable."""
    return f"{value:.0f}" if 100 <= value < 10_000 else short(value)


def interval(low: Any, high: Any, digits: int = 3) -> str:
    """Writes an interval; one without an upper end as ``≥ low``."""
    left, right = number(low), number(high)
    if math.isnan(left) or math.isnan(right):
        return "–"
    if math.isinf(right) and left > 0:
        return f"≥ {show(left, digits)}"
    return f"{show(left, digits)} – {show(right, digits)}"
