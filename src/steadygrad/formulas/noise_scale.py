r"""Unbiased estimates of gradient signal and noise, and of the noise scale.

One equation carries every estimator here. Let :math:`g_j` be the mean gradient over :math:`n_j`
independent samples, and :math:`\bar g = \sum_j w_j g_j` with :math:`\sum_j w_j = 1`. Then

.. math::
    \mathbb E \sum_j w_j |g_j|^2 = |G|^2 + \mathrm{tr}(\Sigma) \sum_j w_j / n_j, \qquad
    \mathbb E\,|\bar g|^2        = |G|^2 + \mathrm{tr}(\Sigma) \sum_j w_j^2 / n_j,

two equations for the two unknowns, whatever the parts are: halves of a batch, micro-batches of
equal or unequal size, ranks, single examples (:math:`n_j = 1`), or all of them together.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad._checks import InputError

__all__ = [
    "SignalNoise",
    "from_halves",
    "from_nested",
    "from_part_sums",
    "from_parts",
    "unbias_deviation",
]


class SignalNoise(NamedTuple):
    r"""Estimates of one measurement.

    Attributes:
        signal: Squared norm of the true gradient, :math:`|G|^2`; may be negative.
        noise: Trace of the covariance of one sample's gradient, :math:`\mathrm{tr}(\Sigma)`.
    """

    signal: Tensor
    noise: Tensor


def from_nested(sq_small: Tensor, sq_big: Tensor, *, b_small: int, b_big: int) -> SignalNoise:
    r"""Signal and noise from one gradient over a small and one over a big batch.

    .. math:: \mathbb E\,|g_b|^2 = |G|^2 + \mathrm{tr}(\Sigma) / b

    Written for two sizes it gives two equations; both solutions are unbiased. The small batch
    may be a part of the big one (McCandlish's nested batches) or disjoint from it.

    Args:
        sq_small: Squared gradient norm over ``b_small`` samples, with shape ``(*)``.
        sq_big: Squared gradient norm over ``b_big`` samples, with shape ``(*)``.
        b_small: Samples in the small batch.
        b_big: Samples in the big batch.

    Returns:
        The two estimates, each with shape ``(*)``.

    Raises:
        InputError: If ``b_small`` does not lie in (0, ``b_big``).

    References:
        | An Empirical Model of Large-Batch Training (McCandlish et al., 2018), appendix A.1
        | https://arxiv.org/abs/1812.06162
    """
    if not 0 < b_small < b_big:
        raise InputError(
            "Parameter `b_small` should lie in (0, b_big). Found "
            f"`b_small = {b_small}`, `b_big = {b_big}`. Remedy: two different batch sizes."
        )
    signal = (b_big * sq_big - b_small * sq_small) / (b_big - b_small)
    noise = (sq_small - sq_big) / (1 / b_small - 1 / b_big)
    return SignalNoise(signal, noise)


def from_halves(dot: Tensor, sq_diff: Tensor, *, n_1: int, n_2: int) -> SignalNoise:
    r"""Signal and noise from the gradients of two disjoint parts of a batch.

    .. math::
        |G|^2 \approx \langle g_1, g_2 \rangle, \qquad
        \mathrm{tr}(\Sigma) \approx \frac{n_1 n_2}{n_1 + n_2} |g_1 - g_2|^2

    The parts are independent, so their product has no noise term; their difference has mean
    zero and variance :math:`\mathrm{tr}(\Sigma)(1/n_1 + 1/n_2)`. Unequal parts are fine.

    Args:
        dot: Inner product of the two mean gradients, with shape ``(*)``.
        sq_diff: Squared norm of their difference, with shape ``(*)``.
        n_1: Samples in the first part.
        n_2: Samples in the second part.

    Returns:
        The two estimates, each with shape ``(*)``.
    """
    return SignalNoise(dot, sq_diff * (n_1 * n_2 / (n_1 + n_2)))


def from_part_sums(
    sq_parts: Tensor, sq_mean: Tensor, w_n: Tensor | float, w2_n: Tensor | float
) -> SignalNoise:
    r"""Signal and noise from the module's two equations, solved.

    .. math::
        \mathrm{tr}(\Sigma) = \frac{\sum_j w_j |g_j|^2 - |\bar g|^2}
                                   {\sum_j w_j / n_j - \sum_j w_j^2 / n_j}, \qquad
        |G|^2 = |\bar g|^2 - \mathrm{tr}(\Sigma) \sum_j w_j^2 / n_j

    The numerator is :math:`\sum_j w_j |g_j - \bar g|^2`, so the noise is never negative, but for
    rounding where there is next to none. Only sums over parts enter: ranks need to exchange
    nothing else.

    Args:
        sq_parts: :math:`\sum_j w_j |g_j|^2`, with shape ``(*)``.
        sq_mean: :math:`|\sum_j w_j g_j|^2`, with shape ``(*)``.
        w_n: :math:`\sum_j w_j / n_j`, broadcast against the others.
        w2_n: :math:`\sum_j w_j^2 / n_j`, likewise. With one part it equals ``w_n``, and the
            estimates are not finite: one gradient alone says nothing about noise.

    Returns:
        The two estimates, each with shape ``(*)``.
    """
    noise = (sq_parts - sq_mean) / (w_n - w2_n)
    signal = sq_mean - noise * w2_n
    return SignalNoise(signal, noise)


def from_parts(
    sq_norms: Tensor, sq_mean: Tensor, counts: Tensor, weights: Tensor | None = None
) -> SignalNoise:
    r"""Signal and noise from the squared norms of several parts' mean gradients.

    The ready form of :func:`from_part_sums` for a loop that has all the parts' norms at hand:
    micro-batches, equal or not; ranks, as parts like any other; single examples, with ``counts``
    of one.

    Args:
        sq_norms: :math:`|g_j|^2` of each part, with shape ``(*, m)``.
        sq_mean: :math:`|\sum_j w_j g_j|^2`, with shape ``(*)``.
        counts: Samples :math:`n_j` of each part, with shape ``(m)``.
        weights: :math:`w_j` up to a common factor, with shape ``(m)``. Default: ``counts``, so
            that every sample weighs the same. Equal weights with unequal counts (a mean of
            means) are right as well, only noisier.

    Returns:
        The two estimates, each with shape ``(*)``.

    Raises:
        InputError: If there are fewer than two parts.
    """
    if sq_norms.shape[-1] < 2:
        raise InputError(
            "Parameter `sq_norms` should hold at least two parts. "
            f"Found {sq_norms.shape[-1]}. Remedy: split the batch into micro-batches."
        )
    n = counts.to(sq_norms)
    w = n if weights is None else weights.to(sq_norms)
    w = w / w.sum()
    return from_part_sums((w * sq_norms).sum(-1), sq_mean, (w / n).sum(), (w * w / n).sum())


def unbias_deviation(degrees: Tensor) -> Tensor:
    r"""The factor :math:`c_4` by which a sample standard deviation falls short.

    For :math:`\nu` degrees of freedom and normal data :math:`\mathbb E\,s = c_4(\nu)\,\sigma` with

    .. math:: c_4(\nu) = \sqrt{2/\nu}\; \Gamma\big((\nu+1)/2\big) / \Gamma(\nu/2)

    Args:
        degrees: :math:`\nu > 0`, with shape ``(*)``.

    Returns:
        :math:`c_4`, with shape ``(*)``.
    """
    half = degrees / 2
    return torch.exp(torch.lgamma(half + 0.5) - torch.lgamma(half)) / torch.sqrt(half)
