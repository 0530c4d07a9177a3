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

The passes :func:`sums` and :func:`update` stand here once more as a backend, with the signatures of
those in ``kernels``. What is worked out between them is on columns with shape ``(tensors)`` and
serves every backend. The inner products :math:`h = p \cdot g` cost a pass over the weights. They
are needed before the update at size steps only; elsewhere the update takes them along.

References:
    | Zipformer: A faster and better encoder for automatic speech recognition (Yao et al., 2023)
    | https://arxiv.org/abs/2310.11230
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad.formulas.tensors import (
    Batch,
    Bucket,
    buckets_of,
    correction,
    inner_products,
    joined,
    sanitized,
    square_sums,
    wide,
)

__all__ = [
    "Rule",
    "Sizes",
    "StepScales",
    "finite",
    "needs_products",
    "remembered",
    "size_step",
    "step_scales",
    "sums",
    "update",
]

# How far one size step may go in the current recipe, as a fraction of the size.
LARGEST_SIZE_STEP = 0.1
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


@dataclass(frozen=True)
class Sizes:
    """What is known of the sizes of several parameters.

    Attributes:
        rms: Root mean square of each as it was last taken, with shape ``(tensors)``.
        mean_square: Running mean square of the gradients of the log sizes, with shape
            ``(tensors)``.
        gradients: The last of these gradients, with shape ``(tensors, period)``.
    """

    rms: Tensor
    mean_square: Tensor
    gradients: Tensor


def needs_products(step: Tensor, rule: Rule) -> Tensor:
    """Whether a step needs inner products and norms of weights before its update.

    The first step takes the size that the weights have; a size step learns from products.

    Args:
        step: :math:`t` of each parameter, with shape ``(tensors)``.
        rule: The group's numbers.
    """
    return (step == 0) | (step % rule.period == rule.period - 1)


