"""Whether a gradient is the sum of its parts, straight from the definition."""

import torch
from torch import Tensor


def accumulated(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum in `.grad`: one part after the other, each sum rounded to its type."""
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total


def running_squares(parts: Tensor) -> Tensor:
    """Squares of the running sums of parts with shape ``(m, n)``, in their order."""
    return parts.cumsum(0).square().sum()
