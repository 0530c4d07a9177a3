"""Whether the parts of a step are alike, as micro-batches are, or differ by their place in it."""

import torch
from torch import Tensor

__all__ = ["Likeness"]

# Together they need 21 steps. A mean cosine of 0.1 is a hundredth of the parts' spread.
_SCORE, _COSINE = 4.5, 0.1


class Likeness:
    r"""Compares the first part of each step with the last one of as many samples.

    Of independent samples either may as well come first, so their difference is as likely as its
    opposite, and its cosine :math:`c_t` with the sum of the earlier differences has a random sign.
    Then :math:`\sum c_t / \sqrt{\sum c_t^2}` passes 4.5 with a probability below
    :math:`e^{-4.5^2/2}`, whatever the gradients' distribution, and whether or not the weights
    move. Parts of one loss, one after the other, pass it soon.

    Args:
        turns: Number of sets of elements that are compared in turn.
        width: Number of elements in a set, at most.
        zero: A number of the type, and on the device, of all sums.

    Attributes:
        state: Sums of the unit differences of every set; below them number, sum and sum of squares
            of the cosines.

    References:
        | Student's t-Test under Symmetry Conditions (Efron, 1969)
        | https://doi.org/10.1080/01621459.1969.10501068
    """

    def __init__(self, turns: int, width: int, zero: Tensor) -> None:
        self.state = zero.new_zeros(turns + 1, max(width, 3))

    def note(self, turn: int, difference: Tensor) -> None:
        """Takes in one step's difference, with shape ``(n)``; zeros where there is none."""
        past, sums = self.state[turn, : len(difference)], self.state[-1]
        unit = (difference / difference.norm()).nan_to_num()
        cosine = (unit.dot(past) / past.norm()).nan_to_num()
        sums[:3] += torch.stack([(cosine != 0).to(cosine), cosine, cosine * cosine])
        past += unit

    @property
    def differ(self) -> Tensor:
        """Whether first and last parts differ systematically, boolean with shape ``()``."""
        count, total, squares = self.state[-1, :3]
        found: Tensor = (total > _SCORE * squares.sqrt()) & (total > _COSINE * count)
        return found
