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

The passes stand here once more as a backend: :func:`grad_sq_norms`, :func:`update_moments` and
:func:`apply` have the signatures of those in ``kernels``. What is worked out between them is on
columns with shape ``(tensors)`` and serves every backend.

References:
    | Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes (Zheng et al., 2020)
    | https://arxiv.org/abs/2006.13484
"""

from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad.formulas.tensors import (
    Batch,
    Bucket,
    buckets_of,
    correction,
    joined,
    sanitized,
    square_sums,
    wide,
)

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
        step: Steps that each parameter has taken, this one included, with shape ``(tensors)``.
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
        1 / correction(rule.beta1, t),
        1 / correction(rule.beta2, t),
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
    x, u_m, u_g = sums.sqrt().unbind()
    if bounds[0] is not None or bounds[1] is not None:
        x = x.clamp(*bounds)
    # Rounded as a product with a plain number is, whatever type a tensor `lr` has.
    scale = (torch.ones_like(x) * lr).to(sums.dtype)
    # Selected, not multiplied by zero: a norm that is not finite must not reach a weight.
    momentum, gradient = (
        torch.where(by.taken, scale * share * trust_ratio(x, u), 0.0)
        for share, u in ((rule.beta1, u_m), (1 - rule.beta1, u_g))
    )
    return Coefficients(
        by.taken,
        by.inverse_norm,
        by.unbias2,
        momentum * by.unbias1,
        gradient,
        1 - rule.weight_decay * (momentum + gradient),
    )


def trust_ratio(weight: Tensor, direction: Tensor) -> Tensor:
    """Weight norm over the direction's norm, 1 where either is zero."""
    known = (weight > 0) & (direction > 0)
    return torch.where(known, weight / torch.where(known, direction, 1.0), 1.0)


def grad_sq_norms(batch: Batch) -> Tensor:
    """Squared norms of this process's gradients, with shape ``(1, tensors)``."""
    dtype = wide(batch.weights[0].dtype)
    parts = [(b.places, square_sums(b.grads, dtype)[None]) for b in buckets_of(batch)]
    return joined(batch, parts, 1)


def update_moments(batch: Batch, by: Normalizers, rule: Rule) -> Tensor:
    """Moves the moments; what :func:`direction_sums` returns."""
    for bucket in buckets_of(batch):
        m, v = bucket.moments
        g = _normalized(bucket, by, rule.clip_value)
        # Who does not take the step keeps its moments: they decay by one, and zero is added.
        # Of two plain numbers torch would make float32.
        one = torch.ones_like(by.unbias1)
        keep = (torch.where(by.taken, beta, one).to(m[0].dtype) for beta in rule[:2])
        keep1, keep2 = (bucket.scalars(column) for column in keep)
        torch._foreach_mul_(m, keep1)
        torch._foreach_add_(m, g, alpha=1 - rule.beta1)
        torch._foreach_mul_(v, keep2)
        torch._foreach_addcmul_(v, g, g, value=1 - rule.beta2)
    return direction_sums(batch, by, rule)


def direction_sums(batch: Batch, by: Normalizers, rule: Rule) -> Tensor:
    """Squared norms of this process's :math:`x, u_m, u_g`, with shape ``(3, tensors)``."""
    parts = [(b.places, _direction_sums(b, by, rule)) for b in buckets_of(batch)]
    return joined(batch, parts, 3)


def _direction_sums(bucket: Bucket, by: Normalizers, rule: Rule) -> Tensor:
    m, x = bucket.moments[0], bucket.weights
    d = _denominators(bucket, by.unbias2, rule.eps)
    u = _normalized(bucket, by, rule.clip_value)
    torch._foreach_div_(u, d)
    torch._foreach_add_(u, x, alpha=rule.weight_decay)
    dtype = torch.promote_types(m[0].dtype, x[0].dtype)
    gradient_part = square_sums(u, dtype)
    del u  # Two temporaries at a time, no more.
    u = list(torch._foreach_mul(m, bucket.scalars(by.unbias1.to(m[0].dtype))))
    torch._foreach_div_(u, d)
    del d
    torch._foreach_add_(u, x, alpha=rule.weight_decay)
    return torch.stack([square_sums(x, dtype), square_sums(u, dtype), gradient_part])


def pattern_sums(batch: Batch, by: Normalizers, rule: Rule) -> Tensor:
    """Squared norms of normalised gradients over their second moments' roots, for reports.

    Returns:
        This process's part, with shape ``(tensors)``.
    """
    parts = []
    for bucket in buckets_of(batch):
        u = _normalized(bucket, by, torch.inf)
        torch._foreach_div_(u, _denominators(bucket, by.unbias2, rule.eps))
        parts.append((bucket.places, square_sums(u, bucket.moments[0][0].dtype)[None]))
    return joined(batch, parts, 1)[0]


def apply(batch: Batch, by: Coefficients, rule: Rule) -> None:
    """Moves the weights: the equation's last line, with both directions over one denominator."""
    for bucket in buckets_of(batch):
        x, (m, _) = bucket.weights, bucket.moments
        dtype = m[0].dtype
        u = _normalized(bucket, by, rule.clip_value)
        torch._foreach_mul_(u, bucket.scalars(by.gradient.to(dtype)))
        for total, own, factor in zip(u, m, bucket.scalars(by.momentum.to(dtype)), strict=True):
            total.addcmul_(own, factor)
        torch._foreach_div_(u, _denominators(bucket, by.unbias2, rule.eps))
        if x[0].dtype == dtype:
            torch._foreach_mul_(x, bucket.scalars(by.keep.to(dtype)))
            torch._foreach_sub_(x, u)
            continue
        for own, step, keep in zip(x, u, bucket.scalars(by.keep), strict=True):
            # Rounded to the weight's type once, not after each operation.
            work = torch.promote_types(own.dtype, dtype)
            own.copy_(own.to(work).mul_(keep.to(work)).sub_(step))


def _normalized(
    bucket: Bucket, by: Normalizers | Coefficients, clip_value: float
) -> list[Tensor]:
    """The normalised gradients, clipped elementwise."""
    dtype = bucket.moments[0][0].dtype
    found = sanitized(bucket.grads, bucket.scalars(by.taken), dtype)
    torch._foreach_mul_(found, bucket.scalars(by.inverse_norm.to(dtype)))
    if clip_value != torch.inf:
        torch._foreach_clamp_min_(found, -clip_value)
        torch._foreach_clamp_max_(found, clip_value)
    return found


def _denominators(bucket: Bucket, unbias2: Tensor, eps: float) -> list[Tensor]:
    """:math:`d` of each."""
    v = bucket.moments[1]
    found = list(torch._foreach_mul(v, bucket.scalars(unbias2.to(v[0].dtype))))
    torch._foreach_sqrt_(found)
    torch._foreach_add_(found, eps)
    return found
