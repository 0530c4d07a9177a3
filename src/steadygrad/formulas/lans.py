r"""LANS: the small arithmetic on columns, and three passes by multi-tensor calls.

For each block (parameter) :math:`x` with gradient :math:`g`, at its step :math:`t`,

.. math::
    \tilde g &= g / \|g\| \\
    m &\leftarrow \beta_1 m + (1 - \beta_1)\, \tilde g \qquad
    v \leftarrow \beta_2 v + (1 - \beta_2)\, \tilde g^2 \\
    d &= \sqrt{v / (1 - \beta_2^t)} + \epsilon \\
    u_m &= \frac{m}{(1 - \beta_1^t)\, d} + \lambda x \qquad
    u_g = \frac{\tilde g}{d} + \lambda x \\
    x &\leftarrow x - \eta\, \phi(\|x\|) \left(
        \frac{\beta_1}{\|u_m\|}\, u_m + \frac{1 - \beta_1}{\|u_g\|}\, u_g \right)

with :math:`\phi` the identity between its bounds. :math:`\|g\|` must be known before the moments
move, :math:`\|u_m\|` and :math:`\|u_g\|` only after: hence two sums, and :math:`\|x\|` rides along
with the second. Nothing but the moments is kept between the passes: recomputing
:math:`\tilde g` and :math:`d` costs less memory traffic than storing them, and needs two
temporaries instead of as many as there are parameters.

This module also implements the passes as a backend, by multi-tensor calls: :func:`grad_sq_norms`,
:func:`update_moments` and :func:`apply` have the signatures of those in ``kernels``. The arithmetic
between them is on columns with shape ``(tensors)`` and serves every backend.

References:
    | Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes (Zheng et al., 2020)
    | https://arxiv.org/abs/2006.13484
"""

from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad.formulas.tensors import Batch, Bucket, average, joined, moved_by, sum_type
from steadygrad.numerics import square_sums, wide

__all__ = [
    "Coefficients",
    "Normalizers",
    "Rule",
    "apply",
    "coefficients",
    "direction_sums",
    "grad_sq_norms",
    "normalizers",
    "pattern_sums",
    "trust_ratio",
    "update_moments",
]


class Rule(NamedTuple):
    r"""Options of a group that all its parameters share.

    Attributes:
        beta1: :math:`\beta_1`.
        beta2: :math:`\beta_2`.
        eps: :math:`\epsilon`.
        weight_decay: :math:`\lambda`.
        clip_value: Bound on each element of a normalised gradient; infinite: none.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_value: float


class Normalizers(NamedTuple):
    r"""Factors of the second pass, each with shape ``(tensors)``.

    Attributes:
        taken: Whether the parameter takes the step.
        inverse_norm: :math:`1 / \|g\|`, zero for a zero norm, negative to maximise.
        unbias1: :math:`1 / (1 - \beta_1^t)`.
        unbias2: :math:`1 / (1 - \beta_2^t)`.
    """

    taken: Tensor
    inverse_norm: Tensor
    unbias1: Tensor
    unbias2: Tensor


class Coefficients(NamedTuple):
    r"""Factors of the last pass, each with shape ``(tensors)``.

    Attributes:
        taken: Whether the parameter takes the step.
        inverse_norm: As in :class:`Normalizers`.
        unbias2: As there.
        momentum: Factor on :math:`m / d`:
            :math:`\eta\, \beta_1\, \phi(\|x\|) / (\|u_m\| (1 - \beta_1^t))`.
        gradient: Factor on :math:`\tilde g / d`:
            :math:`\eta\, (1 - \beta_1)\, \phi(\|x\|) / \|u_g\|`.
        keep: Factor on the weight: one less the weight decay of both directions.
    """

    taken: Tensor
    inverse_norm: Tensor
    unbias2: Tensor
    momentum: Tensor
    gradient: Tensor
    keep: Tensor


def normalizers(
    sq_norms: Tensor, step: Tensor, taken: Tensor, rule: Rule, *, maximize: bool
) -> Normalizers:
    """Works out the factors of the second pass.

    Args:
        sq_norms: Squared norms of the gradients over all shards, with shape ``(tensors)``.
        step: Steps that each parameter has taken, this one included, with shape ``(tensors)`` and
            in the widest type there is.
        taken: Whether each takes this step, with shape ``(tensors)``.
        rule: The group's options.
        maximize: Whether to go up instead of down.
    """
    # A first step that is not taken leaves the count at zero; its corrections go unused.
    t = step.clamp(min=1)
    inverse = torch.where(sq_norms > 0, sq_norms.rsqrt(), 0.0)
    return Normalizers(
        taken,
        -inverse if maximize else inverse,
        (1 - rule.beta1**t).reciprocal(),
        (1 - rule.beta2**t).reciprocal(),
    )


def coefficients(
    sums: Tensor,
    by: Normalizers,
    rule: Rule,
    *,
    lr: float | Tensor,
    bounds: tuple[float | None, float | None] = (None, None),
) -> Coefficients:
    r"""Works out the factors of the last pass: learning rate times trust ratio.

    A ratio is 1 where the weight's or the direction's norm is zero.

    Args:
        sums: Squared norms of :math:`x, u_m, u_g` over all shards, with shape ``(3, tensors)``.
        by: Factors of the second pass.
        rule: The group's options.
        lr: :math:`\eta`.
        bounds: Least and greatest value of :math:`\phi`; None: no bound.
    """
    x, directions = sums.sqrt().split((1, 2))
    if bounds[0] is not None or bounds[1] is not None:
        x = x.clamp(*bounds)
    # Rounded as a product with a plain number is, whatever type a tensor `lr` has.
    scale = (torch.ones_like(x[0]) * lr).to(sums.dtype)
    shares = torch.stack([scale * rule.beta1, scale * (1 - rule.beta1)])
    # Selected, not multiplied by zero: a norm that is not finite must not reach a weight.
    momentum, gradient = torch.where(by.taken, shares * trust_ratio(x, directions), 0.0).unbind()
    return Coefficients(
        by.taken,
        by.inverse_norm,
        by.unbias2,
        momentum * by.unbias1,
        gradient,
        1 - rule.weight_decay * (momentum + gradient),
    )


def trust_ratio(weight: Tensor, direction: Tensor) -> Tensor:
    """Weight norm over the direction's, 1 where either is zero or the weight's is past its type."""
    ratio = weight / direction
    return torch.where((weight > 0) & (ratio < torch.inf), ratio, 1.0)


def grad_sq_norms(batch: Batch) -> Tensor:
    """Squared norms of this process's gradients, with shape ``(1, tensors)``."""
    dtype = wide(batch.weights[0].dtype)
    parts = [(b.places, square_sums(b.unscaled(), dtype)[None]) for b in batch.buckets]
    return joined(batch, parts, 1)


