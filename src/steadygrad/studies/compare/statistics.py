"""Statistics of paired seeds: differences, several comparisons at a time, and samples saved."""

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from scipy import special

from steadygrad.studies.compare.schema import LEAST_RATIO, MOST_RATIO, Difference, Ratio
from steadygrad.studies.statistics import Floats

ALPHA, POWER = 0.05, 0.8
# Mean squared errors of a chosen learning rate, in octaves squared: one that is always added, a
# quarter of an octave; and the largest that noise can cause, as of a uniform draw from the two
# octaves on either side of the best rate.
LEAST_MISS, MOST_MISS = 1 / 16, 4 / 3
# More seeds than anybody trains.
MOST_SEEDS = 8192
# Exponents of a loss curve: the usual one of power laws, and two that it lies between.
USUAL, FLAT, STEEP = 1 / 3, 0.0, 1.0


def compare_pairs(
    differences: Sequence[Floats], choices: Sequence[float] | None = None, *, family: int = 0
) -> list[Difference]:
    r"""Judges the paired differences of several optimizers from one baseline.

    Student's t for each; Holm's rule for all: the :math:`i`-th smallest p-value of :math:`m` is
    compared with :math:`\alpha / (m - i + 1)`, until one is larger. The chance that any verdict is
    wrong is then at most :math:`\alpha`. Each interval has the level at which its comparison was
    decided, or the last one was: it leaves out zero where there is a verdict, and only there.

    Where a seed diverged, Barnard's exact test tells whether the optimizer diverges more often than
    the baseline, which is worse; one-sided, as diverging less often is not enough to be better.

    Args:
        differences: Losses less the baseline's by seed, for each optimizer with shape ``(n,)`` and
            ``n >= 2``; infinite where the optimizer diverged, minus infinite where the baseline
            did, NaN where both did.
        choices: Variance of each mean that comes from the choice of learning rates, which all seeds
            share: :func:`choice_variance` of both optimizers. Default: none.
        family: Number of comparisons that Holm's rule counts. Default: those that are given.

    References:
        | A Simple Sequentially Rejective Multiple Test Procedure (Holm, 1979)
        | https://www.jstor.org/stable/4615733
        | Significance Tests for 2 x 2 Tables (Barnard, 1947)
        | https://doi.org/10.1093/biomet/34.1-2.123
    """
    choices, family = choices or [0.0] * len(differences), family or len(differences)
    p_values = [_p_value(own, choice) for own, choice in zip(differences, choices, strict=True)]
    found: dict[int, Difference] = {}
    level, decided = ALPHA, True
    for i in sorted(range(len(p_values)), key=p_values.__getitem__):
        # Holm's rule: after the first comparison without a verdict no later one gets a verdict.
        if decided:
            level = ALPHA / (family - len(found))
            decided = p_values[i] <= level
        found[i] = _judge(differences[i], choices[i], p_values[i], level, decided=decided)
    return [found[i] for i in range(len(p_values))]


def choice_variance(bend: float, noise: float) -> float:
    r"""Variance of an optimizer's loss that comes from the choice of its learning rate.

    Around the best rate the loss is a parabola, :math:`b e^2 / 2` at an error of :math:`e` octaves.
    The minimum of a parabola through three runs with noise :math:`\sigma^2` has a mean squared
    error of :math:`\sigma^2 / 2 b^2`; the ladder's steps limit it. A quarter of an octave, squared,
    is added because the loss is not exactly a parabola. The square of a normal error has a standard
    deviation of :math:`\sqrt 2` times its mean.

    Args:
        bend: Second difference of the losses around the best rate, :math:`b`.
        noise: Variance of one run's loss, :math:`\sigma^2`.
    """
    if not 0 < bend < math.inf:
        return 0.0
    miss = min(noise / (2 * bend * bend), MOST_MISS) + LEAST_MISS
    return float(2 * (bend / 2 * miss) ** 2)


def _p_value(differences: Floats, choice: float) -> float:
    """P-value of Student's test; of Barnard's for more divergence, where a seed diverged."""
    count = len(differences)
    if not np.isfinite(differences).all():
        own, base = (int((differences == end).sum()) for end in (math.inf, -math.inf))
        # The largest one is at a divergence rate of one half: the excess plus the number of seeds
        # is then binomial.
        ways = (math.comb(2 * count, k) for k in range(count + own - base, 2 * count + 1))
        return sum(ways) / 4.0**count if own > base else 1.0
    mean, error = differences.mean(), _error(differences, choice)
    if error == 0:
        return float(mean == 0)
    return 2 * float(special.stdtr(count - 1, -abs(mean) / error))


def _error(differences: Floats, choice: float) -> float:
    return math.sqrt(float(differences.var(ddof=1)) / len(differences) + choice)


def _limit(level: float, count: int) -> float:
    """Standard errors beyond which Student's two-sided test of ``count`` pairs rejects."""
    return -float(special.stdtrit(count - 1, level / 2))


