r"""LANS on plain local tensors, in three passes around two sums over shards.

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

References:
    | Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes (Zheng et al., 2020)
    | https://arxiv.org/abs/2006.13484
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steadygrad.formulas.tensors import sanitized, select, square_sums

__all__ = ["Block", "Coefficients", "apply_", "coefficients", "direction_sums", "update_moments_"]


@dataclass(frozen=True)
class Block:
    r"""Some parameters, as this process holds them.

    Attributes:
        x: Weights, in any floating type.
        g: Their gradients, likewise.
        m: First moments of the normalised gradients, whose type all is computed in.
        v: Second moments.
        inverse_norm: What normalises each gradient, with shape ``()``: one over its norm over all
            shards, zero for a zero norm; negative to maximise.
        corrections: :math:`(1 - \beta_1^t, 1 - \beta_2^t)` of each.
        ok: Whether all gradients of the step are finite, with shape ``()``. If not, nothing moves.
    """

    x: Sequence[Tensor]
    g: Sequence[Tensor]
    m: Sequence[Tensor]
    v: Sequence[Tensor]
    inverse_norm: Sequence[Tensor]
    corrections: Sequence[tuple[Tensor, Tensor]]
    ok: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The state's type."""
        return self.m[0].dtype

    def normalized(self, clip_value: float | None) -> list[Tensor]:
        """The normalised gradients, clipped elementwise."""
        found = sanitized(self.g, self.ok, self.dtype)
        torch._foreach_mul_(found, list(self.inverse_norm))
        if clip_value is not None:
            torch._foreach_clamp_min_(found, -clip_value)
            torch._foreach_clamp_max_(found, clip_value)
        return found

    def denominators(self, eps: float) -> list[Tensor]:
        """:math:`d` of each."""
        found = list(torch._foreach_div(list(self.v), [c2 for _, c2 in self.corrections]))
        torch._foreach_sqrt_(found)
        torch._foreach_add_(found, eps)
        return found


def update_moments_(
    block: Block, *, betas: tuple[float, float], clip_value: float | None = None
) -> None:
    r"""Moves ``m`` and ``v``.

    Args:
        block: The parameters.
        betas: :math:`\beta_1, \beta_2`.
        clip_value: Bound on each element of the normalised gradient; None: no bound.
    """
    beta1, beta2 = betas
    # A step with a non-finite gradient keeps the moments: they decay by one, and zero is added.
    keep = [select(block.ok, beta, 1.0, block.dtype) for beta in betas]
    g = block.normalized(clip_value)
    torch._foreach_mul_(list(block.m), keep[0])
    torch._foreach_add_(list(block.m), g, alpha=1 - beta1)
    torch._foreach_mul_(list(block.v), keep[1])
    torch._foreach_addcmul_(list(block.v), g, g, value=1 - beta2)


def direction_sums(
    block: Block, *, eps: float, weight_decay: float, clip_value: float | None = None
) -> Tensor:
    """Squared norms of this process's parts, with shape ``(3, parameters)``.

    Returns:
        Rows for :math:`x`, :math:`u_m` and :math:`u_g`.
    """
    d = block.denominators(eps)
    u = block.normalized(clip_value)
    torch._foreach_div_(u, d)
    torch._foreach_add_(u, list(block.x), alpha=weight_decay)
    dtype = torch.promote_types(block.dtype, block.x[0].dtype)
    gradient_part = square_sums(u, dtype)
    del u  # Two temporaries at a time, no more.
    torch._foreach_mul_(d, [c1 for c1, _ in block.corrections])
    u = list(torch._foreach_div(list(block.m), d))
    torch._foreach_add_(u, list(block.x), alpha=weight_decay)
    return torch.stack([square_sums(block.x, dtype), square_sums(u, dtype), gradient_part])


@dataclass(frozen=True)
class Coefficients:
    r"""What each direction is multiplied by, with shape ``(parameters)``.

    Attributes:
        momentum: :math:`\eta\, \beta_1\, \phi(\|x\|) / \|u_m\|`.
        gradient: :math:`\eta\, (1 - \beta_1)\, \phi(\|x\|) / \|u_g\|`.
    """

    momentum: Tensor
    gradient: Tensor

    def part(self, start: int, end: int) -> "Coefficients":
        """Those of some consecutive parameters."""
        return Coefficients(self.momentum[start:end], self.gradient[start:end])


def coefficients(
    sums: Tensor,
    ok: Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    bounds: tuple[float | None, float | None] = (None, None),
) -> Coefficients:
    r"""Learning rate times trust ratio of both directions.

    A ratio is 1 where the weight's or the direction's norm is zero.

    Args:
        sums: From :func:`direction_sums`, over all shards, with shape ``(3, parameters)``.
        ok: Whether the step is taken, with shape ``()``.
        lr: :math:`\eta`.
        beta1: :math:`\beta_1`.
        bounds: Least and greatest value of :math:`\phi`; None: no bound.
    """
    x, u_m, u_g = sums.sqrt().unbind()
    if bounds[0] is not None or bounds[1] is not None:
        x = x.clamp(*bounds)
    # Rounded as a product with a plain number is, whatever type a tensor `lr` has.
    scale = (ok.to(sums.dtype) * lr).to(sums.dtype)
    return Coefficients(
        scale * beta1 * trust_ratio(x, u_m), scale * (1 - beta1) * trust_ratio(x, u_g)
    )


def trust_ratio(weight: Tensor, direction: Tensor) -> Tensor:
    """Weight norm over the direction's norm, 1 where either is zero."""
    known = (weight > 0) & (direction > 0)
    return torch.where(known, weight / torch.where(known, direction, 1.0), 1.0)


def apply_(
    block: Block,
    by: Coefficients,
    *,
    eps: float,
    weight_decay: float,
    clip_value: float | None = None,
) -> None:
    """Moves ``x``: the equation's last line, with both directions over one denominator."""
    dtype = block.dtype
    decay = 1 - weight_decay * (by.momentum + by.gradient)
    c_m = [c / c1 for c, (c1, _) in zip(by.momentum.unbind(), block.corrections, strict=True)]
    u = block.normalized(clip_value)
    torch._foreach_mul_(u, list(by.gradient.to(dtype).unbind()))
    for total, m, c in zip(u, block.m, c_m, strict=True):
        total.addcmul_(m, c.to(dtype))
    torch._foreach_div_(u, block.denominators(eps))
    if block.x[0].dtype == dtype:
        torch._foreach_mul_(list(block.x), list(decay.to(dtype).unbind()))
        torch._foreach_sub_(list(block.x), u)
        return
    for x, step, d in zip(block.x, u, decay.unbind(), strict=True):
        # Rounded to the weight's type once, not after each operation.
        work = torch.promote_types(x.dtype, dtype)
        x.copy_(x.to(work).mul_(d.to(work)).sub_(step))
