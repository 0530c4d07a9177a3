r"""ScaledAdam on plain local tensors: one pass for sums, one for the update.

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

References:
    | Zipformer: A faster and better encoder for automatic speech recognition (Yao et al., 2023)
    | https://arxiv.org/abs/2310.11230
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steadygrad.formulas.tensors import inner_products, sanitized, select, square_sums, wide

__all__ = [
    "Block",
    "Rule",
    "Sizes",
    "StepScales",
    "parameter_sums",
    "size_step",
    "step_scales",
    "update_",
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
        rms: Root mean square of each as it was last taken, with shape ``(parameters)``.
        mean_square: Running mean square of the gradients of the log sizes, with shape
            ``(parameters)``.
        gradients: The last of these gradients, with shape ``(parameters, period)``.
    """

    rms: Tensor
    mean_square: Tensor
    gradients: Tensor


def parameter_sums(p: Sequence[Tensor], g: Sequence[Tensor]) -> Tensor:
    r"""This process's part of all sums a step needs, with shape ``(3, parameters)``.

    Returns:
        Rows for :math:`|g|^2`, :math:`p \cdot g` and :math:`|p|^2`.
    """
    dtype = wide(p[0].dtype)
    return torch.stack([square_sums(g, dtype), inner_products(p, g, dtype), square_sums(p, dtype)])


