r"""Check that a gradient is the sum of the parts that were seen.

A sum :math:`s_m = h_1 + \dots + h_m` that is rounded after every addition is wrong by at most
:math:`u \sum_j |s_j|`, with the unit roundoff :math:`u` and the running sums :math:`s_j`. What is
farther away was changed after it was added up, or holds more than the parts.
"""

from torch import Tensor

__all__ = ["ROUNDINGS", "is_altered"]

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
