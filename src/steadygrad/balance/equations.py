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

from steadygrad.numerics import wide

__all__ = ["balanced_scales", "gram", "norm_sum", "norms_from_sums", "shares", "weighted_sum"]


def norm_sum(gradients: Sequence[Tensor], *, per_item: bool) -> Tensor:
    r"""Norms of one loss's gradients, as they are summed over items, micro-batches and processes.

    Args:
        gradients: Gradients of one loss; with ``per_item`` of shapes ``(B, *)``, items first.
        per_item: Whether items have norms of their own.

    Returns:
        :math:`\sum_b \lVert g[b] \rVert`, or :math:`\lVert g \rVert^2` of the whole, in float64
        with shape ``()``.
    """
    if not per_item:
        norms = [torch.linalg.vector_norm(g, dtype=wide(g.dtype)).double() for g in gradients]
        return torch.stack(norms).square().sum()
    norms = [_norms_of_items(g) for g in gradients]
    if len(norms) > 1:
        norms = [torch.linalg.vector_norm(torch.stack(norms).double(), dim=0)]
    total: Tensor = norms[0].sum(dtype=torch.float64)
    return total


def _norms_of_items(gradient: Tensor) -> Tensor:
    # No dimensions would mean all of them.
    if gradient.ndim == 1:
        return gradient.abs().to(wide(gradient.dtype))
    dims = tuple(range(1, gradient.ndim))
    norms: Tensor = torch.linalg.vector_norm(gradient, dim=dims, dtype=wide(gradient.dtype))
    return norms


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
    pairs = [(g, s) for g, s in zip(gradients, scales.unbind(), strict=True) if g is not None]
    if not pairs:
        return None
    first = pairs[0][0]
    dtype = wide(first.dtype)
    total = _finite(first.to(dtype)).mul_(pairs[0][1].to(dtype))
    scratch = torch.empty_like(total) if len(pairs) > 1 else total
    for gradient, scale in pairs[1:]:
        # Rounded before it is added, as the originals do: gradients that cancel leave zero.
        total.add_(_finite(gradient.to(dtype), out=scratch).mul_(scale.to(dtype)))
    return total.to(first.dtype)


def _finite(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """A zero factor would leave NaN as it is, and an `if` on it would wait for the device."""
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0, out=out)


def gram(gradients: Sequence[Sequence[Tensor | None]]) -> Tensor:
    r"""Inner products of the losses' gradients.

    Args:
        gradients: For each loss its gradients of the outputs; None and an empty row count as zero.

    Returns:
        :math:`\langle g_i, g_j \rangle`, symmetric, in float64 with shape ``(K, K)``.
    """
    device = next(g.device for row in gradients for g in row if g is not None)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    products = [[zero] * len(gradients) for _ in gradients]
    for i, row in enumerate(gradients):
        for j, other in enumerate(gradients[: i + 1]):
            for a, b in zip(row, other, strict=False):
                if a is not None and b is not None:
                    a, b = (x.to(wide(x.dtype)).reshape(-1) for x in (a, b))
                    products[i][j] = products[i][j] + torch.dot(a, b)
            products[j][i] = products[i][j]
    return torch.stack([torch.stack(line) for line in products])