def update_moments(batch: Batch, by: Normalizers, rule: Rule) -> Tensor:
    """Moves the moments, and returns the sums of :func:`direction_sums`."""
    for bucket in batch.buckets:
        _update_moments(bucket, by, rule)
    return direction_sums(batch, by, rule)


def _update_moments(bucket: Bucket, by: Normalizers, rule: Rule) -> None:
    g = _normalized(bucket, by, rule.clip_value)
    average(bucket, g, (rule.beta1, rule.beta2), by.taken)


def direction_sums(batch: Batch, by: Normalizers, rule: Rule) -> Tensor:
    """Squared norms of this process's :math:`x, u_m, u_g`, with shape ``(3, tensors)``."""
    parts = [(b.places, _direction_sums(b, by, rule)) for b in batch.buckets]
    return joined(batch, parts, 3)


def _direction_sums(bucket: Bucket, by: Normalizers, rule: Rule) -> Tensor:
    m, x = bucket.moments[0], bucket.weights
    unbias1, unbias2 = bucket.pick((by.unbias1, by.unbias2), m[0].dtype)
    d = _denominators(bucket, unbias2, rule.eps)
    u = _normalized(bucket, by, rule.clip_value)
    torch._foreach_div_(u, d)
    torch._foreach_add_(u, x, alpha=rule.weight_decay)
    dtype = sum_type(bucket)
    gradient_part = square_sums(u, dtype)
    del u  # Two temporaries at a time, no more.
    u = list(torch._foreach_mul(m, unbias1))
    torch._foreach_div_(u, d)
    del d
    torch._foreach_add_(u, x, alpha=rule.weight_decay)
    both = square_sums([*x, *u], dtype).view(2, -1)
    return torch.cat([both, gradient_part[None]])


def pattern_sums(batch: Batch, by: Normalizers, rule: Rule) -> Tensor:
    """Squared norms of normalised gradients over their second moments' roots, for reports.

    Returns:
        This process's part, with shape ``(tensors)``.
    """
    parts = []
    for bucket in batch.buckets:
        u, dtype = _normalized(bucket, by, torch.inf), bucket.moments[0][0].dtype
        (unbias2,) = bucket.pick([by.unbias2], dtype)
        torch._foreach_div_(u, _denominators(bucket, unbias2, rule.eps))
        parts.append((bucket.places, square_sums(u, dtype)[None]))
    return joined(batch, parts, 1)[0]


def apply(batch: Batch, by: Coefficients, rule: Rule) -> None:
    """Moves the weights: the equation's last line, with both directions over one denominator."""
    for bucket in batch.buckets:
        _apply(bucket, by, rule)


def _apply(bucket: Bucket, by: Coefficients, rule: Rule) -> None:
    m, dtype = bucket.moments[0], bucket.moments[0][0].dtype
    u = _normalized(bucket, by, rule.clip_value)
    unbias2, momentum, gradient = bucket.pick((by.unbias2, by.momentum, by.gradient), dtype)
    (keep,) = bucket.pick([by.keep], sum_type(bucket))
    torch._foreach_mul_(u, gradient)
    for total, own, factor in zip(u, m, momentum, strict=True):
        total.addcmul_(own, factor)
    torch._foreach_div_(u, _denominators(bucket, unbias2, rule.eps))
    moved_by(bucket.weights, keep, u)


def _normalized(bucket: Bucket, by: Normalizers | Coefficients, clip_value: float) -> list[Tensor]:
    """The normalised gradients, clipped elementwise."""
    dtype = bucket.moments[0][0].dtype
    taken, inverse = bucket.pick((by.taken, by.inverse_norm), dtype)
    found = bucket.sanitized(taken, dtype)
    torch._foreach_mul_(found, inverse)
    if clip_value != torch.inf:
        torch._foreach_clamp_min_(found, -clip_value)
        torch._foreach_clamp_max_(found, clip_value)
    return found


def _denominators(bucket: Bucket, unbias2: list[Tensor], eps: float) -> list[Tensor]:
    """:math:`d` of each."""
    found = list(torch._foreach_mul(bucket.moments[1], unbias2))
    torch._foreach_sqrt_(found)
    torch._foreach_add_(found, eps)
    return found