def finite(sums: Tensor, needed: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether the sums can be used, with shape ``(tensors)``.

    Gradients of sizes are squared, and must not overflow where the others do not; and the state
    may have a smaller range than the weights.

    Args:
        sums: What :func:`sums` returned, over all shards, with shape ``(3, tensors)``.
        needed: Whether products are needed, with shape ``(tensors)``.
        dtype: The state's type.
    """
    products = torch.isfinite(sums[1].square().to(dtype)) & torch.isfinite(sums[2])
    return torch.isfinite(sums[0].to(dtype)) & (products | ~needed)


def size_step(
    sizes: Sizes, size_gradient: Tensor, rms: Tensor, step: Tensor, taken: Tensor, rule: Rule
) -> tuple[Sizes, Tensor]:
    r"""Learns the sizes.

    .. math::
        q &\leftarrow \beta_2^P q + (1 - \beta_2^P)\, \frac{1}{P} \sum_i h_i^2 \\
        s &= - \eta\, c \sqrt{1 - \beta_2^{P k}}\; \frac{\sum_i h_i}{\sqrt q + \epsilon}

    with :math:`h_i = p \cdot g` the gradients of the log size over the last :math:`P` steps,
    :math:`c` the ``scalar_lr_scale`` and :math:`k` the number of size steps so far.

    Args:
        sizes: What was known.
        size_gradient: :math:`p \cdot g` at this step, with shape ``(tensors)``. It counts at size
            steps only.
        rms: Root mean square of each parameter at this step, with shape ``(tensors)``. It counts
            at the first step and at size steps only.
        step: :math:`t` of each, with shape ``(tensors)``.
        taken: Whether each takes this step, with shape ``(tensors)``.
        rule: The group's numbers.

    Returns:
        What is known now, but for this step's gradients, and :math:`s`, with shape ``(tensors)``.
    """
    turn = (step % rule.period == rule.period - 1) & taken
    ring = remembered(sizes.gradients, size_gradient, step, turn)
    # The first step takes the size that the weights then have. With a period of one it is a size
    # step too many: nothing has been averaged yet.
    due = turn & (step > 0)
    beta = rule.betas[1] ** rule.period
    mean = sizes.mean_square * beta + ring.square().mean(1) * (1 - beta)
    known = Sizes(
        rms=torch.where(turn | (taken & (step == 0)), rms, sizes.rms),
        mean_square=torch.where(due, mean, sizes.mean_square),
        gradients=sizes.gradients,
    )
    scale = correction(beta, (step + 1) // rule.period).sqrt().to(mean)
    lr = rule.lr * rule.scalar_lr_scale
    raw = -lr * scale * ring.sum(1) / (known.mean_square.sqrt() + rule.eps)
    return known, torch.where(due, _bounded(raw, known.rms, lr, rule), 0.0)


def remembered(ring: Tensor, size_gradient: Tensor, step: Tensor, taken: Tensor) -> Tensor:
    """The last gradients of the log sizes, with this step's.

    A gradient whose square overflows counts as zero: it came with weights that have grown since
    the last size step, which did not need it.

    Args:
        ring: The last ones, with shape ``(tensors, period)``; step ``t`` at ``t mod period``.
        size_gradient: This step's, with shape ``(tensors)``.
        step: :math:`t` of each parameter, with shape ``(tensors)``.
        taken: Whether each takes this step, with shape ``(tensors)``.
    """
    period = ring.shape[1]
    place = torch.arange(period, device=step.device) == (step % period)[:, None]
    usable = torch.where(size_gradient.square().isfinite(), size_gradient, 0.0)
    return torch.where(place & taken[:, None], usable[:, None], ring)


def _bounded(raw: Tensor, rms: Tensor, lr: float | Tensor, rule: Rule) -> Tensor:
    """No smaller where a parameter is too small already, no larger where it is too large."""
    raw = torch.where(rms < rule.min_rms, 0.0, raw)
    if rule.original:
        return torch.where(rms > rule.max_rms, torch.zeros_like(raw) - lr * rule.period, raw)
    raw = raw.clamp(-LARGEST_SIZE_STEP, LARGEST_SIZE_STEP)
    return torch.minimum(raw, (rule.max_rms - rms) / rms)


class StepScales(NamedTuple):
    r"""Factors of the update, each with shape ``(tensors)``.

    Attributes:
        taken: Whether the parameter takes the step.
        unscale: Factor on the gradient: clipping, loss scale and direction.
        second_moment: :math:`1 / (1 - \beta_2^{t+1})`, or 1.
        gradient: Factor on the scaled gradient.
        weight: Factor :math:`s` on the weight; None for one-element parameters.
    """

    taken: Tensor
    unscale: Tensor
    second_moment: Tensor
    gradient: Tensor
    weight: Tensor | None


def step_scales(
    step: Tensor,
    known: tuple[Sizes, Tensor] | None,
    unscale: Tensor,
    taken: Tensor,
    rule: Rule,
) -> StepScales:
    """Works out the factors of the update.

    Args:
        step: :math:`t` of each parameter, with shape ``(tensors)``.
        known: What :func:`size_step` returned; None for one-element parameters.
        unscale: Factor on the gradients, with shape ``()``.
        taken: Whether each takes this step, with shape ``(tensors)``.
        rule: The group's numbers.
    """
    remaining = correction(rule.betas[1], step + 1)
    factor = 1 / remaining
    # In 2022 one-element parameters were corrected without end.
    if known is not None or not rule.original:
        factor = torch.where(remaining < CORRECTED_BELOW, factor, 1.0)
    unscale = unscale.expand(step.shape)
    if known is None:
        lr = torch.full_like(factor, rule.scalar_lr_scale) * rule.lr
        return StepScales(taken, unscale, factor, -lr, None)
    sizes, size = known
    return StepScales(taken, unscale, factor, -rule.lr * sizes.rms.clamp(min=rule.min_rms), size)


def sums(batch: Batch, needed: Tensor | None) -> Tensor:
    r"""This process's part of the sums before the update, with shape ``(3, tensors)``.

    Args:
        batch: The parameters.
        needed: Whether products are needed, with shape ``(tensors)``; None: of all of them.

    Returns:
        Rows for :math:`|g|^2`, :math:`p \cdot g` and :math:`|p|^2`, the latter two of no use
        where they are not needed.
    """
    dtype, parts = wide(batch.weights[0].dtype), []
    read = needed is None or _on_device(needed) or bool(needed.numpy().any())
    for b in buckets_of(batch):
        squares = square_sums(b.grads, dtype)
        if read:
            products = inner_products(b.weights, b.grads, dtype)
            rows = [squares, products, square_sums(b.weights, dtype)]
        else:
            rows = [squares, torch.zeros_like(squares), torch.zeros_like(squares)]
        parts.append((b.places, torch.stack(rows)))
    return joined(batch, parts, 3)


def _on_device(column: Tensor) -> bool:
    """Whether the host would wait for a look at a column."""
    return torch.compiler.is_compiling() or column.device.type != "cpu"


def update(batch: Batch, by: StepScales, rule: Rule) -> Tensor:
    r"""Moves ``v``, ``delta`` and ``p``: the equations above, with two temporaries.

    Args:
        batch: The parameters, with ``v`` and ``delta`` as large states.
        by: Their factors.
        rule: The group's numbers.

    Returns:
        :math:`p \cdot g` with the weights before the update, this process's part, with shape
        ``(tensors)``.
    """
    dtype, parts = wide(batch.weights[0].dtype), []
    for bucket in buckets_of(batch):
        parts.append((bucket.places, inner_products(bucket.weights, bucket.grads, dtype)[None]))
        _update(bucket, by, rule)
    return joined(batch, parts, 1)[0]


def _update(bucket: Bucket, by: StepScales, rule: Rule) -> None:
    (v, delta), (beta1, beta2) = bucket.moments, rule.betas
    dtype = v[0].dtype
    taken = bucket.scalars(by.taken)
    # Who does not take the step keeps its averages: they decay by one, and zero is added.
    # Of two plain numbers torch would make float32.
    one = torch.ones_like(by.second_moment)
    columns = (torch.where(by.taken, beta, one).to(dtype) for beta in rule.betas)
    keep1, keep2 = (bucket.scalars(column) for column in columns)
    g = sanitized(bucket.grads, taken, dtype)
    torch._foreach_mul_(g, bucket.scalars(by.unscale.to(dtype)))
    torch._foreach_mul_(v, keep2)
    torch._foreach_addcmul_(v, g, g, value=1 - beta2)
    d = list(torch._foreach_mul(v, bucket.scalars(by.second_moment.to(dtype))))
    torch._foreach_sqrt_(d)
    torch._foreach_add_(d, rule.eps)
    torch._foreach_div_(g, d)
    del d  # Two temporaries at a time, no more.
    torch._foreach_mul_(g, bucket.scalars(by.gradient.to(dtype)))
    if by.weight is not None:
        for move, p, s in zip(g, bucket.weights, bucket.scalars(by.weight.to(dtype)), strict=True):
            # A weight that is not finite must not reach `delta` by way of zero.
            move.add_(p.to(dtype, copy=True).mul_(s).masked_fill_(s == 0, 0.0))
    torch._foreach_mul_(delta, keep1)
    torch._foreach_add_(delta, g, alpha=1 - beta1)
    del g
    _move_weights(bucket, delta, taken, rule, by.weight is None)


def _move_weights(
    bucket: Bucket, delta: list[Tensor], taken: list[Tensor], rule: Rule, is_scalar: bool
) -> None:
    """Adds the averages of updates to the weights; one-element ones are bounded."""
    dtype = delta[0].dtype
    if is_scalar and rule.original:
        _bound_(bucket.weights, taken, rule.scalar_max)
    # Zero times an average that is finite: a step that is not taken leaves the weight as it is.
    moves = torch._foreach_mul(delta, [ok.to(dtype) for ok in taken])
    torch._foreach_add_(bucket.weights, moves)
    if is_scalar and not rule.original:
        _bound_(bucket.weights, taken, rule.scalar_max)


def _bound_(weights: list[Tensor], taken: list[Tensor], bound: float) -> None:
    for p, ok in zip(weights, taken, strict=True):
        p.copy_(torch.where(ok, p.clamp(-bound, bound), p))
