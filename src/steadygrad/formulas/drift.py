r"""The present value of a ratio of averages whose truth may move.

An average lags behind what grows: its interval covers a value of the past. Here the newer half of
the measurements is tested against the older one, in the whole history and in every half of a
half, and what the averages reach back to is cut short where a test finds a difference.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad.formulas.intervals import (
    RatioInterval,
    ratio_of_averages,
    t_quantile,
)

__all__ = [
    "ALARM",
    "HINT",
    "LEAST",
    "PresentRatio",
    "halves_differ",
    "present_ratio",
    "short_memory",
]

# Probability of a false alarm, over all the tests of one estimate, if measurements are independent.
ALARM = 0.01
# Level of a hint: the halves differ enough to widen the interval, but not enough to report drift.
HINT = 0.35
# Fewest measurements in a test; averages of drifting ratios are of a quarter of these, at least.
LEAST = 32


class PresentRatio(NamedTuple):
    """A ratio with its interval, and over which measurements it was averaged.

    Attributes:
        ratio: The ratio, with shape ``(*)`` in each entry.
        drifting: Whether the ratio was found to drift, with shape ``(*)``.
        measurements: Number of newest measurements in the averages, with shape ``(*)``.
        age: Mean age of these, weighted as they are, in measurements; 0 is the newest.
    """

    ratio: RatioInterval
    drifting: Tensor
    measurements: Tensor
    age: Tensor


def short_memory(top: Tensor, bottom: Tensor, there: Tensor) -> Tensor:
    r"""Number of successive measurements worth one independent one, also while the ratio drifts.

    .. math:: \tau = \frac{1 + \rho}{1 - \rho}, \qquad \rho = \frac{D_2}{D_1} - 1

    where :math:`D_k` is the mean squared difference of residuals :math:`a_t - r b_t` that lie
    :math:`k` apart. An autoregression of first order has this correlation. Drift hardly
    changes these differences. In ordinary autocorrelations it would look like slow noise, and the
    test would not detect it.

    Args:
        top: Numerators, with shape ``(*, N)``.
        bottom: Denominators, with shape ``(*, N)``.
        there: Which measurements there are, with shape ``(N)``.

    Returns:
        :math:`\tau \ge 1`, with shape ``(*)``.
    """
    ratio = (top * there).sum(-1, keepdim=True) / (bottom * there).sum(-1, keepdim=True)
    rest = top - ratio.nan_to_num(0.0, 0.0, 0.0) * bottom

    def apart(k: int) -> Tensor:
        both = there[k:] & there[:-k]
        return ((rest[..., k:] - rest[..., :-k]).square() * both).sum(-1) / both.sum()

    rho = (apart(2) / apart(1) - 1).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 0.95)
    return (1 + rho) / (1 - rho)


def halves_differ(
    top: Tensor, bottom: Tensor, position: Tensor, size: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Student's t of the newer against the older half of a window.

    .. math:: \frac{a_1 b_2 - a_2 b_1}{\sqrt{\tau\,(b_2^2 v_1 + b_1^2 v_2)}}

    with the halves' averages :math:`a_i` and :math:`b_i`, the variances :math:`v_i` of their
    averaged residuals :math:`a_t - r b_t`, and their autocorrelation time :math:`\tau`.
    Like Fieller's interval, the numerator has mean zero where the ratios are equal, however weak
    the denominators, and also where numerators and denominators move together.

    Args:
        top: Numerators, with shape ``(*, N)``.
        bottom: Denominators, with shape ``(*, N)``.
        position: Place of each measurement, 0 for the newest, with shape ``(N)``; at least
            ``size`` for those to leave out.
        size: Measurements in the window, with shape ``()``.
        tau: Autocorrelation time of the residuals, with shape ``(*)``.

    Returns:
        The statistic and its degrees of freedom, each with shape ``(*)``. The statistic is 0
        where an average is not positive, so that there is no ratio to compare.

    References:
        | The Generalization of "Student's" Problem (Welch, 1947)
        | https://doi.org/10.1093/biomet/34.1-2.28
    """
    new, inside = position < size / 2, position < size
    halves = torch.stack([new, inside & ~new]).to(top.dtype)
    counts = halves.sum(-1)
    a, b = top @ halves.mT / counts, bottom @ halves.mT / counts
    ratio = (a @ counts / (b @ counts)).nan_to_num(0.0, 0.0, 0.0)
    rest = top - ratio.unsqueeze(-1) * bottom
    means = rest @ halves.mT / counts
    deviation = (rest - means @ halves) * inside
    variance = deviation.square() @ halves.mT / (counts - 1)

    crossed = b.flip(-1)
    spread = tau * (crossed.square() * variance / counts).sum(-1)
    score = (means * crossed).diff(dim=-1).squeeze(-1).neg() / spread.sqrt()
    sensible = (ratio > 0) & (b > 0).all(-1)
    return torch.where(sensible, score, 0.0), counts.sum() / tau - 2


