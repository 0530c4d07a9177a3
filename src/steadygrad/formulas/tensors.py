"""Sums and guards over lists of tensors that several rules share."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "Batch",
    "Bucket",
    "buckets_of",
    "correction",
    "decay_of",
    "exact",
    "inner_products",
    "joined",
    "moved_by",
    "sanitized",
    "square_sums",
    "wide",
]


class Batch(Protocol):
    """Local tensors of several parameters, each list with one entry for each of them.

    Attributes:
        weights: Weights, or the float32 masters of 16-bit ones.
        grads: Gradients, in any floating type; None: the parameter takes no part in the step.
        moments: Large states, one list for each of them, all in one type.
        buckets: Indices of parameters that are worked on together.
    """

    weights: list[Tensor]
    grads: list[Tensor | None]
    moments: tuple[list[Tensor], ...]
    buckets: list[list[int]]


@dataclass(frozen=True)
class Bucket:
    """Some parameters of a batch that one multi-tensor call works on.

    Attributes:
        places: Their indices in the batch.
        weights: Their weights.
        grads: Their gradients.
        moments: Their large states, a list for each state.
    """

    places: list[int]
    weights: list[Tensor]
    grads: list[Tensor]
    moments: list[list[Tensor]]

    def scalars(self, column: Tensor) -> list[Tensor]:
        """Their entries of a column with shape ``(tensors)``, each with shape ``()``."""
        values = column.unbind()
        return [values[i] for i in self.places]


def buckets_of(batch: Batch) -> Iterator[Bucket]:
    """The buckets of a batch, without parameters that have no gradient."""
    for bucket in batch.buckets:
        pairs = [(i, g) for i in bucket if (g := batch.grads[i]) is not None]
        if not pairs:
            continue
        places = [i for i, _ in pairs]
        yield Bucket(
            places,
            [batch.weights[i] for i in places],
            [g for _, g in pairs],
            [[states[i] for i in places] for states in batch.moments],
        )


def joined(batch: Batch, parts: Sequence[tuple[list[int], Tensor]], rows: int) -> Tensor:
    """Sums of buckets as columns of a batch, zeros for parameters that took no part.

    Args:
        batch: The batch.
        parts: Places and sums of each bucket, these with shape ``(rows, len(places))``.
        rows: Number of rows.

    Returns:
        Sums with shape ``(rows, tensors)``.
    """
    places = [i for own, _ in parts for i in own]
    if len(places) == len(batch.weights):
        return torch.cat([sums for _, sums in parts], dim=1)
    first = batch.weights[0]
    dtype = parts[0][1].dtype if parts else wide(first.dtype)
    zero = torch.zeros(rows, dtype=dtype, device=first.device)
    # Stacked, because an index by a list would be copied to the device and waited for.
    found = {i: sums[:, k] for own, sums in parts for k, i in enumerate(own)}
    return torch.stack([found.get(i, zero) for i in range(len(batch.weights))], dim=1)


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


def correction(beta: float, step: Tensor) -> Tensor:
    r""":math:`1 - \beta^t` for each count of steps, in the widest type of its device."""
    dtype = exact(step.device)
    if dtype is torch.float64 or beta == 0.0:
        return 1 - beta ** step.to(dtype)
    # The difference would lose most of float32's digits for a beta near one.
    return -torch.expm1(step.to(dtype) * math.log(beta))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type sums are taken in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


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


def decay_of(beta: float, taken: Tensor, dtype: torch.dtype) -> Tensor:
    """Factor on an average: ``beta`` where a parameter takes the step, else one.

    Args:
        beta: Decay of the average.
        taken: Whether each parameter takes the step, with shape ``(tensors)``.
        dtype: Type of the factor.
    """
    factor = torch.full(taken.shape, beta, dtype=dtype, device=taken.device)
    return factor.masked_fill_(~taken, 1.0)


def moved_by(
    weights: Sequence[Tensor], keep: Sequence[Tensor], steps: Sequence[Tensor]
) -> None:
    """Moves weights: each times a factor, less a step.

    Args:
        weights: The weights, in any floating type.
        keep: Factor on each, with shape ``()``.
        steps: Steps, in the type of the state.
    """
    if weights[0].dtype == steps[0].dtype:
        torch._foreach_mul_(weights, [factor.to(weights[0].dtype) for factor in keep])
        torch._foreach_sub_(weights, steps)
        return
    for weight, factor, step in zip(weights, keep, steps, strict=True):
        # Rounded to the weight's type once, not after each operation.
        work = torch.promote_types(weight.dtype, step.dtype)
        weight.copy_(weight.to(work).mul_(factor.to(work)).sub_(step))


def sanitized(
    gradients: Sequence[Tensor], taken: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Copies in another type; zeros where a parameter does not take the step.

    Decided on the device: the host does not wait to learn which.

    Args:
        gradients: Tensors of any floating type.
        taken: Whether each takes the step, with shape ``()``.
        dtype: Type of the copies.
    """
    return [
        torch.where(ok, g, 0.0)
        if g.dtype == dtype
        else g.to(dtype, copy=True).masked_fill_(~ok, 0.0)
        for g, ok in zip(gradients, taken, strict=True)
    ]
