r"""Learning-rate schedules, as the factor by which a base learning rate is multiplied.

Symbols: ``b`` batches and ``e`` epochs so far, :math:`B` and :math:`E` the scales on which the
learning rate falls with them.
"""

import math

__all__ = ["eden", "warmup_hold_decay"]


def warmup_hold_decay(step: float, *, total: float, warmup: float, hold: float) -> float:
    r"""Rises in a line from 0 to 1, stays there, and falls in a line to 0.

    .. math:: f(t) = \begin{cases}
                  t / W               & t < W \\
                  1                   & W \le t < W + H \\
                  (T - t) / (T - W - H) & W + H \le t < T \\
                  0                   & t \ge T
              \end{cases}

    Args:
        step: Optimizer steps :math:`t` taken so far.
        total: All steps :math:`T`.
        warmup: Steps :math:`W` of the rise; fractions are allowed.
        hold: Steps :math:`H` at the top; :math:`W + H \le T`.

    Returns:
        The factor, in [0, 1].

    References:
        | Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes
        | (Zheng et al., 2020), https://arxiv.org/abs/2006.13484
    """
    if step >= total:
        return 0.0
    if step < warmup:
        return step / warmup
    if step < warmup + hold:
        return 1.0
    return (total - step) / (total - warmup - hold)


def eden(
    batch: float,
    epoch: float,
    *,
    lr_batches: float,
    lr_epochs: float,
    warmup_batches: float,
    warmup_start: float,
) -> float:
    r"""Falls as the inverse square root of batches and of epochs, each once it passes its scale.

    .. math:: f(b, e) = \Bigl(1 + \tfrac{b^2}{B^2}\Bigr)^{-1/4}
                        \Bigl(1 + \tfrac{e^2}{E^2}\Bigr)^{-1/4} w(b), \qquad
              w(b) = \min\Bigl(1,\; s + (1 - s)\,\tfrac{b}{b_w}\Bigr)

    Args:
        batch: Batches ``b`` so far.
        epoch: Epochs ``e`` so far; fractions are allowed.
        lr_batches: Scale :math:`B` in batches.
        lr_epochs: Scale :math:`E` in epochs.
        warmup_batches: Batches :math:`b_w` until the warm-up is over; 0: none.
        warmup_start: Where it begins, :math:`s`.

    Returns:
        The factor, in [0, 1].

    References:
        | Zipformer: A faster and better encoder for automatic speech recognition
        | (Yao et al., 2024), https://arxiv.org/abs/2310.11230
    """
    by_batch = math.pow(1 + (batch / lr_batches) ** 2, -0.25)
    by_epoch = math.pow(1 + (epoch / lr_epochs) ** 2, -0.25)
    if batch >= warmup_batches:
        return by_batch * by_epoch
    return by_batch * by_epoch * (warmup_start + (1 - warmup_start) * batch / warmup_batches)