def size_step(
    sizes: Sizes, size_gradient: Tensor, rms: Tensor, step: Tensor, ok: Tensor, rule: Rule
) -> tuple[Sizes, Tensor]:
    r"""Learns the sizes.

    .. math::
        q &\leftarrow \beta_2^P q + (1 - \beta_2^P)\, \frac{1}{P} \sum_i h_i^2 \\
        s &= - \eta\, c \sqrt{1 - \beta_2^{P k}}\; \frac{\sum_i h_i}{\sqrt q + \epsilon}

    with :math:`h_i = p \cdot g` the gradients of the log size over the last :math:`P` steps,
    :math:`c` the ``scalar_lr_scale`` and :math:`k` the number of size steps so far.

    Args:
        sizes: What was known.
        size_gradient: :math:`p \cdot g` at this step, with shape ``(parameters)``.
        rms: Root mean square of each parameter at this step, with shape ``(parameters)``.
        step: :math:`t` of each, with shape ``(parameters)``.
        ok: Whether this step is taken, with shape ``()``.
        rule: The group's numbers.

    Returns:
        What is known now, and :math:`s`, with shape ``(parameters)``.
    """
    place = torch.arange(rule.period, device=step.device) == (step % rule.period)[:, None]
    ring = torch.where(place & ok, size_gradient[:, None], sizes.gradients)
    # The first step takes the size that the weights then have.
    turn = place[:, -1] & ok
    # With a period of one the first step is one too many: nothing has been averaged yet.
    due = turn & (step > 0)
    beta = rule.betas[1] ** rule.period
    mean = sizes.mean_square * beta + ring.square().mean(1) * (1 - beta)
    known = Sizes(
        rms=torch.where(turn | (ok & (step == 0)), rms, sizes.rms),
        mean_square=torch.where(due, mean, sizes.mean_square),
        gradients=ring,
    )
    correction = 1 - beta ** ((step + 1) // rule.period).to(torch.float64)
    lr = rule.lr * rule.scalar_lr_scale
    raw = -lr * correction.sqrt().to(mean) * ring.sum(1) / (known.mean_square.sqrt() + rule.eps)
    return known, torch.where(due, _bounded(raw, known.rms, lr, rule), 0.0)


def _bounded(raw: Tensor, rms: Tensor, lr: float | Tensor, rule: Rule) -> Tensor:
    """No smaller where a parameter is too small already, no larger where it is too large."""
    raw = torch.where(rms < rule.min_rms, 0.0, raw)
    if rule.original:
        return torch.where(rms > rule.max_rms, torch.zeros_like(raw) - lr * rule.period, raw)
    raw = raw.clamp(-LARGEST_SIZE_STEP, LARGEST_SIZE_STEP)
    return torch.minimum(raw, (rule.max_rms - rms) / rms)


@dataclass(frozen=True)
class StepScales:
    r"""What multiplies what in the update, each with shape ``(parameters)``.

    Attributes:
        second_moment: :math:`1 / (1 - \beta_2^{t+1})`, or 1.
        gradient: Factor on the scaled gradient.
        weight: Factor :math:`s` on the weight; None for one-element parameters.
    """

    second_moment: Tensor
    gradient: Tensor
    weight: Tensor | None

    def part(self, start: int, end: int) -> "StepScales":
        """Those of some consecutive parameters."""
        weight = None if self.weight is None else self.weight[start:end]
        return StepScales(self.second_moment[start:end], self.gradient[start:end], weight)


def step_scales(step: Tensor, known: tuple[Sizes, Tensor] | None, rule: Rule) -> StepScales:
    """The factors of a step.

    Args:
        step: :math:`t` of each, with shape ``(parameters)``.
        known: What :func:`size_step` returned; None for one-element parameters.
        rule: The group's numbers.
    """
    correction = 1 - rule.betas[1] ** (step + 1).to(torch.float64)
    factor = 1 / correction
    if known is None:
        lr = torch.full_like(factor, rule.scalar_lr_scale) * rule.lr
        if not rule.original:
            factor = torch.where(correction < CORRECTED_BELOW, factor, 1.0)
        return StepScales(factor, -lr, None)
    factor = torch.where(correction < CORRECTED_BELOW, factor, 1.0)
    sizes, size = known
    return StepScales(factor, -rule.lr * sizes.rms.clamp(min=rule.min_rms), size)


@dataclass(frozen=True)
class Block:
    """Some parameters, as this process holds them.

    Attributes:
        p: Weights.
        g: Their gradients, in any floating type.
        v: Second moments, in the state's type.
        delta: Moving averages of updates, in the state's type.
        gradient_scale: Factor on the gradients, with shape ``()``: clipping and loss scale.
        ok: Whether all gradients of the step are finite, with shape ``()``. If not, nothing moves.
    """

    p: Sequence[Tensor]
    g: Sequence[Tensor]
    v: Sequence[Tensor]
    delta: Sequence[Tensor]
    gradient_scale: Tensor
    ok: Tensor


def update_(block: Block, scales: StepScales, rule: Rule) -> None:
    """Moves ``v``, ``delta`` and ``p``: the equations above, with two temporaries.

    Args:
        block: The parameters.
        scales: Their factors, in the block's order.
        rule: The group's numbers.
    """
    dtype = block.v[0].dtype
    (beta1, beta2), v, delta = rule.betas, list(block.v), list(block.delta)
    # A step with a non-finite gradient keeps the averages: they decay by one, and zero is added.
    keep = [select(block.ok, beta, 1.0, dtype) for beta in rule.betas]
    g = sanitized(block.g, block.ok, dtype)
    torch._foreach_mul_(g, block.gradient_scale.to(dtype))
    torch._foreach_mul_(v, keep[1])
    torch._foreach_addcmul_(v, g, g, value=1 - beta2)
    d = list(torch._foreach_mul(v, list(scales.second_moment.to(dtype).unbind())))
    torch._foreach_sqrt_(d)
    torch._foreach_add_(d, rule.eps)
    torch._foreach_div_(g, d)
    del d  # Two temporaries at a time, no more.
    torch._foreach_mul_(g, list(scales.gradient.to(dtype).unbind()))
    if scales.weight is not None:
        bad = ~block.ok
        for update, p, s in zip(g, block.p, scales.weight.to(dtype).unbind(), strict=True):
            # The weight may be what was not finite.
            update.addcmul_(p.to(dtype), s).masked_fill_(bad, 0.0)
    torch._foreach_mul_(delta, keep[0])
    torch._foreach_add_(delta, g, alpha=1 - beta1)
    del g
    if rule.original and scales.weight is None:
        _bound_(block, rule.scalar_max)
    # Zero times an average that is finite: a step that is not taken leaves the weight as it is.
    torch._foreach_add_(list(block.p), torch._foreach_mul(delta, block.ok.to(dtype)))
    if not rule.original and scales.weight is None:
        _bound_(block, rule.scalar_max)


def _bound_(block: Block, bound: float) -> None:
    for p in block.p:
        p.copy_(torch.where(block.ok, p.clamp(-bound, bound), p))
