"""Batches of parameters as the rules see them, and what several rules share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from steadygrad.numerics import wide

__all__ = [
    "Batch",
    "Bucket",
    "average",
    "decays_of",
    "joined",
    "moved_by",
    "sum_type",
]


@dataclass(frozen=True)
class Bucket:
    """Some parameters of a batch that one multi-tensor call works on, each with a gradient.

    Attributes:
        places: Indices of the parameters in the batch.
        weights: Local weights, or the float32 masters of 16-bit ones.
        grads: Local gradients, in any floating type.
        moments: Local large states, a list for each of them, all in one type.
        inverse_scale: Factor on every gradient that is read, with shape ``()``; None: one.
    """

    places: list[int]
    weights: list[Tensor]
    grads: list[Tensor]
    moments: tuple[list[Tensor], ...]
    inverse_scale: Tensor | None = None

    def unscaled(self) -> list[Tensor]:
        """Gradients without their loss scale, in float32 at least; as they are if there is none."""
        if self.inverse_scale is None:
            return self.grads
        types = [wide(g.dtype) for g in self.grads]
        return [
            g.to(dtype) * self.inverse_scale.to(dtype)
            for g, dtype in zip(self.grads, types, strict=True)
        ]

    def sanitized(self, taken: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Copies of gradients without their loss scale; zeros where the step is not taken.

        Decided on the device: the host does not wait to learn which.

        Args:
            taken: Whether each takes the step, with shape ``()``.
            dtype: Type of the copies.
        """
        pairs = zip(self.unscaled(), taken, strict=True)
        if self.inverse_scale is not None:
            return [g.masked_fill_(~ok, 0.0).to(dtype) for g, ok in pairs]
        return [
            torch.where(ok, g, 0.0)
            if g.dtype == dtype
            else g.to(dtype, copy=True).masked_fill_(~ok, 0.0)
            for g, ok in pairs
        ]

    def pick(self, columns: Iterable[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
        """Picks the entries of these parameters from columns of shape ``(tensors)``, as scalars.

        Args:
            columns: The columns.
            dtype: Type of the entries, other than truth values.
        """
        first, stop, found = min(self.places), max(self.places) + 1, []
        for column in columns:
            # Unbinds the range of this bucket only: there may be as many buckets as parameters.
            own = column[first:stop]
            values = (own if own.dtype is torch.bool else own.to(dtype)).unbind()
            found.append([values[i - first] for i in self.places])
        return found


class Batch(Protocol):
    """Local tensors of several parameters.

    Attributes:
        weights: Weights of all of them, or the float32 masters of 16-bit ones.
        buckets: Parameters that have a gradient, in groups that are worked on together.
    """

    weights: list[Tensor]
    buckets: list[Bucket]


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


def sum_type(bucket: Bucket) -> torch.dtype:
    """The wider type of its weights and states."""
    return torch.promote_types(bucket.weights[0].dtype, bucket.moments[0][0].dtype)


def decays_of(bucket: Bucket, betas: Iterable[float], taken: Tensor) -> list[list[Tensor]]:
    """Factors on averages: each ``beta`` where a parameter takes the step, else one.

    Args:
        bucket: The parameters.
        betas: Decays of the averages.
        taken: Whether each parameter of the batch takes the step, with shape ``(tensors)``.
    """
    dtype = bucket.moments[0][0].dtype
    rest = torch.ones(taken.shape, dtype=dtype, device=taken.device)
    columns = [torch.where(taken, torch.full_like(rest, beta), rest) for beta in betas]
    return bucket.pick(columns, dtype)


def average(
    bucket: Bucket, gradients: list[Tensor], betas: tuple[float, float], taken: Tensor
) -> None:
    """Moves the averages of gradients and of their squares, the bucket's two large states.

    Args:
        bucket: The parameters.
        gradients: What is averaged, zeros where a parameter does not take the step.
        betas: Decays of both averages.
        taken: As in :func:`decays_of`.
    """
    m, v = bucket.moments
    # A parameter that skips the step keeps its averages: the decay is 1, and zero is added.
    decay1, decay2 = decays_of(bucket, betas, taken)
    torch._foreach_mul_(m, decay1)
    torch._foreach_add_(m, gradients, alpha=1 - betas[0])
    torch._foreach_mul_(v, decay2)
    torch._foreach_addcmul_(v, gradients, gradients, value=1 - betas[1])


def moved_by(weights: list[Tensor], keep: list[Tensor], steps: list[Tensor]) -> None:
    """Moves weights: each times a factor, less a step.

    Args:
        weights: The weights, in any floating type.
        keep: Factor on each, with shape ``()`` and in the wider type of weight and step.
        steps: Steps, in the type of the state.
    """
    if weights[0].dtype == steps[0].dtype:
        torch._foreach_mul_(weights, keep)
        torch._foreach_sub_(weights, steps)
        return
    for weight, factor, step in zip(weights, keep, steps, strict=True):
        # Rounded to the weight's type once, not after each operation.
        work = torch.promote_types(weight.dtype, step.dtype)
        weight.copy_(weight.to(work).mul_(factor).sub_(step))
