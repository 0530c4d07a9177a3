"""Fast twins of the formulas, and the choice among them.

There are none yet: ``fused=True`` falls back to the multi-tensor path, and says so once.
"""

import warnings

__all__ = ["choose_mode"]

_WARNED: set[str] = set()


def choose_mode(optimizer: str, foreach: bool | None, fused: bool | None) -> str:
    """How a step is computed.

    Args:
        optimizer: Its class's name, for the warning.
        foreach: The user's wish; None: the best there is.
        fused: The user's wish for a fused kernel; None: the best there is.

    Returns:
        ``"foreach"`` or ``"single"``.
    """
    if fused and optimizer not in _WARNED:
        _WARNED.add(optimizer)
        warnings.warn(
            f"Expected a fused kernel for {optimizer}. Found none for this device: the "
            "multi-tensor path is used. Remedy: fused=None leaves the choice to the optimizer.",
            stacklevel=4,
        )
    return "single" if foreach is False else "foreach"
