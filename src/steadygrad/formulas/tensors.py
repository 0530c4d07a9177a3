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


# Elements that a CPU adds up one after the other, whose error grows with their number: of 2^24
# float32 ones the square sum is off by 0.1 %, of as many as these by a few roundings.
PIECE = 2**15


def square_sums(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Sum of squares of each tensor, with shape ``(tensors)``.

    In float32 elements below 1e-19 may count as zero, and a sum above 3e38 is infinite.

    Args:
        tensors: Of any floating types.
        dtype: Type of the sums, no narrower than any tensor's; None: the first one's, float32 at
            least.

    Returns:
        The sums, not finite where an element is not, or where the sum overflows.
    """
    dtype = wide(tensors[0].dtype) if dtype is None else dtype
    pieces = [_pieces(tensor) for tensor in tensors]
    norms = torch._foreach_norm([piece for some in pieces for piece in some], 2, dtype=dtype)
    squares, counts = torch.stack(norms).square(), [len(some) for some in pieces]
    if len(squares) == len(counts):
        return squares
    return torch.stack([part.sum() for part in squares.split(counts)])


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Views that together are the tensor, each short enough for one sum."""
    small = tensor.numel() <= PIECE or tensor.device.type != "cpu"
    if small or torch.compiler.is_compiling():
        return [tensor]
    if tensor.is_contiguous():
        return list(tensor.view(-1).split(PIECE))
    # Without its vector units, which take every eighth element each.
    if rows := PIECE // 8 * len(tensor) // tensor.numel():
        return list(tensor.split(rows))
    return [piece for row in tensor.unbind() for piece in _pieces(row)]


def inner_products(first: Sequence[Tensor], second: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Inner product of each pair, taken in ``dtype``, with shape ``(tensors)``."""
    return torch.stack(
        [_inner(a.to(dtype), b.to(dtype)) for a, b in zip(first, second, strict=True)]
    )


def _inner(a: Tensor, b: Tensor) -> Tensor:
    # cuBLAS counts elements in 32 bits.
    if not (a.is_contiguous() and b.is_contiguous() and a.numel() < 2**31):
        return (a * b).sum()
    pairs = list(zip(_pieces(a), _pieces(b), strict=True))
    if len(pairs) == 1:
        return torch.dot(a.view(-1), b.view(-1))
    return torch.stack([torch.dot(*pair) for pair in pairs]).sum()


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
