"""The weights by which losses ask for their shares."""

from collections.abc import Mapping, Sequence

from steadygrad._checks import InputError, check_number

__all__ = ["check_present", "check_weights"]


def check_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """A copy of the weights.

    Raises:
        InputError: If it is no mapping of names to numbers of zero or more, or none is positive.
    """
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise InputError(
            f"Parameter `weights` should map names to numbers. Found {weights!r}. "
            'Remedy: {"l1": 1.0, "adv": 4.0}.'
        )
    checked = {
        name: float(check_number(f"weights[{name!r}]", weight, low=0))
        for name, weight in weights.items()
    }
    if not any(checked.values()):
        raise InputError(
            "Parameter `weights` should hold at least one positive weight. "
            f"Found {dict(weights)}. Remedy: give a loss a weight."
        )
    return checked


def check_present(names: Sequence[str], weights: Mapping[str, float], processes: int) -> None:
    """Refuses a step in which there is nothing to do.

    Raises:
        InputError: If this is the only process, and no loss is there or none has a weight.
    """
    # Another process may have losses, and waits for this one.
    if processes > 1 or any(weights[name] for name in names):
        return
    found = f"only {list(names)}, of weight zero" if names else "none"
    raise InputError(
        f"Parameter `losses` should hold a loss with a positive weight. Found {found}. "
        f"Remedy: one or more of {[n for n, w in weights.items() if w]}, or skip the step."
    )