def _judge(
    differences: Floats, choice: float, p_value: float, level: float, *, decided: bool
) -> Difference:
    count, finite = len(differences), bool(np.isfinite(differences).all())
    mean, low, high = (math.inf,) * 3 if decided else (math.nan, -math.inf, math.inf)
    needed, limits = None, False
    if finite:
        mean, spread = float(differences.mean()), float(differences.std(ddof=1))
        half = _limit(level, count) * _error(differences, choice)
        low, high = mean - half, mean + half
        needed = None if decided else seeds_needed(mean, spread, level, choice)
        limits = not decided and needed is None and choice > spread**2 / MOST_SEEDS
    return Difference(
        mean=mean,
        low=low,
        high=high,
        confidence=1 - level,
        p_value=p_value,
        verdict=("better" if mean < 0 else "worse") if decided else "cannot tell",
        needed=needed and max(needed, count + 1),
        rates_limit=limits,
    )


def seeds_needed(
    mean: float, spread: float, alpha: float = ALPHA, choice: float = 0.0
) -> int | None:
    """Fewest paired seeds with which Student's test finds a true mean in four of five cases.

    Args:
        mean: The true mean difference.
        spread: Standard deviation of one difference.
        alpha: Level of the two-sided test.
        choice: As in :func:`compare_pairs`; more seeds do not lessen it.

    Returns:
        The number; None where it is beyond eight thousand, or the mean is zero.
    """

    def power(count: int) -> float:
        # Beyond 35 standard errors the distribution's tail underflows.
        shift = min(abs(mean) / math.sqrt(spread**2 / count + choice), 35.0)
        return 1 - float(special.nctdtr(count - 1, shift, _limit(alpha, count)))

    if mean == 0 or spread == 0:
        return None if mean == 0 else 2
    found = 2 + bisect_left(range(2, MOST_SEEDS + 1), POWER, key=power)
    return found if found <= MOST_SEEDS else None


def sample_ratio(
    differences: Floats,
    octave: Floats,
    confidence: float,
    *,
    ahead: bool = False,
    choice: float = 0.0,
) -> Ratio | None:
    r"""Samples that the baseline needs for the same loss, over those of the training.

    The baseline's loss falls by :math:`s` with twice the samples. On a power law with exponent
    :math:`\alpha` it changes by :math:`d = -\rho s` with :math:`r` times the samples:

    .. math:: r = (1 - \rho (2^\alpha - 1))^{-1 / \alpha} \to 2^\rho \quad (\alpha \to 0)

    Where the octave lies ahead of the differences' length, :math:`1 - 2^{-\alpha}` takes the place
    of :math:`2^\alpha - 1`. The value takes the exponent to be a third; the interval's ends let it
    be anything from 0 to 1. All lie between a quarter and four: beyond them the baseline's loss
    curve is no guide.

    The interval of :math:`\rho` is Fieller's: all for which Student's test of
    :math:`d + \rho s = 0` does not reject. It leaves out :math:`\rho = 0`, a ratio of one, exactly
    where the interval of :math:`d` leaves out zero.

    Args:
        differences: Losses less the baseline's by seed, shape ``(n,)``.
        octave: By how much the baseline's loss falls with twice the samples, by seed.
        confidence: Confidence of the interval.
        ahead: Whether the octave begins at the differences' length; else it ends there.
        choice: As in :func:`compare_pairs`.

    Returns:
        The ratio; None where a seed diverged, or the baseline's loss did not clearly fall.

    References:
        | Some Problems in Interval Estimation (Fieller, 1954)
        | https://doi.org/10.1111/j.2517-6161.1954.tb00159.x
    """
    count, both = len(differences), np.stack([differences, octave])
    if count < 2 or not np.isfinite(both).all():
        return None
    (mean, fall), covariance = both.mean(1), np.cov(both) / count
    covariance[0, 0] += choice
    # Roots of (mean + rho fall)^2 = t^2 variance(rho), a quadratic equation in rho.
    products = np.outer((mean, fall), (mean, fall))
    (c, b), (_, a) = products - _limit(1 - confidence, count) ** 2 * covariance
    if fall <= 0 or a <= 0:
        return None
    root = math.sqrt(max(0.0, b * b - a * c))
    # Below a loss of one octave the flat law asks for more samples, beyond it the steep one does.
    low, high = (
        [_ratio(rho / a, to, ahead) for to in (FLAT, STEEP)] for rho in (-b - root, -b + root)
    )
    return Ratio(_ratio(-mean / fall, USUAL, ahead), min(low), max(high))


def _ratio(octaves: float, exponent: float, ahead: bool) -> float:
    """Ratio of samples that changes the loss by a number of octaves, between its bounds."""
    if exponent == 0:
        logarithm = octaves
    else:
        left = 1 - octaves * (1 - 2**-exponent if ahead else 2**exponent - 1)
        logarithm = -math.log2(left) / exponent if left > 0 else math.inf
    return float(2.0 ** min(max(logarithm, math.log2(LEAST_RATIO)), math.log2(MOST_RATIO)))
