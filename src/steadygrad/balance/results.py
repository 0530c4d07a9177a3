"""Results of balancing one micro-batch: gradients, effective loss, metrics."""

import functools
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad.balance.exchange import JoinedSums
from steadygrad.balance.loss_context import LossContext, cosine_name
from steadygrad.balance.norm_averages import BufferUpdates
from steadygrad.formulas.balance import shares

__all__ = ["BalancedGradients", "StepResult", "angle_metrics", "effective_loss", "loss_metrics"]


class StepResult(NamedTuple):
    """Numbers of one micro-batch; vectors with shape ``(K,)``.

    Attributes:
        joined: Sums that the norms are computed from.
        averages: Averages that the scales were computed from.
        scales: Factors on the gradients.
        targets: Shares asked for, among the losses that took part.
        active: Which losses took part.
        finite: Which losses were present with finite gradients.
        overflowed: Whether a loss with a weight had a non-finite gradient, boolean with shape
            ``()``; None without a scaler that would skip the step.
        total: Norm of the gradient that an aggregator of whole gradients made, or None.
    """

    joined: JoinedSums
    averages: Tensor
    scales: Tensor
    targets: Tensor
    active: Tensor
    finite: Tensor
    overflowed: Tensor | None
    total: Tensor | None = None


class BalancedGradients(NamedTuple):
    """One gradient for each tensor of the outputs, with its origin; nothing is stored yet."""

    gradients: list[Tensor | None]
    result: StepResult
    updates: BufferUpdates


def effective_loss(
    losses: Mapping[str, Tensor], names: Sequence[str], result: StepResult, context: LossContext
) -> Tensor:
    """Sums the losses times their scales, without loss scale and accumulation divisor."""
    if not losses:
        return result.scales.new_zeros((), dtype=torch.float32)
    dtype = functools.reduce(torch.promote_types, (v.dtype for v in losses.values()), torch.float32)
    slots = [slot for slot, name in enumerate(names) if name in losses]
    values = torch.stack([losses[names[slot]].detach().reshape(()) for slot in slots])
    scales, finite, active = (
        torch.stack([vector[slot] for slot in slots]) if len(slots) < len(names) else vector
        for vector in (result.scales, result.finite, result.active)
    )
    # A loss that took no part can have any value, and its factor of zero would keep a NaN.
    counted = finite & (scales != 0) & (active | torch.isfinite(values))
    total = torch.where(counted, scales * values, 0.0).sum(dtype=dtype)
    if context.grad_scale is None:
        return total * context.accumulation_steps if context.accumulation_steps > 1 else total
    return (total * context.accumulation_steps / context.grad_scale).to(dtype)


def loss_metrics(norms: Tensor, result: StepResult) -> dict[str, Tensor]:
    """Names vectors with one number a loss as :attr:`LossBalancer.metrics` does."""
    return {
        "ratio": shares(result.averages, result.active),
        "share_before": shares(norms, result.active),
        # An aggregator's weights may be negative.
        "share_after": shares((norms * result.scales).abs(), result.active),
        "target": result.targets,
        "norm": norms,
        "average": result.averages,
        "scale": result.scales,
    }


def angle_metrics(names: Sequence[str], result: StepResult) -> dict[str, Tensor]:
    """Computes the total norm and the angles between gradients from their inner products."""
    inner = result.joined.products
    if inner is None:
        return {}
    products = torch.where(result.active[:, None] & result.active, inner, 0.0)
    total = result.total
    if total is None:
        total = (result.scales @ products @ result.scales).clamp_min(0).sqrt()
    lengths = inner.diagonal().sqrt()
    cosines = inner / (lengths[:, None] * lengths)
    pairs = combinations(range(len(names)), 2)
    return {"total": total, **{cosine_name(names[i], names[j]): cosines[i, j] for i, j in pairs}}
