r"""Check that a gradient is the sum of the parts that were seen, and the likely cause if not.

A sum :math:`s_m = h_1 + \dots + h_m` that is rounded after every addition is wrong by at most
:math:`u \sum_j |s_j|`, with the unit roundoff :math:`u` and the running sums :math:`s_j`. What is
farther away was changed after it was added up, or holds more than the parts.
"""

from collections.abc import Sequence

from torch import Tensor

__all__ = ["ROUNDINGS", "is_altered", "likely_cause"]

# Errors of single additions are below u|s_j|, and as good as independent. For up to 16 parts the
# bound holds in the worst case too; then all errors point the same way.
ROUNDINGS = 4.0


def is_altered(
    seen: Tensor, found: Tensor, squares: Tensor, unit: float, processes: int = 1
) -> Tensor:
    r"""Whether a gradient is farther from the sum of its parts than rounding can bring it.

    Between processes the order of additions is unknown: of :math:`R` running sums none is taken
    to be larger than the whole and all processes' own together.

    Args:
        seen: Sum of the parts' elements, with shape ``(n)``.
        found: The gradient's elements at the same places, with shape ``(n)``.
        squares: Squares of the running sums, :math:`\sum_j |s_j|^2`, added up over processes.
        unit: Largest unit roundoff of the types that the sum passed through.
        processes: Number of processes whose gradients were added up.

    Returns:
        A boolean with shape ``()``; false where a part is not finite.
    """
    distance = (seen - found).square().sum()
    if processes > 1:
        squares = squares + processes * (seen.square().sum() + squares)
    return distance > (ROUNDINGS * unit) ** 2 * squares


def likely_cause(
    seen: Sequence[float],
    found: Sequence[float],
    scales: Sequence[float],
    *,
    parts: int,
    samples: int,
    processes: int,
    unit: float,
) -> str:
    """Names the likely cause of ``found`` in place of ``seen``, a key of the warning's table.

    Args:
        seen: Sum of the parts' elements.
        found: The gradient's elements at the same places.
        scales: Loss scales that were taken out of the parts' elements.
        parts: Number of parts on this process.
        samples: Number of samples on this process.
        processes: Number of processes.
        unit: Unit roundoff of the gradient.
    """
    tolerance = max(1e-3, 8 * unit)
    square = sum(p * p for p in seen)
    if square == 0 or not any(found):
        return "unseen" if any(found) else "cleared"
    triples = list(zip(seen, found, scales, strict=True))
    for exponent in (1, -1):
        rest = sum((q * s**exponent - p) ** 2 for p, q, s in triples)
        if rest <= tolerance**2 * square and any(s != 1 for s in scales):
            return "loss scale"
    ratio = sum(p * q for p, q in zip(seen, found, strict=True)) / square
    rest = sum((q - ratio * p) ** 2 for p, q in zip(seen, found, strict=True))
    if ratio > 0 and rest <= (tolerance * ratio) ** 2 * square:
        return _cause_of_factor(ratio, parts, samples, processes, tolerance)
    # As clipping of values, or by parameter, does it.
    size = square**0.5
    shrunk = all(
        abs(q) <= abs(p) * (1 + tolerance) + tolerance * size and p * q >= 0
        for p, q in zip(seen, found, strict=True)
    )
    return "clipping" if shrunk else "leftover"


def _cause_of_factor(
    ratio: float, parts: int, samples: int, processes: int, tolerance: float
) -> str:
    def near(factor: float) -> bool:
        return abs(ratio / factor - 1) <= tolerance

    if processes > 1 and near(processes):
        return "summed"
    if any(n > 1 and near(1 / n) for n in (parts, samples)):
        return "accumulation"
    # Loss scales are powers of two, and large.
    exponents = (sign * power for sign in (1, -1) for power in range(4, 41))
    if any(near(2.0**exponent) for exponent in exponents):
        return "loss scale"
    return "clipping" if ratio < 1 else "leftover"
