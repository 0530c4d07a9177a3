r"""Shares of several losses in one gradient: norms, shares, scales.

Losses :math:`\ell_k` depend on a model's output :math:`y` through gradients
:math:`g_k = \partial \ell_k / \partial y`. The gradient handed on to the model is

.. math:: G = \sum_k s_k\, g_k, \qquad
          s_k = \frac{T}{\epsilon + \langle \lVert g_k \rVert \rangle}\,\frac{w_k}{\sum_j w_j},

with weights :math:`w_k`, a total norm :math:`T`, and a moving average :math:`\langle\cdot\rangle`
over steps. So each loss has the share of the gradient that its weight asks for, whatever its scale.

Norms are made of sums over a batch's items, because only sums can be joined over micro-batches
and processes. With :math:`R` processes whose gradients are averaged, the loss that is minimised is
the mean of theirs, and its gradient has the blocks :math:`g_k^{(r)} / R`: every norm here is the
norm of that joined gradient.

Norms and inner products of float32 and half-precision gradients are taken in float32, because
float64 costs several times as much. So an item's norm (without items, a whole tensor's) is exact
between about 1e-19 and 1.8e19. Beyond, squares leave float32's range: a norm becomes inf, and the
loss is left out as not finite; below, it loses digits and then is zero, and the loss is left out
as such. Sums over items, tensors, micro-batches and processes are float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "balanced_scales",
    "gram",
    "item_norms",
    "norm_sum",
    "norms_from_sums",
    "plain_sum",
    "shares",
    "weighted_sum",
]


def item_norms(gradients: Sequence[Tensor]) -> Tensor:
    r"""The norm of each item's gradient, over all tensors of a nest.

    Args:
        gradients: Gradients of one loss, with shapes ``(B, *)``; the items come first.

    Returns:
        :math:`\lVert g[b] \rVert`, in float32 or wider, with shape ``(B,)``.
    """
    norms = [_norm_of_rows(g) for g in gradients]
    if len(norms) == 1:
        return norms[0]
    joined: Tensor = torch.linalg.vector_norm(torch.stack(norms).double(), dim=0)
    return joined


def _norm_of_rows(gradient: Tensor) -> Tensor:
    wide = _wide(gradient)
    # No dimensions would mean all of them.
    if gradient.ndim == 1:
        return gradient.abs().to(wide)
    dims = tuple(range(1, gradient.ndim))
    norms: Tensor = torch.linalg.vector_norm(gradient, dim=dims, dtype=wide)
    return norms


def norm_sum(gradients: Sequence[Tensor], *, per_item: bool) -> Tensor:
    r"""Norms of one loss's gradients, as they are summed over items, micro-batches and processes.

    Args:
        gradients: Gradients of one loss; with ``per_item`` of shapes ``(B, *)``.
        per_item: Whether items have norms of their own.

    Returns:
        :math:`\sum_b \lVert g[b] \rVert`, or :math:`\lVert g \rVert^2` of the whole, in float64
        with shape ``()``.
    """
    if per_item:
        return item_norms(gradients).sum(dtype=torch.float64)
    norms = [torch.linalg.vector_norm(g, dtype=_wide(g)).double() for g in gradients]
    return torch.stack(norms).square().sum()


def norms_from_sums(
    sums: Tensor, items: Tensor, *, per_item: bool, batch_independent: bool, ranks: int = 1
) -> Tensor:
    r"""Norms of the joined gradient.

    ============ ============================================= ===================================
    per item     :math:`\frac{1}{n} \sum_b \lVert g[b]\rVert`  times :math:`n` if batch-independent
    whole batch  :math:`\lVert g \rVert`                       times :math:`\sqrt n`
    ============ ============================================= ===================================

    A mean over ``n`` items has gradients that shrink with ``n``; the batch-independent norms do
    not, and their scales make the model's gradient a mean over items again.

    Args:
        sums: Results of :func:`norm_sum`, summed over processes, with shape ``(K,)``.
        items: Number of items :math:`n` of all processes, broadcast against ``sums``.
        per_item: As it was for ``sums``.
        batch_independent: Whether the norm is that of one item's loss.
        ranks: Number of processes :math:`R` whose gradients are averaged.

    Returns:
        Norms with shape ``(K,)``; NaN where there are no items.
    """
    if per_item:
        return sums / ranks if batch_independent else sums / (items * ranks)
    norms = sums.sqrt() / ranks
    return norms * items.sqrt() if batch_independent else norms


def shares(amounts: Tensor, active: Tensor) -> Tensor:
    """Each amount over their sum, counting the active ones only.

    Args:
        amounts: Non-negative numbers with shape ``(K,)``.
        active: Which of them count, boolean with shape ``(K,)``.

    Returns:
        Shares with shape ``(K,)``; zero for those that do not count, and for all where the sum
        is zero.
    """
    counted = torch.where(active, amounts, 0.0)
    # Where the sum is zero so is every amount, and its share.
    return torch.nan_to_num(counted / counted.sum(), nan=0.0)


def balanced_scales(averages: Tensor, targets: Tensor, *, total_norm: float, eps: float) -> Tensor:
    r"""The factors :math:`s_k` of the module's equation.

    Args:
        averages: :math:`\langle \lVert g_k \rVert \rangle`, with shape ``(K,)``; anything where
            the target is zero.
        targets: :math:`w_k / \sum_j w_j` as from :func:`shares`, with shape ``(K,)``.
        total_norm: :math:`T`, what the scaled norms sum to on average.
        eps: :math:`\epsilon`; no scale exceeds ``total_norm / eps``.

    Returns:
        Scales with shape ``(K,)``, zero for losses without a target.

    References:
        | High Fidelity Neural Audio Compression (Défossez et al., 2022), section 3.4
        | https://arxiv.org/abs/2210.13438
    """
    return torch.where(targets > 0, targets * total_norm / (eps + averages), 0.0)


def weighted_sum(gradients: Sequence[Tensor | None], scales: Tensor) -> Tensor | None:
    """Sums one tensor's gradients; whatever is not finite counts as zero.

    Half-precision gradients are scaled and summed in float32: their scales can lie outside of
    float16.

    Args:
        gradients: One gradient a loss, of one shape; None counts as zero.
        scales: Factors of the gradients, with shape ``(K,)``.

    Returns:
        The sum in the gradients' type, or None if there is none.
    """
    there = [g for g in gradients if g is not None]
    if not there:
        return None
    factors = scales.to(_wide(there[0])).unbind()
    pairs = [(g, s) for g, s in zip(gradients, factors, strict=True) if g is not None]
    first, factor = pairs[0]
    wide = _wide(first)
    total = _finite(first.to(wide)).mul_(factor)
    scratch = torch.empty_like(total) if len(pairs) > 1 else total
    for gradient, factor in pairs[1:]:
        # Rounded before it is added, as the originals do: gradients that cancel leave zero.
        total.add_(_finite(gradient.to(wide), out=scratch).mul_(factor))
    return total.to(first.dtype)


def plain_sum(gradients: Sequence[Tensor | None], kept: Tensor) -> Tensor | None:
    """Sums one tensor's gradients of the losses that are kept, as they are.

    Other than in :func:`weighted_sum`, what is not finite in a kept one stays: it is the only
    sign there is of an overflow behind the point where the losses part.

    Args:
        gradients: One gradient a loss, of one shape; None counts as zero.
        kept: Which losses are kept, boolean with shape ``(K,)``.

    Returns:
        The sum in the gradients' type, taken in float32 or wider, or None if there is none.
    """
    pairs = zip(gradients, kept.unbind(), strict=True)
    there = [(g, keep) for g, keep in pairs if g is not None]
    if not there:
        return None
    (first, keep), *others = there
    total = torch.where(keep, first.to(_wide(first)), 0.0)
    for gradient, keep in others:
        total.add_(torch.where(keep, gradient, 0.0))
    return total.to(first.dtype)


def _finite(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """A zero factor would leave NaN as it is, and an `if` on it would wait for the device."""
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0, out=out)


def gram(gradients: Sequence[Sequence[Tensor | None] | None]) -> Tensor:
    r"""Inner products of the losses' gradients.

    Args:
        gradients: For each loss its gradients, or None; a missing one counts as zero.

    Returns:
        :math:`\langle g_i, g_j \rangle`, symmetric, in float64 with shape ``(K, K)``.
    """
    device = next(g.device for row in gradients if row for g in row if g is not None)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    count = len(gradients)
    products = [[zero] * count for _ in range(count)]
    for i in range(count):
        for j in range(i + 1):
            products[i][j] = products[j][i] = _inner(gradients[i], gradients[j], zero)
    return torch.stack([entry for row in products for entry in row]).view(count, count)


def _inner(
    left: Sequence[Tensor | None] | None, right: Sequence[Tensor | None] | None, zero: Tensor
) -> Tensor:
    total = zero
    for a, b in zip(left or (), right or (), strict=False):
        if a is not None and b is not None:
            wide = _wide(a)
            total = total + torch.dot(a.to(wide).reshape(-1), b.to(wide).reshape(-1))
    return total


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
