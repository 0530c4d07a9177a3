r"""Unbiased estimates of gradient signal and noise, from parts of a batch.

One equation carries every estimator here. Let :math:`g_j` be the mean gradient over :math:`n_j`
independent samples, and :math:`\bar g = \sum_j w_j g_j` with :math:`\sum_j w_j = 1`. Then

.. math::
    \mathbb E \sum_j w_j |g_j|^2 = |G|^2 + \mathrm{tr}(\Sigma) \sum_j w_j / n_j, \qquad
    \mathbb E\,|\bar g|^2        = |G|^2 + \mathrm{tr}(\Sigma) \sum_j w_j^2 / n_j,

two equations for the two unknowns, whatever the parts are: halves of a batch, micro-batches of
equal or unequal size, ranks, single examples (:math:`n_j = 1`), or all of them together. Signal
and noise, :math:`|G|^2` and :math:`\mathrm{tr}(\Sigma)`, are returned in this order, each with the
shape ``(*)`` of the squared norms. An estimate of the signal may be negative.
"""

from torch import Tensor

# Errors of single additions are below u|s_j|, and as good as independent. For up to 16 parts the
# bound holds in the worst case too; then all errors point the same way.
ROUNDINGS = 4.0
# An all-reduce leaves copies equal to the bit; their float32 norms on two kinds of processor, and
# float64 sums of them over many processes, are not.
_APART = 2.0**-32


SignalNoise = tuple[Tensor, ...]


def from_nested(sq_small: Tensor, sq_big: Tensor, *, b_small: int, b_big: int) -> SignalNoise:
    r"""Signal and noise from one gradient over a small and one over a big batch.

    .. math:: \mathbb E\,|g_b|^2 = |G|^2 + \mathrm{tr}(\Sigma) / b

    Written for two sizes it gives two equations; both solutions are unbiased. The small batch
    may be a part of the big one (McCandlish's nested batches) or disjoint from it.

    References:
        | An Empirical Model of Large-Batch Training (McCandlish et al., 2018), appendix A.1
        | https://arxiv.org/abs/1812.06162
    """
    signal = (b_big * sq_big - b_small * sq_small) / (b_big - b_small)
    noise = (sq_small - sq_big) / (1 / b_small - 1 / b_big)
    return signal, noise


def from_halves(dot: Tensor, sq_diff: Tensor, *, n_1: int, n_2: int) -> SignalNoise:
    r"""Signal and noise from two disjoint parts' inner product and squared difference.

    .. math::
        |G|^2 \approx \langle g_1, g_2 \rangle, \qquad
        \mathrm{tr}(\Sigma) \approx \frac{n_1 n_2}{n_1 + n_2} |g_1 - g_2|^2

    The parts are independent, so their product has no noise term; their difference has mean
    zero and variance :math:`\mathrm{tr}(\Sigma)(1/n_1 + 1/n_2)`.
    """
    return dot, sq_diff * (n_1 * n_2 / (n_1 + n_2))


def from_part_sums(
    sq_parts: Tensor, sq_mean: Tensor, w_n: Tensor | float, w2_n: Tensor | float
) -> SignalNoise:
    r"""Signal and noise from the module's two equations, solved.

    .. math::
        \mathrm{tr}(\Sigma) = \frac{\sum_j w_j |g_j|^2 - |\bar g|^2}
                                   {\sum_j w_j / n_j - \sum_j w_j^2 / n_j}, \qquad
        |G|^2 = |\bar g|^2 - \mathrm{tr}(\Sigma) \sum_j w_j^2 / n_j

    The numerator is :math:`\sum_j w_j |g_j - \bar g|^2`, so the noise is never negative, but for
    rounding. Only sums over parts enter: ranks need to exchange nothing else. With one part both
    estimates are not finite: one gradient alone says nothing about noise.
    """
    noise = (sq_parts - sq_mean) / (w_n - w2_n)
    return sq_mean - noise * w2_n, noise


def is_altered(
    seen: Tensor, held: Tensor, squares: Tensor, unit: float, processes: int = 1
) -> Tensor:
    r"""Whether a gradient is farther from the sum of its parts than rounding can bring it.

    A sum :math:`s_m = h_1 + \dots + h_m` that is rounded after every addition is wrong by at most
    :math:`u \sum_j |s_j|`, with the unit roundoff :math:`u`. What is farther away was changed
    after it was added up, or holds more than the parts. Between processes the order of additions
    is unknown: none of the :math:`R` running sums is taken to be larger than the whole and all
    processes' own together.

    ``seen`` is the sum of the parts' elements and ``held`` the gradient's at the same places, with
    shape ``(n)``; ``squares`` is :math:`\sum_j |s_j|^2`, added up over processes. The result has
    shape ``()``, and is false where a part is not finite.
    """
    distance = (seen - held).square().sum()
    if processes > 1:
        squares = squares + processes * (seen.square().sum() + squares)
    return distance > (ROUNDINGS * unit) ** 2 * squares


def copies_differ(total: Tensor, squares: Tensor, processes: int) -> Tensor:
    """Whether processes had other numbers, from their sum ``(n)`` and the sum of their squares.

    The result has shape ``()``, and is false where a number is not finite.
    """
    return squares * processes - total.square().sum() > _APART * squares
