r"""Steps, samples and learning rates that follow from a critical batch size.

Symbols: ``B`` a batch size in samples, :math:`B_c` the critical one, ``S`` optimizer steps and
``E`` samples to reach a goal, with their smallest possible values :math:`S_\min` and
:math:`E_\min`. Functions take floats or tensors and return the same.
"""

from typing import TYPE_CHECKING, TypeVar

from steadygrad._checks import InputError, check_choice

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LR_RULES",
    "PLAIN_LR_RULES",
    "learning_rate",
    "samples_ratio",
    "steps_ratio",
]

F = TypeVar("F", float, "Tensor")

# Rules that need nothing but the two batch sizes, and all of them.
PLAIN_LR_RULES = ("sqrt", "linear", "constant")
LR_RULES = (*PLAIN_LR_RULES, "sgd", "adam")


def steps_ratio(batch_size: F, critical: F) -> F:
    r"""Steps a batch size needs, relative to the least possible number.

    .. math:: S / S_\min = 1 + B_c / B

    Args:
        batch_size: Batch size ``B``, in samples.
        critical: Critical batch size :math:`B_c = E_\min / S_\min`, in samples.

    Returns:
        :math:`S / S_\min`, at least 1.

    References:
        | An Empirical Model of Large-Batch Training (McCandlish et al., 2018), eq. 2.11
        | https://arxiv.org/abs/1812.06162
    """
    return 1 + critical / batch_size


def samples_ratio(batch_size: F, critical: F) -> F:
    r"""Samples a batch size needs, relative to the least possible number.

    .. math:: E / E_\min = 1 + B / B_c

    With :func:`steps_ratio` this is the trade-off
    :math:`(S/S_\min - 1)(E/E_\min - 1) = 1`.

    Args:
        batch_size: Batch size ``B``, in samples.
        critical: Critical batch size :math:`B_c`, in samples.

    Returns:
        :math:`E / E_\min`, at least 1.

    References:
        | An Empirical Model of Large-Batch Training (McCandlish et al., 2018), eq. 2.11
        | https://arxiv.org/abs/1812.06162
    """
    return 1 + batch_size / critical


def learning_rate(
    lr: float,
    batch_size: float,
    base: float,
    rule: str = "sqrt",
    noise_scale: float | None = None,
) -> float:
    r"""The learning rate that matches a new batch size.

    ========== ============================================================ =====================
    rule       learning rate at batch B, tuned as ``lr`` at :math:`B_0`     source
    ========== ============================================================ =====================
    sqrt       :math:`\sqrt{B/B_0}`, for Adam and its kin                   Malladi et al. 2022
    linear     :math:`B/B_0`, for SGD well below the noise scale            Goyal et al. 2017
    constant   1
    sgd        :math:`\frac{1 + B_n/B_0}{1 + B_n/B}`                        McCandlish et al. 2018
    adam       :math:`\frac{\sqrt{B_n/B_0}+\sqrt{B_0/B_n}}                  Li et al. 2024
               {\sqrt{B_n/B}+\sqrt{B/B_n}}`, falling beyond :math:`B_n`
    ========== ============================================================ =====================

    Args:
        lr: Learning rate tuned at ``base``.
        batch_size: New batch size ``B``, in samples.
        base: Batch size :math:`B_0`, in samples.
        rule: One of the table's names.
        noise_scale: Noise scale :math:`B_n` in samples, for ``sgd`` and ``adam``.

    Returns:
        The new learning rate.

    Raises:
        InputError: If the rule is unknown or lacks a noise scale.

    References:
        | Accurate, Large Minibatch SGD (Goyal et al., 2017), https://arxiv.org/abs/1706.02677
        | An Empirical Model of Large-Batch Training (McCandlish et al., 2018), eq. 2.6,
        | https://arxiv.org/abs/1812.06162
        | On the SDEs and Scaling Rules for Adaptive Gradient Algorithms (Malladi et al., 2022),
        | https://arxiv.org/abs/2205.10287
        | Surge Phenomenon in Optimal Learning Rate and Batch Size Scaling (Li et al., 2024),
        | https://arxiv.org/abs/2405.14578
    """
    check_choice("rule", rule, LR_RULES)
    k = batch_size / base
    if rule == "constant":
        return lr
    if rule == "sqrt":
        return lr * float(k**0.5)
    if rule == "linear":
        return lr * k
    if noise_scale is None or not noise_scale > 0:
        raise InputError(
            f"Parameter `noise_scale` should be positive for rule {rule!r}. "
            f"Found `noise_scale = {noise_scale}`. Remedy: measure it, or use rule 'sqrt'."
        )
    if rule == "sgd":
        return lr * (1 + noise_scale / base) / (1 + noise_scale / batch_size)
    return lr * _surge(base / noise_scale) / _surge(batch_size / noise_scale)


def _surge(ratio: float) -> float:
    return float(ratio**0.5 + ratio**-0.5)
