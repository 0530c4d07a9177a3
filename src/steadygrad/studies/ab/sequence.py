r"""A test of paired differences that may be looked at after every pair.

With :math:`S` and :math:`V` the sums of :math:`d_i - \mu` and of its squares, the interval has all
:math:`\mu` with

.. math:: (n + 1)^{-1/2} (1 - S^2 / ((n + 1) V))^{-n / 2} < 1 / \alpha

For normal differences all intervals, however many, hold together with the probability
:math:`1 - \alpha`. Equal metrics tell once a change in a tenth of the seeds would have shown with
that probability, after 29 pairs. ``benchmarks/ab_truth.py`` tries other distributions and tests.

References:
    | Anytime-Valid t-Tests and Confidence Sequences for Gaussian Means with Unknown Variance
    | (Wang and Ramdas, 2024), https://arxiv.org/abs/2310.03722
"""

import math
from typing import Any, NamedTuple

import numpy as np

from steadygrad.studies.statistics import Floats


def half_width(pairs: Floats, deviation: Any, alpha: float) -> Floats:
    """From the mean to the interval's ends, by number of pairs; infinite for too few."""
    limit = -np.expm1(-(2 * math.log(1 / alpha) + np.log1p(pairs)) / pairs)
    margin = pairs / (pairs + 1) - limit
    known = margin > 0
    ratio = np.divide((pairs - 1) / pairs * limit, margin, out=np.zeros_like(margin), where=known)
    return np.asarray(np.where(known, deviation * np.sqrt(ratio), np.inf))


def intervals(differences: Floats, alpha: float) -> tuple[Floats, Floats]:
    """Mean and half width after each pair, for differences of shape ``(*, pairs)``."""
    n = np.arange(1.0, 1 + differences.shape[-1])
    # From the first one: squares of large numbers would lose small deviations.
    shifted = differences - differences[..., :1]
    mean = shifted.cumsum(-1) / n
    squares = np.maximum((shifted**2).cumsum(-1) - n * mean**2, 0.0)
    deviation = np.sqrt(squares / np.maximum(n - 1, 1))
    return differences[..., :1] + mean, half_width(n, deviation, alpha)


class Course(NamedTuple):
    """A comparison after each pair: arrays of the shape ``(*, pairs)``.

    ``mean`` is B's minus A's: of the metric or, once a run has ``failed``, of the share of failed
    runs. There is a verdict where the interval excludes zero, or the difference is ``negligible``:
    the interval lies within the smallest effect. There is none where A or B is one run,
    ``repeated``.
    """

    mean: Floats
    half: Floats
    failed: Any
    negligible: Any
    decided: Any
    repeated: Any


def values_of(metrics: Floats) -> Any:
    """The number of different values after each run."""
    known = np.tri(metrics.shape[-1], k=-1, dtype=bool)
    again = (metrics[..., :, None] == metrics[..., None, :]) & known
    return (~again.any(-1)).cumsum(-1)


def typical_step(metrics: Floats) -> Any:
    """Median difference of a run from the one before, after each; one far off moves it little."""
    steps = np.abs(np.diff(metrics))
    medians = [np.median(steps[..., :n], -1)[..., None] for n in range(1, metrics.shape[-1])]
    return np.concatenate([0 * metrics[..., :1], *medians], -1)


def is_one_run(metrics: Floats, others: Floats) -> Any:
    """Whether metrics are those of one or two runs, repeated, but for the rounding of a GPU.

    They hardly vary where ``others``, on the same seeds, do; after each run.
    """
    n, shifted = np.arange(1.0, 1 + metrics.shape[-1]), metrics - metrics[..., :1]
    variance = (shifted**2).cumsum(-1) / n - (shifted.cumsum(-1) / n) ** 2
    few = (values_of(metrics) <= 2) & (values_of(others) >= 6)
    return few | (np.sqrt(np.maximum(variance, 0.0)) <= typical_step(others) / 100)


def are_one_run(a: Floats, b: Floats) -> bool:
    """Whether A and B have the same metrics, but for rounding, on three seeds or more."""
    return len(a) > 2 and bool(np.abs(b - a).max() <= typical_step(a)[-1] / 1000)


def compare(a: Floats, b: Floats, alpha: float, smallest: float = 0.0) -> Course:
    """Compares metrics pair by pair; NaN is a run that failed."""
    failed = np.logical_or.accumulate(np.isnan(a) | np.isnan(b), -1)
    apart, first, rounding = b - a, (b - a)[..., :1], 1e-12 * np.maximum(abs(a), abs(b))
    apart = np.where(abs(apart - first) <= rounding, first, apart)
    of_metric = intervals(np.where(failed, 0.0, apart), alpha)
    of_failures = intervals(np.isnan(b).astype(float) - np.isnan(a), alpha)
    mean, half = (np.where(failed, *ends) for ends in zip(of_failures, of_metric, strict=True))
    # Equal differences say something of a metric that takes no value twice, but nothing of one
    # whose seed is not used, and little of an accuracy on some samples.
    n = np.arange(1, 1 + a.shape[-1])
    varies, rare = values_of(a) == n, 0.9**n <= alpha
    repeated = ~failed & (is_one_run(a, b) | is_one_run(b, a))
    telling = failed | (~repeated & ((half > 0) | (varies & (rare | (mean != 0)))))
    negligible = telling & ~failed & (np.abs(mean) + half <= smallest)
    decided = negligible | (telling & (np.abs(mean) > half))
    return Course(mean, half, failed, negligible, decided, repeated)


def pairs_needed(mean: float, deviation: float, alpha: float, smallest: float = 0.0) -> int | None:
    """Pairs that should tell if these stay as they are; None beyond ten thousand."""
    half = half_width(np.arange(1.0, 10_001.0), deviation, alpha)
    tells = (half < abs(mean)) | (abs(mean) + half <= smallest)
    return 1 + int(tells.argmax()) if tells.any() else None
