"""Sums and guards over lists of tensors that several rules share."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["inner_products", "sanitized", "select", "square_sums", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type sums are taken in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def select(ok: Tensor, value: float, other: float, dtype: torch.dtype) -> Tensor:
    """``value`` if ``ok``, else ``other``, with shape ``()``; decided on the device."""
    full = torch.full((), value, dtype=dtype, device=ok.device)
    return torch.where(ok, full, other)


def square_sums(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Sum of squares of each tensor, with shape ``(tensors)``.

    In float32 elements below 1e-19 may count as zero, and a sum above 3e38 is infinite.

    Args:
        tensors: Of any floating types.
        dtype: Type of the sums; None: the first one's, float32 at least.

    Returns:
        The sums, not finite where an element is not, or where the sum overflows.
    """
    # Without a type of its own the norm of a half tensor would be rounded to half, or overflow.
    norms = torch._foreach_norm(list(tensors), 2, dtype=dtype or wide(tensors[0].dtype))
    return torch.stack(norms).square()


def inner_products(first: Sequence[Tensor], second: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Inner product of each pair, taken in ``dtype``, with shape ``(tensors)``."""
    return torch.stack(
        [_inner(a.to(dtype), b.to(dtype)) for a, b in zip(first, second, strict=True)]
    )


def _inner(a: Tensor, b: Tensor) -> Tensor:
    # cuBLAS counts elements in 32 bits.
    if a.is_contiguous() and b.is_contiguous() and a.numel() < 2**31:
        return torch.dot(a.view(-1), b.view(-1))
    return (a * b).sum()


def sanitized(gradients: Sequence[Tensor], ok: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Copies in another type; zeros where the step's gradients are not all finite.

    Decided on the device: the host does not wait to learn which.

    Args:
        gradients: Tensors of any floating type.
        ok: With shape ``()``.
        dtype: Of the copies.
    """
    return [
        torch.where(ok, g, 0.0)
        if g.dtype == dtype
        else g.to(dtype, copy=True).masked_fill_(~ok, 0.0)
        for g in gradients
    ]
