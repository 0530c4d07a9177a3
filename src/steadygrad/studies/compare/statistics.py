"""Statistics of paired seeds: differences, several comparisons at a time, and samples saved."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from steadygrad.studies.statistics import Floats

__all__ = ["Difference", "SampleRatio", "compare_pairs", "sample_ratio", "seeds_needed"]

ALPHA = 0.05
POWER = 0.8
# More seeds than anybody trains.
MOST_SEEDS = 10_000
# From so many pairs on a bootstrap is worth its name.
BOOTSTRAP_PAIRS = 10
DRAWS = 4000
# Beyond these the baseline's loss curve is no guide.
LEAST_RATIO, MOST_RATIO = 0.25, 4.0


@dataclass(frozen=True)
class Difference:
    """Mean paired difference of a loss from the baseline's; below zero is better.

    Attributes:
        mean: The mean; infinite where a seed diverged.
        low: Lower end of its interval.
        high: Upper end.
        confidence: Confidence of the interval, 0.95 or more: Holm's for several comparisons.
        p_value: Of Student's two-sided test, for this comparison alone.
        verdict: ``"better"``, ``"worse"`` or ``"cannot tell"``.
        needed: Seeds that would tell in four of five cases, were the mean the true one; None where
            the verdict is known, or where no number of seeds would.
        bootstrap: Percentile interval of the mean, with the same confidence; None below ten pairs.
    """

    mean: float
    low: float
    high: float
    confidence: float
    p_value: float
    verdict: str
    needed: int | None = None
    bootstrap: tuple[float, float] | None = None


def compare_pairs(differences: Sequence[Floats]) -> list[Difference]:
    r"""Judges the paired differences of several optimizers from one baseline.

    Student's t for each; Holm's rule for all: the :math:`i`-th smallest p-value of :math:`m` is
    compared with :math:`\alpha / (m - i + 1)`, until one is larger. Each interval has the
    confidence with which its comparison was decided, so that no interval contradicts a verdict. The
    chance that any verdict is wrong is at most :math:`\alpha`.

    An optimizer that diverged on a seed is worse. Where only the baseline diverged there is no
    telling.

    Args:
        differences: Losses less the baseline's by seed, for each optimizer with shape ``(n,)`` and
            ``n >= 2``; infinite where the optimizer diverged, minus infinite where the baseline
            did, NaN where both did.

    References:
        | A Simple Sequentially Rejective Multiple Test Procedure (Holm, 1979)
        | https://www.jstor.org/stable/4615733
    """
    p_values = [_p_value(own) for own in differences]
    found: list[Difference | None] = [None] * len(p_values)
    open_still = True
    # Those that diverged take part in the count and come first.
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for place, index in enumerate(order):
        alpha = ALPHA / (len(order) - place)
        open_still = open_still and p_values[index] <= alpha
        if not open_still:
            # Nothing after the first one that is not decided is.
            alpha = min(alpha, ALPHA / (len(order) - _first_open(p_values, order)))
        found[index] = _judge(differences[index], p_values[index], alpha, decided=open_still)
    return [difference for difference in found if difference is not None]


def _first_open(p_values: Sequence[float], order: Sequence[int]) -> int:
    for place, index in enumerate(order):
        if p_values[index] > ALPHA / (len(order) - place):
            return place
    return len(order)


def _p_value(differences: Floats) -> float:
    if (differences == math.inf).any():
        return 0.0
    if not np.isfinite(differences).all():
        return 1.0
    spread, mean = differences.std(ddof=1), differences.mean()
    if spread == 0:
        return 1.0 if mean == 0 else 0.0
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def _judge(differences: Floats, p_value: float, alpha: float, *, decided: bool) -> Difference:
    confidence = 1 - alpha
    if not np.isfinite(differences).all():
        if (differences == math.inf).any():
            return Difference(math.inf, math.inf, math.inf, confidence, p_value, "worse")
        return Difference(math.nan, -math.inf, math.inf, confidence, p_value, "cannot tell")
    count, mean, spread = len(differences), differences.mean(), differences.std(ddof=1)
    half = float(stats.t.ppf(1 - alpha / 2, count - 1) * spread / math.sqrt(count))
    verdict = ("better" if mean < 0 else "worse") if decided else "cannot tell"
    return Difference(
        mean=float(mean),
        low=float(mean - half),
        high=float(mean + half),
        confidence=confidence,
        p_value=p_value,
        verdict=verdict,
        needed=None if decided else seeds_needed(float(mean), float(spread), alpha),
        bootstrap=_bootstrap(differences, confidence),
    )


def _bootstrap(differences: Floats, confidence: float) -> tuple[float, float] | None:
    if len(differences) < BOOTSTRAP_PAIRS or differences.std() == 0:
        return None
    found = stats.bootstrap(
        (differences,), np.mean, confidence_level=confidence, method="percentile", rng=0
    ).confidence_interval
    return float(found.low), float(found.high)


def seeds_needed(mean: float, spread: float, alpha: float = ALPHA) -> int | None:
    """Fewest paired seeds with which Student's test finds a true mean in four of five cases.

    Args:
        mean: The true mean difference.
        spread: Standard deviation of one difference.
        alpha: Level of the two-sided test.

    Returns:
        The number; None where it is beyond ten thousand, or the mean is zero.
    """
    if mean == 0 or spread == 0:
        return None if mean == 0 else 2

    def power(count: int) -> float:
        shift = abs(mean) / spread * math.sqrt(count)
        limit = stats.t.ppf(1 - alpha / 2, count - 1)
        return float(stats.nct.sf(limit, count - 1, min(shift, 35.0)))

    low, high = 2, 4
    while power(high) < POWER:
        low, high = high, 2 * high
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return low if power(low) >= POWER else high


@dataclass(frozen=True)
class SampleRatio:
    """Samples with which the baseline would be as good, over those that were trained.

    Above 1 the optimizer saves samples. The interval's ends, and the value, lie between a quarter
    and four: beyond them the baseline's loss curve is no guide.
    """

    value: float
    low: float
    high: float


def sample_ratio(differences: Floats, octave: Floats, confidence: float) -> SampleRatio | None:
    r"""Expresses a difference of losses in samples.

    The baseline's loss falls by :math:`s` with twice the samples, so that it would need
    :math:`2^{-d / s}` times as many for a difference of :math:`d`. Loss curves flatten: where the
    optimizer is better, the baseline would need at least as many.

    Args:
        differences: Losses less the baseline's by seed, shape ``(n,)``.
        octave: The baseline's loss with half of the samples less that with all, by seed.
        confidence: Confidence of the interval.

    Returns:
        The ratio; None where the baseline's loss did not clearly fall.
    """
    count = len(differences)
    if count < 2 or not (np.isfinite(differences).all() and np.isfinite(octave).all()):
        return None
    both = np.stack([differences, octave])
    falls = stats.ttest_1samp(octave, 0.0, alternative="greater") if octave.std() else None
    if octave.mean() <= 0 or (falls is not None and falls.pvalue > ALPHA / 2):
        return None
    generator, freedom = np.random.default_rng(0), count - 1
    spread = np.linalg.cholesky(np.cov(both) / count + 1e-300 * np.eye(2))
    scale = np.sqrt(freedom / generator.chisquare(freedom, DRAWS))
    draws = both.mean(1)[:, None] + spread @ generator.normal(size=(2, DRAWS)) * scale
    exponents = -draws[0] / np.maximum(draws[1], 1e-12 * octave.mean())
    tail = (1 - confidence) / 2
    low, high = np.quantile(exponents, [tail, 1 - tail])
    value = -both.mean(1)[0] / both.mean(1)[1]
    return SampleRatio(*(_bounded(float(e)) for e in (value, low, high)))


def _bounded(exponent: float) -> float:
    return 2.0 ** min(max(exponent, math.log2(LEAST_RATIO)), math.log2(MOST_RATIO))
