r"""LAMB: the small arithmetic on columns, and its passes by multi-tensor calls.

For each layer (parameter) :math:`x` with gradient :math:`g`, at its step :math:`t`,

.. math::
    m &\leftarrow \beta_1 m + (1 - \beta_1)\, \tilde g \qquad
    v \leftarrow \beta_2 v + (1 - \beta_2)\, \tilde g^2 \\
    u &= \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda x \\
    x &\leftarrow x - \eta\, \frac{\phi(\|x\|)}{\|u\|}\, u

with :math:`\phi` the identity between its bounds. In the paper :math:`\tilde g = g`; NVLAMB divides
all gradients by :math:`\max(1, \|G\| / c)` first, with :math:`\|G\|` the norm over all parameters.
Both norms of a layer are known only after the moments have moved: hence the same passes as in
:mod:`steadygrad.formulas.lans`.

References:
    | Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (You et al., 2020)
    | https://arxiv.org/abs/1904.00962
"""

from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad.formulas.lans import grad_sq_norms, trust_ratio
from steadygrad.formulas.tensors import Batch, Bucket, average, joined, moved_by, sum_type
from steadygrad.numerics import square_sums

__all__ = [
    "Coefficients",
    "Rule",
    "Scales",
    "apply",
    "coefficients",
    "direction_sums",
    "grad_sq_norms",
    "scales",
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
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Scales(NamedTuple):
    r"""Factors of the second pass, each with shape ``(tensors)``.

    Attributes:
        taken: Whether the parameter takes the step.
        gradient: Factor on the gradient.
        unbias1: :math:`1 / (1 - \beta_1^t)`.
        unbias2: :math:`1 / (1 - \beta_2^t)`.
    """

    taken: Tensor
    gradient: Tensor
    unbias1: Tensor
    unbias2: Tensor


class Coefficients(NamedTuple):
    r"""Factors of the last pass, each with shape ``(tensors)``.

    Attributes:
        taken: Whether the parameter takes the step.
        unbias2: As in :class:`Scales`.
        momentum: Factor on :math:`m / (\sqrt{\hat v} + \epsilon)`:
            :math:`\eta\, \phi(\|x\|) / (\|u\| (1 - \beta_1^t))`.
        keep: Factor on the weight.
    """

    taken: Tensor
    unbias2: Tensor
    momentum: Tensor
    keep: Tensor


def scales(gradient_scale: Tensor, step: Tensor, taken: Tensor, rule: Rule) -> Scales:
    """Works out the factors of the second pass.

    Args:
        gradient_scale: Factor on all gradients, with shape ``()``.
        step: Steps that each parameter has taken, this one included, with shape ``(tensors)`` and
            in the widest type there is.
        taken: Whether each takes this step, with shape ``(tensors)``.
        rule: The group's options.
    """
    # A first step that is not taken leaves the count at zero; its corrections go unused.
    t = step.clamp(min=1)
    unbias = ((1 - beta**t).reciprocal() for beta in (rule.beta1, rule.beta2))
    # The norm of a step that is not taken, and so the factor, may be NaN.
    return Scales(taken, torch.where(taken, gradient_scale, 0.0), *unbias)


def coefficients(
    sums: Tensor,
    by: Scales,
    rule: Rule,
    *,
    lr: float | Tensor,
    bounds: tuple[float | None, float | None] = (None, None),
    adapt: bool = True,
) -> Coefficients:
    r"""Works out the factors of the last pass.

    The trust ratio is 1 where the weight's or the direction's norm is zero.

    Args:
        sums: Squared norms of :math:`x` and :math:`u` over all shards, with shape
            ``(2, tensors)``.
        by: Factors of the second pass.
        rule: The group's options.
        lr: :math:`\eta`.
        bounds: Least and greatest value of :math:`\phi`; None: no bound.
        adapt: Whether there is a trust ratio.
    """
    x, u = sums.sqrt().unbind()
    if bounds[0] is not None or bounds[1] is not None:
        x = x.clamp(*bounds)
    ratio = trust_ratio(x, u) if adapt else torch.ones_like(x)
    # Selected, not multiplied by zero: a norm that is not finite must not reach a weight.
    step = torch.where(by.taken, (ratio * lr).to(sums.dtype), 0.0)
    return Coefficients(by.taken, by.unbias2, step * by.unbias1, 1 - rule.weight_decay * step)


def update_moments(batch: Batch, by: Scales, rule: Rule) -> Tensor:
    """Moves the moments, and returns the sums of :func:`direction_sums`."""
    for bucket in batch.buckets:
        _update_moments(bucket, by, rule)
    return direction_sums(batch, by, rule)


def _update_moments(bucket: Bucket, by: Scales, rule: Rule) -> None:
    dtype = bucket.moments[0][0].dtype
    taken, scale = bucket.pick((by.taken, by.gradient), dtype)
    g = bucket.sanitized(taken, dtype)
    torch._foreach_mul_(g, scale)
    average(bucket, g, (rule.beta1, rule.beta2), by.taken)


def direction_sums(batch: Batch, by: Scales, rule: Rule) -> Tensor:
    """Squared norms of this process's :math:`x` and :math:`u`, with shape ``(2, tensors)``."""
    parts = [(b.places, _direction_sums(b, by, rule)) for b in batch.buckets]
    return joined(batch, parts, 2)


def _direction_sums(bucket: Bucket, by: Scales, rule: Rule) -> Tensor:
    x = bucket.weights
    u = _directions(bucket, by.unbias1, by.unbias2, rule.eps)
    torch._foreach_add_(u, x, alpha=rule.weight_decay)
    return square_sums([*x, *u], sum_type(bucket)).view(2, -1)


def apply(batch: Batch, by: Coefficients, rule: Rule) -> None:
    """Moves the weights."""
    for bucket in batch.buckets:
        (keep,) = bucket.pick([by.keep], sum_type(bucket))
        steps = _directions(bucket, by.momentum, by.unbias2, rule.eps)
        moved_by(bucket.weights, keep, steps)
        del steps  # Before the next ones are made.


def _directions(bucket: Bucket, factor: Tensor, unbias2: Tensor, eps: float) -> list[Tensor]:
    r""":math:`m / (\sqrt{\hat v} + \epsilon)` of each, times a factor."""
    m, v = bucket.moments
    factors, unbias = bucket.pick((factor, unbias2), m[0].dtype)
    d = list(torch._foreach_mul(v, unbias))
    torch._foreach_sqrt_(d)
    torch._foreach_add_(d, eps)
    found = list(torch._foreach_mul(m, factors))
    torch._foreach_div_(found, d)
    return found
