"""Types and sums that several tools share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Types that sums are taken in: asking torch counts as a call of an operator.
_WIDE = (torch.float32, torch.float64)
# Widest floating type by type of device, as found out.
_WIDEST: dict[str, torch.dtype] = {}


def exact(device: torch.device) -> torch.dtype:
    """The widest floating type of a device: float64, or float32 where there is none (MPS)."""
    if device.type not in _WIDEST:
        try:
            torch.zeros((), dtype=torch.float64, device=device)
            _WIDEST[device.type] = torch.float64
        except (TypeError, RuntimeError):
            _WIDEST[device.type] = torch.float32
    return _WIDEST[device.type]


class HostCopy:
    """Asynchronous copy of a device's numbers to the host.

    ``numbers`` hold it once ``event`` has come.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.numbers = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.numbers.copy_(tensor, non_blocking=True)
        self.event = torch.Event(tensor.device)
        self.event.record()


def may_hold(flags: Any) -> bool:
    """Whether any flag may be true: only arrays and plain tensors of the host are read."""
    if not isinstance(flags, Tensor):
        return bool(flags.any())
    is_plain = type(flags) is Tensor and flags.device.type == "cpu"
    return torch.compiler.is_compiling() or not is_plain or bool(flags.numpy().any())


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type sums are taken in: float32 at least."""
    return dtype if dtype in _WIDE else torch.promote_types(dtype, torch.float32)


# Elements that a CPU adds up one after the other, whose error grows with their number: of 2^24
# float32 ones the square sum is off by 0.1 %, of as many as these by a few roundings.
PIECE = 2**15


def square_sums(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Sum of squares of each tensor, with shape ``(tensors)``.

    In float32 elements below 1e-19 may count as zero, and a sum above 3e38 is infinite.

    Args:
        tensors: Tensors of any floating types.
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
    if tensor.device.type != "cpu" or tensor.numel() <= PIECE:
        return [tensor]
    if tensor.is_contiguous():
        return list(tensor.view(-1).split(PIECE))
    # A CPU sums such a view without vector instructions, so a piece has an eighth of the elements.
    if rows := PIECE // 8 * len(tensor) // tensor.numel():
        return list(tensor.split(rows))
    return [piece for row in tensor.unbind() for piece in _pieces(row)]


def part_sums(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sum of each part of a tensor in the widest type: of what is positive, less of the rest.

    In a number of calls that does not grow with that of parts.
    """
    flat = tensor.reshape(-1)
    both = torch.cat([flat, -flat]).clamp_(min=0)
    sums = torch._foreach_norm(both.split([*sizes, *sizes]), 1, dtype=exact(tensor.device))
    above, below = torch.stack(sums).chunk(2)
    return above - below


def inner_products(first: Sequence[Tensor], second: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Inner product of each pair, taken in ``dtype``, with shape ``(tensors)``."""
    if all(tensor.numel() <= PIECE for tensor in first):
        products = torch._foreach_mul([a.to(dtype) for a in first], [b.to(dtype) for b in second])
        return torch.stack([product.sum() for product in products])
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