def _steady_size(top: Tensor, bottom: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the largest window without drift in it or in any smaller one.

    Returns its size, whether any window drifts, and whether the whole history hints at drift.
    Windows are the whole, its newer half, the newer half of that, and so on.
    """
    n = (position < position.shape[-1]).sum()
    tests = 1
    while position.shape[-1] / 2**tests >= LEAST:
        tests += 1
    size = n / 2 ** (tests - 1)
    steady = torch.zeros_like(top[..., 0])
    drifting = torch.zeros_like(steady, dtype=torch.bool)
    hint = drifting
    tau = short_memory(top, bottom, position < position.shape[-1])
    for _ in range(tests):
        score, degrees = halves_differ(top, bottom, position, size, tau)
        found = (score.abs() > t_quantile(1 - ALARM / tests, degrees)) & (size >= LEAST)
        drifting = drifting | found
        steady = torch.where(drifting, steady, size)
        hint = (score.abs() > t_quantile(1 - HINT, degrees)) & (size >= LEAST)
        size = size * 2
    # The last window was the whole.
    return steady.clamp(min=LEAST), drifting, hint


def present_ratio(
    top: Tensor, bottom: Tensor, weights: Tensor, *, level: float = 0.95
) -> PresentRatio:
    r"""The ratio of averages over the whole history, or over its newest part where it drifts.

    Where no test finds a difference, this is :func:`~.intervals.ratio_of_averages`. Its interval
    then takes in the newest quarter's too if the halves of the whole differ at a level of 35 %:
    too little for an alarm, and too much to say that the past still holds.

    Where a test does, the averages are of the newest quarter of the largest window that shows no
    drift. A window at the edge of showing one still lags by more than its interval; its quarter
    lags by a fourth of that, with an interval twice as wide.

    All the tests together raise a false alarm in 1 to 2 % of the cases, also with an
    autocorrelation of 0.5 from one measurement to the next. They weigh the measurements equally,
    whatever ``weights``: a slow drift shows in the long tail of a history first.

    Args:
        top: Numerators, the newest first, with shape ``(*, N)``.
        bottom: Denominators, likewise.
        weights: Weight of each measurement, with shape ``(N)``; 0 where there is none.
        level: Probability with which the interval should cover the present value.

    Returns:
        The ratio, and what it is of. Nothing drifts with fewer than 32 measurements.
    """
    there = weights > 0
    position = torch.where(there, there.cumsum(-1) - 1, len(weights))
    steady, drifting, hint = _steady_size(top, bottom, position)
    newest = weights * (position < steady.unsqueeze(-1) / 4)
    whole = ratio_of_averages(top, bottom, weights, level=level)
    part = ratio_of_averages(top, bottom, newest, level=level)

    chosen = RatioInterval(
        *(torch.where(drifting, *pair) for pair in zip(part, whole, strict=True))
    )
    low, high = torch.minimum(whole.low, part.low), torch.maximum(whole.high, part.high)
    wide = hint & ~drifting
    high = torch.where(wide, high, chosen.high)
    chosen = chosen._replace(
        low=torch.where(wide, low, chosen.low),
        high=high,
        resolved=torch.isfinite(high) & torch.isfinite(chosen.value),
    )
    used = torch.where(drifting.unsqueeze(-1), newest, weights)
    age = (used * torch.arange(len(weights), device=used.device)).sum(-1) / used.sum(-1)
    return PresentRatio(chosen, drifting, (used > 0).sum(-1), age)
