"""The weights by which losses ask for their shares."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

from torch import Tensor

from steadygrad._checks import InputError, check_choice, check_number

__all__ = [
    "check_named",
    "check_names",
    "check_pairs",
    "check_present",
    "check_weights",
    "cosine_name",
]


def check_names(weights: Mapping[str, float]) -> Mapping[str, float]:
    """The weights, if they have names.

    Raises:
        InputError: If they have not.
    """
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise InputError(
            f"Parameter `weights` should map names to numbers. Found {weights!r}. "
            'Remedy: {"l1": 1.0, "adv": 4.0}.'
        )
    return weights


def check_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """A copy of the weights.

    Raises:
        InputError: If it is no mapping of names to numbers of zero or more, or none is positive.
    """
    checked = {
        name: float(check_number(f"weights[{name!r}]", weight, low=0))
        for name, weight in check_names(weights).items()
    }
    if not any(checked.values()):
        raise InputError(
            "Parameter `weights` should hold at least one positive weight. "
            f"Found {dict(weights)}. Remedy: give a loss a weight."
        )
    return checked


def check_named(losses: Mapping[str, Tensor | None], names: Sequence[str]) -> dict[str, Tensor]:
    """The losses that are there.

    Raises:
        InputError: If it is no mapping, or a name is unknown.
    """
    if not isinstance(losses, Mapping):
        raise InputError(
            f"Parameter `losses` should map names to losses. Found a {type(losses).__name__}. "
            f"Remedy: {{{names[0]!r}: loss}}, with names out of {list(names)}."
        )
    for name in losses:
        check_choice("losses", name, names)
    return {name: loss for name, loss in losses.items() if loss is not None}


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


def check_pairs(names: Sequence[str]) -> None:
    """Refuses names of which two pairs would share a metric.

    Raises:
        InputError: If there are such pairs.
    """
    counts = Counter(cosine_name(a, b) for a, b in combinations(names, 2))
    for a, b in combinations(names, 2):
        if counts[cosine_name(a, b)] > 1:
            raise InputError(
                "Parameter `monitor` should be False for these names of losses. Found "
                f"{counts[cosine_name(a, b)]} pairs whose metric would be {cosine_name(a, b)!r}. "
                f"Remedy: rename {a!r} or {b!r}."
            )


def cosine_name(a: str, b: str) -> str:
    """What the angle between two losses' gradients is called."""
    return f"cosine_{a}_{b}"
