r"""Learning of sizes in ScaledAdam, on columns with one number for each parameter.

The size :math:`r` of a parameter is its root mean square. Its logarithm is learned once in
``size_update_period`` steps, from the inner products :math:`h = p \cdot g` of these steps, which
are its gradients. See :mod:`steadygrad.formulas.scaled_adam` for the other steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from steadygrad.formulas.scaled_adam import Rule

__all__ = ["Sizes", "remembered", "size_step"]

# How far one size step may go in the current recipe, as a fraction of the size.
LARGEST_SIZE_STEP = 0.1


@dataclass(frozen=True)
class Sizes:
    """Sizes of several parameters, with the averages and gradients that they are learned from.

    Attributes:
        rms: Root mean square of each as it was last taken, with shape ``(tensors)``.
        mean_square: Running mean square of the gradients of the log sizes, with shape
            ``(tensors)``.
        gradients: The last of these gradients, with shape ``(tensors, period)``.
    """

    rms: Tensor
    mean_square: Tensor
    gradients: Tensor


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
        sizes: The sizes before this step.
        size_gradient: :math:`p \cdot g` at this step, with shape ``(tensors)``. It counts at size
            steps only.
        rms: Root mean square of each parameter at this step, with shape ``(tensors)``. It counts
            at the first step and at size steps only.
        step: :math:`t` of each, with shape ``(tensors)``.
        taken: Whether each takes this step, with shape ``(tensors)``.
        rule: The group's numbers.

    Returns:
        The sizes now, still without this step's gradients, and :math:`s`, with shape
        ``(tensors)``.
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
    scale = (1 - beta ** ((step + 1) // rule.period)).sqrt().to(mean)
    # The product of a tensor and a number is rounded to the tensor's type.
    lr = rule.lr.to(mean.dtype) if isinstance(rule.lr, Tensor) else rule.lr
    lr = lr * rule.scalar_lr_scale
    raw = -lr * scale * ring.sum(1) / (known.mean_square.sqrt() + rule.eps)
    return known, torch.where(due, _bounded(raw, known.rms, lr, rule), 0.0)


def remembered(ring: Tensor, size_gradient: Tensor, step: Tensor, taken: Tensor) -> Tensor:
    """The last gradients of the log sizes, with this step's.

    A gradient whose square times twice the period overflows counts as zero: it came with weights
    that have grown since the last size step, which did not need it.

    Args:
        ring: The last ones, with shape ``(tensors, period)``; step ``t`` at ``t mod period``.
        size_gradient: This step's, with shape ``(tensors)``.
        step: :math:`t` of each parameter, with shape ``(tensors)``.
        taken: Whether each takes this step, with shape ``(tensors)``.
    """
    period = ring.shape[1]
    place = torch.arange(period, device=step.device) == (step % period)[:, None]
    usable = torch.where(size_gradient.square() * (2 * period) < torch.inf, size_gradient, 0.0)
    return torch.where(place & taken[:, None], usable[:, None], ring)


def _bounded(raw: Tensor, rms: Tensor, lr: float | Tensor, rule: Rule) -> Tensor:
    """A size step that makes no small parameter smaller, and no large one larger."""
    raw = torch.where(rms < rule.min_rms, 0.0, raw)
    if rule.original:
        return torch.where(rms > rule.max_rms, torch.zeros_like(raw) - lr * rule.period, raw)
    raw = raw.clamp(-LARGEST_SIZE_STEP, LARGEST_SIZE_STEP)
    return torch.minimum(raw, (rule.max_rms - rms) / rms)
