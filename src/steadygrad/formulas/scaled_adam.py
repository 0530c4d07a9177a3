r"""ScaledAdam: the small arithmetic on columns, and two passes by multi-tensor calls.

A parameter is thought of as :math:`p = r\, \bar p` with :math:`\bar p` of root mean square 1.
Adam's second moment scales the gradient, the step is proportional to :math:`r`, and
:math:`\log r` is learned too, once in ``size_update_period`` steps :math:`P`. At step
:math:`t = 0, 1, \dots`,

.. math::
    v &\leftarrow \beta_2 v + (1 - \beta_2)\, g^2 \qquad
    \hat v = v / (1 - \beta_2^{t+1}) \\
    \delta &\leftarrow \beta_1 \delta + (1 - \beta_1) \left(
        - \eta\, \max(r, r_{\min})\, \frac{g}{\sqrt{\hat v} + \epsilon} + s\, p \right) \\
    p &\leftarrow p + \delta

with :math:`s` the size step, zero unless :math:`t \bmod P = P - 1`. The momentum is one of updates
and not of gradients, so that a new learning rate acts gradually. A parameter of one element has no
size: its learning rate is :math:`\eta` times ``scalar_lr_scale``, and its value is bounded.

The gradient may be clipped first, see :mod:`steadygrad.formulas.clipping`.

This module also implements the passes as a backend, by multi-tensor calls: :func:`sums` and
:func:`update` have the signatures of those in ``kernels``. The arithmetic between them is on
columns with shape ``(tensors)`` and serves every backend; that of sizes is in
:mod:`steadygrad.formulas.sizes`. The inner products :math:`h = p \cdot g` cost a pass over the
weights. They are needed before the update at size steps only; elsewhere the update takes them
along.

References:
    | Zipformer: A faster and better encoder for automatic speech recognition (Yao et al., 2023)
    | https://arxiv.org/abs/2310.11230
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad.formulas.tensors import Batch, Bucket, decays_of, joined
from steadygrad.numerics import inner_products, may_hold, square_sums, wide

__all__ = [
    "Rule",
    "StepScales",
    "finite",
    "needs_products",
    "step_scales",
    "sums",
    "update",
]

# The second moment is corrected until its correction is this close to one.
CORRECTED_BELOW = 0.99


@dataclass(frozen=True)
class Rule:
    r"""A group's numbers.

    Attributes:
        lr: :math:`\eta`.
        betas: :math:`\beta_1, \beta_2`.
        eps: :math:`\epsilon`.
        scalar_lr_scale: Factor on the learning rate of sizes and of one-element parameters.
        min_rms: :math:`r_{\min}`.
        max_rms: Size that a parameter does not learn to exceed.
        scalar_max: Bound on one-element parameters.
        period: :math:`P`.
        original: Whether the rule is that of 2022, ``stateless7``.
    """

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    scalar_lr_scale: float
    min_rms: float
    max_rms: float
    scalar_max: float
    period: int
    original: bool

    def bounds(self, *, is_scalar: bool) -> tuple[float, float]:
        """Bounds on the sizes of weights before and after the update; infinite: none."""
        bound = self.scalar_max if is_scalar else torch.inf
        return (bound, torch.inf) if self.original else (torch.inf, bound)


def needs_products(step: Tensor, rule: Rule) -> Tensor:
    """Whether a step needs inner products and norms of weights before its update.

    The first step takes the size that the weights have; a size step learns from products.

    Args:
        step: :math:`t` of each parameter, with shape ``(tensors)``.
        rule: The group's numbers.
    """
    return (step == 0) | (step % rule.period == rule.period - 1)


def finite(sums: Tensor, needed: Tensor, dtype: torch.dtype, period: int) -> Tensor:
    """Whether the sums can be used, with shape ``(tensors)``.

    Squares of gradients of sizes are added up over a period, and must not overflow where the others
    do not; and the state may have a smaller range than the weights.

    Args:
        sums: Results of :func:`sums`, over all shards, with shape ``(3, tensors)``.
        needed: Whether products are needed, with shape ``(tensors)``.
        dtype: The state's type.
        period: :math:`P`.
    """
    # A sum of squares is below infinity unless it is infinite or NaN.
    found = sums[0].to(dtype) < torch.inf
    if not may_hold(needed):
        return found
    # Twice the sum: that of a period is rounded.
    squares = (sums[1].square() * (2 * period)).to(dtype)
    products = (squares < torch.inf) & (sums[2] < torch.inf)
    return found & (products | ~needed)


class StepScales(NamedTuple):
    r"""Factors of the update, each with shape ``(tensors)``.

    Attributes:
        taken: Whether the parameter takes the step.
        clip: Factor on the gradient: clipping and direction.
        second_moment: :math:`1 / (1 - \beta_2^{t+1})`, or 1.
        gradient: Factor on the scaled gradient.
        weight: Factor :math:`s` on the weight; None for one-element parameters.
    """

    taken: Tensor
    clip: Tensor
    second_moment: Tensor
    gradient: Tensor
    weight: Tensor | None


def step_scales(
    step: Tensor,
    known: tuple[Tensor, Tensor] | None,
    clip: Tensor,
    taken: Tensor,
    rule: Rule,
) -> StepScales:
    r"""Works out the factors of the update.

    Args:
        step: :math:`t` of each parameter, with shape ``(tensors)`` and in the widest type there is.
        known: Root mean square of each and its size step :math:`s`, both with shape ``(tensors)``;
            None for one-element parameters.
        clip: Factor on the gradients: clipping and direction, with shape ``()``.
        taken: Whether each takes this step, with shape ``(tensors)``.
        rule: The group's numbers.
    """
    remaining = 1 - rule.betas[1] ** (step + 1)
    factor = remaining.reciprocal()
    # In 2022 one-element parameters were corrected without end.
    if known is not None or not rule.original:
        factor = torch.where(remaining < CORRECTED_BELOW, factor, 1.0)
    clip = clip.expand(step.shape)
    if known is None:
        lr = torch.full_like(factor, rule.scalar_lr_scale) * rule.lr
        return StepScales(taken, clip, factor, -lr, None)
    rms, size = known
    return StepScales(taken, clip, factor, -rule.lr * rms.clamp(min=rule.min_rms), size)


def sums(batch: Batch, needed: Tensor) -> Tensor:
    r"""This process's part of the sums before the update, with shape ``(3, tensors)``.

    Args:
        batch: The parameters.
        needed: Whether products are needed, with shape ``(tensors)``.

    Returns:
        Rows for :math:`|g|^2`, :math:`p \cdot g` and :math:`|p|^2`, the latter two of no use
        where they are not needed.
    """
    dtype, parts = wide(batch.weights[0].dtype), []
    read = may_hold(needed)
    for b in batch.buckets:
        grads = b.unscaled()
        squares = square_sums(grads, dtype)
        if read:
            products = inner_products(b.weights, grads, dtype)
            rows = [squares, products, square_sums(b.weights, dtype)]
        else:
            rows = [squares, torch.zeros_like(squares), torch.zeros_like(squares)]
        parts.append((b.places, torch.stack(rows)))
    return joined(batch, parts, 3)


def update(batch: Batch, by: StepScales, rule: Rule) -> Tensor:
    r"""Moves ``v``, ``delta`` and ``p``: the equations above, with two temporaries.

    Args:
        batch: The parameters, with ``v`` and ``delta`` as large states.
        by: The parameters' factors.
        rule: The group's numbers.

    Returns:
        :math:`p \cdot g` with the weights before the update, this process's part, with shape
        ``(tensors)``.
    """
    dtype, parts = wide(batch.weights[0].dtype), []
    for bucket in batch.buckets:
        products = inner_products(bucket.weights, bucket.unscaled(), dtype)
        parts.append((bucket.places, products[None]))
        _update(bucket, by, rule)
    return joined(batch, parts, 1)[0]


def _update(bucket: Bucket, by: StepScales, rule: Rule) -> None:
    (v, delta), (beta1, beta2) = bucket.moments, rule.betas
    dtype = v[0].dtype
    taken, clip, unbias, factor, moves = bucket.pick((*by[:4], by.taken.to(dtype)), dtype)
    # A parameter that skips the step keeps its averages: the decay is 1, and zero is added.
    decay1, decay2 = decays_of(bucket, rule.betas, by.taken)
    g = bucket.sanitized(taken, dtype)
    torch._foreach_mul_(g, clip)
    torch._foreach_mul_(v, decay2)
    torch._foreach_addcmul_(v, g, g, value=1 - beta2)
    d = list(torch._foreach_mul(v, unbias))
    torch._foreach_sqrt_(d)
    torch._foreach_add_(d, rule.eps)
    torch._foreach_div_(g, d)
    del d  # Two temporaries at a time, no more.
    torch._foreach_mul_(g, factor)
    if by.weight is not None:
        _add_size_step(g, bucket, by.weight, dtype)
    torch._foreach_mul_(delta, decay1)
    torch._foreach_add_(delta, g, alpha=1 - beta1)
    del g
    _move_weights(bucket, taken, moves, rule, is_scalar=by.weight is None)


def _add_size_step(moves: list[Tensor], bucket: Bucket, weight: Tensor, dtype: torch.dtype) -> None:
    """Adds the weights, times the size step."""
    used, factors = bucket.pick((weight != 0, weight), dtype)
    # A weight that is not finite must not reach `delta` by way of zero. One element with an axis,
    # for the outcome to have the state's type.
    zero = torch.zeros(1, dtype=dtype, device=weight.device)
    own = [torch.where(c, p, zero) for c, p in zip(used, bucket.weights, strict=True)]
    torch._foreach_addcmul_(moves, own, factors)


def _move_weights(
    bucket: Bucket, taken: list[Tensor], moves: list[Tensor], rule: Rule, *, is_scalar: bool
) -> None:
    """Adds the averages of updates to the weights; one-element ones are bounded."""
    before, after = rule.bounds(is_scalar=is_scalar)
    if before < torch.inf:
        _bound_(bucket.weights, taken, before)
    # Zero times an average that is finite: a step that is not taken leaves the weight as it is.
    torch._foreach_add_(bucket.weights, torch._foreach_mul(bucket.moments[1], moves))
    if after < torch.inf:
        _bound_(bucket.weights, taken, after)


def _bound_(weights: list[Tensor], taken: list[Tensor], bound: float) -> None:
    for p, ok in zip(weights, taken, strict=True):
        p.copy_(torch.where(ok, p.clamp(-bound, bound), p))
