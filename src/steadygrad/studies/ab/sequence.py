r"""A test of paired differences that may be looked at after every pair.

Of differences :math:`d_1, \ldots, d_n` with the mean :math:`\bar d` and the squared deviations
:math:`W = \sum (d_i - \bar d)^2` every mean :math:`\mu` is a part of the interval for which

.. math::
    \sqrt{\tfrac{1}{n + 1}} \left(\frac{V}{V - S^2 / (n + 1)}\right)^{n / 2} < \frac{1}{\alpha},
    \quad S = n (\bar d - \mu), \quad V = W + n (\bar d - \mu)^2

For normal differences the left side is a martingale of mean one: all intervals, after however many
pairs, hold together with the probability :math:`1 - \alpha`. It weighs effects by a normal
distribution with the deviation of one difference. With :math:`\alpha = 0.05` four pairs never tell,
and five do even where all five are equal. ``benchmarks/ab_truth.py`` tries other distributions,
and Student's intervals at the ten looks of ``advise``, which two-valued metrics deceive.

References:
    | Anytime-Valid t-Tests and Confidence Sequences for Gaussian Means with Unknown Variance
    | (Wang and Ramdas, 2024), https://arxiv.org/abs/2310.03722
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadygrad.studies.statistics import Floats

# More pairs than anybody trains.
MOST = 10_000


def half_width(pairs: Floats, deviation: Floats, alpha: float) -> Floats:
    """From the mean to the interval's end, by number of pairs; infinite for too few."""
    n = np.asarray(pairs, dtype=float)
    part = -np.expm1(-(2 * math.log(1 / alpha) + np.log1p(n)) / n)
    room = n / (n + 1) - part
    there = room > 0
    share = (n - 1) / n * np.divide(part, room, out=np.zeros_like(n), where=there)
    return np.asarray(np.where(there, deviation * np.sqrt(share), np.inf))


def first_verdict(alpha: float) -> int:
    """The fewest pairs after which there can be a verdict."""
    n = np.arange(1.0, 1000)
    return 1 + int(np.isfinite(half_width(n, np.ones_like(n), alpha)).argmax())


def intervals(differences: Floats, alpha: float) -> tuple[Floats, Floats]:
    """Mean and half width after each pair, for differences of shape ``(*, pairs)``."""
    n = np.arange(1.0, 1 + differences.shape[-1])
    # From the first one: the sums of squares of large metrics would lose the small differences.
    first = differences[..., :1]
    apart = differences - first
    mean = apart.cumsum(-1) / n
    squares = np.maximum((apart**2).cumsum(-1) - n * mean**2, 0.0)
    deviation = np.sqrt(squares / np.maximum(n - 1, 1))
    return first + mean, half_width(n, deviation, alpha)


@dataclass(frozen=True)
class Course:
    """A comparison after each pair; all arrays have the shape ``(*, pairs)``.

    Attributes:
        mean: Mean difference, B's less A's: of the metric, or, once a run has failed, of the shares
            of failed runs.
        half: Half the width of its interval.
        lost: Whether a run has failed.
        sure: Whether the interval leaves out zero.
        small: Whether it lies within the smallest effect.
    """

    mean: Floats
    half: Floats
    lost: NDArray[np.bool_]
    sure: NDArray[np.bool_]
    small: NDArray[np.bool_]

    @property
    def decided(self) -> NDArray[np.bool_]:
        """Whether there is a verdict."""
        return np.asarray(self.sure | self.small)


def compare(a: Floats, b: Floats, *, alpha: float, smallest: float = 0.0) -> Course:
    """Compares metrics pair by pair; NaN is a run that failed.

    Equal pairs show no effect at all, but only of a metric that never takes a value twice: of an
    accuracy on a few samples they say little, as five tosses that agree.
    """
    lost = np.logical_or.accumulate(np.isnan(a) | np.isnan(b), -1)
    apart = np.where(lost, 0.0, b - a)
    failed = np.isnan(b).astype(float) - np.isnan(a)
    means, halves = zip(intervals(apart, alpha), intervals(failed, alpha), strict=True)
    mean, half = np.where(lost, *means[::-1]), np.where(lost, *halves[::-1])
    earlier = np.tri(a.shape[-1], k=-1, dtype=bool)
    again = ((a[..., :, None] == a[..., None, :]) & earlier).any(-1)
    again = np.logical_or.accumulate(again, -1)
    small = ~lost & (np.abs(mean) + half <= smallest) & ((half > 0) | ~again)
    return Course(mean, half, lost, np.abs(mean) > half, small)


def pairs_needed(mean: float, deviation: float, alpha: float, smallest: float) -> int | None:
    """Pairs that should tell, if mean and deviation stay as they are; None beyond ten thousand."""
    n = np.arange(1.0, MOST + 1)
    half = half_width(n, np.full_like(n, deviation), alpha)
    tells = (half < abs(mean)) | (abs(mean) + half <= smallest)
    return 1 + int(tells.argmax()) if tells.any() else None
