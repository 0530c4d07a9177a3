"""Verdicts on paired seeds: how often they are wrong, how often they find what is there.

Shares of 1,000 replicates with a fixed seed. Their binomial standard deviation is 0.7 % at 5 % and
1.3 % at 80 %; bounds leave three of them, unless another reason is said.
"""

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from steadygrad.studies.compare.schema import MOST_RATIO
from steadygrad.studies.compare.statistics import (
    choice_variance,
    compare_pairs,
    sample_ratio,
    seeds_needed,
)

REPLICATES = 1000
SPREAD = 0.01
INF, NAN = math.inf, math.nan


def replicates(seed, *shape):
    return np.random.default_rng(seed).normal(size=(REPLICATES, *shape)) * SPREAD


@pytest.mark.parametrize("shared", [0.0, 0.7])
def test_three_optimizers_that_are_the_baseline(shared):
    """All pairs have the baseline's noise in common: Holm's rule holds whatever they share."""
    own, base = replicates(1, 3, 5), replicates(2, 1, 5)
    wrong, sides = 0, []
    for one, common in zip(own, base, strict=True):
        found = compare_pairs(list((1 - shared) * one - shared * common))
        wrong += any(each.verdict != "cannot tell" for each in found)
        sides += [each.verdict for each in found]
    # At most 5 % and three standard deviations; independent ones come near to it.
    assert wrong <= 70
    assert shared or wrong >= 30
    # Neither side is favoured: three standard deviations of what are 150 verdicts at most.
    assert abs(sides.count("better") - sides.count("worse")) <= 3 * math.sqrt(150)


def test_a_true_difference_is_still_found_beside_one_that_is_not():
    """Holm's second step: after a verdict, the next comparison has the level of those left."""
    near = np.array([-0.010, -0.011, -0.009, -0.010, -0.0105])
    base = np.array([1.0, -1.0, 2.0, -2.0, 0.0])
    shift = stats.t.isf(0.04 / 2, 4) * base.std(ddof=1) / math.sqrt(5)
    far, second = compare_pairs([near, base + shift])
    assert (far.verdict, far.confidence) == ("better", 0.975)
    assert (second.verdict, second.confidence) == ("worse", 0.95)
    assert second.p_value == pytest.approx(0.04)
    (first, second) = compare_pairs([base, base + shift])
    assert second.verdict == "cannot tell"
    assert first.confidence == second.confidence == 0.975


@pytest.mark.few(1)
@pytest.mark.parametrize("effect", [3.0, 1.0, 0.5])
def test_the_promised_number_of_seeds_finds_the_difference(effect):
    needed = seeds_needed(effect * SPREAD, SPREAD)
    assert needed is not None

    def found(seeds):
        pairs = replicates(5, seeds) - effect * SPREAD
        return sum(compare_pairs([pair])[0].verdict == "better" for pair in pairs)

    # 80 %, less three standard deviations of 1.3 %.
    assert found(needed) >= 760
    # It is the fewest: with one seed less it is below 80 %, and three standard deviations.
    assert needed == 2 or found(needed - 1) <= 840


def test_seeds_needed_at_its_ends():
    assert seeds_needed(0.0, 1.0) is None
    assert seeds_needed(1.0, 0.0) == 2
    assert seeds_needed(1e-4, 1.0) is None
    # Lehr's rule of thumb, 8 (sd / difference)^2, within a tenth.
    assert seeds_needed(0.05, 1.0) == pytest.approx(8 / 0.05**2, rel=0.1)


def test_the_seeds_that_would_tell_are_at_the_level_of_the_comparison():
    pair = np.random.default_rng(8).normal(size=5) + 0.6
    alone, (first, second) = compare_pairs([pair])[0], compare_pairs([pair, pair])
    # A comparison that has no pairs yet counts as well.
    assert compare_pairs([pair], family=2)[0].needed == first.needed
    mean, spread = pair.mean(), pair.std(ddof=1)
    assert alone.needed == seeds_needed(mean, spread)
    assert first.needed == second.needed == seeds_needed(mean, spread, 0.025) > alone.needed


def test_the_choice_of_rates_widens_an_interval_that_seeds_alone_would_not():
    pair = np.array([-0.1, -0.101, -0.102, -0.1, -0.101])
    (exact,), (wide,) = compare_pairs([pair]), compare_pairs([pair], [0.05**2])
    assert (exact.verdict, wide.verdict) == ("better", "cannot tell")
    assert wide.mean == exact.mean
    # Student's limit of four degrees of freedom.
    assert wide.high - wide.mean == pytest.approx(stats.t.ppf(0.975, 4) * 0.05, rel=1e-3)
    # More seeds would not tell, unless the choice is nearly as certain as they are.
    assert (wide.needed, wide.rates_limit) == (None, True)
    assert seeds_needed(0.1, 0.1) < seeds_needed(0.1, 0.1, choice=0.03**2) < 100
    ratio = sample_ratio(pair, np.full(5, 0.2), 0.95, choice=0.05**2)
    assert ratio.low < 1 < ratio.value < ratio.high


def test_the_variance_of_a_choice_by_simulation():
    """Of the least of a parabola through three runs: the loss there, by its curvature."""
    generator = np.random.default_rng(9)
    bend, noise = 2.0, 0.1
    below, at, above = generator.normal(size=(3, 20_000)) * noise + [[bend / 2], [0], [bend / 2]]
    miss = (below - above) / (2 * (below - 2 * at + above))
    # Beside a quarter of an octave; to the second order in the noise over the bend.
    least = choice_variance(bend, noise**2) ** 0.5 - choice_variance(bend, 0.0) ** 0.5
    assert least**2 == pytest.approx((bend / 2 * miss**2).var(), rel=0.25)
    assert choice_variance(bend, 0.0) == pytest.approx(2 * (bend / 2 / 16) ** 2)
    # Noise can move the best rate by no more than the ladder's steps.
    assert choice_variance(bend, 1e9) == pytest.approx(2 * (bend / 2 * (4 / 3 + 1 / 16)) ** 2)
    assert choice_variance(math.inf, 1.0) == choice_variance(-1.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    {
        "it diverged once": ([-0.1, INF, -0.1], "cannot tell"),
        "it diverged on all three seeds": ([INF, INF, INF], "worse"),
        "it diverged on four of five": ([INF, INF, 0.1, INF, INF], "worse"),
        "the baseline diverged": ([-0.1, -INF, -0.1], "cannot tell"),
        "both, and it once more": ([0.1, NAN, INF], "cannot tell"),
    }.values(),
)
def test_trainings_that_diverged(pairs, verdict):
    # A neighbour's verdict stays its own.
    near = np.array([-0.1, -0.101, -0.102])
    (alone,), (found, other) = (compare_pairs([np.array(pairs), *more]) for more in ([], [near]))
    assert alone.verdict == found.verdict == verdict
    assert other.verdict == "better"
    assert not math.isfinite(found.mean)
    assert found.needed is None
    # Its p-value is the larger one, so that its neighbour is judged at half of the level.
    assert other.confidence == 0.975


@pytest.mark.parametrize(("seeds", "excess"), [(2, None), (3, 3), (5, 4), (10, 5)])
def test_equally_unstable_optimizers_are_rarely_told_apart(seeds, excess):
    """By the sum over all outcomes: at most one in twenty, however often both diverge."""
    told, outcomes = [], [*product(range(seeds + 1), repeat=2)]
    for own, base in outcomes:
        pairs = [INF] * (own - base) + [-INF] * (base - own) + [NAN] * min(own, base)
        pairs += [0.0] * (seeds - len(pairs))
        if own + base and compare_pairs([np.array(pairs)])[0].verdict == "worse":
            told.append((own, base))
    for chance in np.linspace(0.01, 0.99, 50):
        weights = stats.binom.pmf(range(seeds + 1), seeds, chance)
        assert sum(weights[own] * weights[base] for own, base in told) <= 0.05
    # With the fewest seeds nothing is told, with more it need not be all of them.
    assert min((own - base for own, base in told), default=None) == excess


def test_differences_without_any_spread():
    same, less = compare_pairs([np.zeros(3), np.full(3, -0.25)])
    assert (same.verdict, same.low, same.high, same.needed) == ("cannot tell", 0, 0, None)
    assert (less.verdict, less.low, less.high) == ("better", -0.25, -0.25)


@pytest.mark.parametrize(("true", "power"), [(0.6, 0.1), (0.85, 0.3), (1.15, 0.8), (1.5, 0.1)])
def test_ratios_cover_the_true_one_on_a_power_law(true, power):
    """An optimizer that is as good as the baseline with ``true`` times the samples."""
    mean, octave = true**-power - 1, 0.5**-power - 1
    # The noise of a loss is a twentieth of what twice the samples gain.
    noise = replicates(7, 3, 5) / SPREAD * octave / 20
    found = [
        sample_ratio(mean + own - base, octave + short - base, 0.95) for own, base, short in noise
    ]
    # 95 % less three standard deviations.
    assert sum(each.low <= true <= each.high for each in found) >= 930
    # The exponent of a third in place of the true one costs at most a tenth.
    assert np.median([each.value for each in found]) == pytest.approx(true, rel=0.1)


def test_a_ratio_by_hand():
    # Half of an octave better.
    exact = sample_ratio(np.full(3, -0.1), np.full(3, 0.2), 0.95)
    assert exact.value == pytest.approx((1 - 0.5 * (2 ** (1 / 3) - 1)) ** -3)
    assert (exact.low, exact.high) == pytest.approx((2**0.5, 2.0))
    # Half of what the samples after its end gain, as long as it has trained.
    exact = sample_ratio(np.full(3, -0.1), np.full(3, 0.2), 0.95, ahead=True)
    assert exact.value == pytest.approx((1 - 0.5 * (1 - 2 ** (-1 / 3))) ** -3)
    # Half of an octave worse, between a straight line of the logarithm and 1 / samples.
    exact = sample_ratio(np.full(3, 0.1), np.full(3, 0.2), 0.95)
    assert (exact.low, exact.high) == pytest.approx((1 / 1.5, 2**-0.5))
    # One and a half octaves worse: there the flat law asks for more samples than the steep one.
    exact = sample_ratio(np.full(3, 0.3), np.full(3, 0.2), 0.95)
    assert (exact.low, exact.high) == pytest.approx((2**-1.5, 1 / 2.5))
    assert exact.low < exact.value < exact.high
    # Fieller's interval as the set of ratios that Student's test does not reject.
    pairs, octave = np.array([-0.1, -0.05, -0.12, -0.07]), np.array([0.2, 0.25, 0.19, 0.22])
    found = sample_ratio(pairs, octave, 0.9)
    for octaves in (math.log2(found.low), 1 - 1 / found.high):
        tested = stats.ttest_1samp(pairs + octaves * octave, 0.0).pvalue
        assert tested == pytest.approx(0.1)
    # Beyond the curve it is a bound.
    for sign, bound in ((-1, MOST_RATIO), (1, 1 / MOST_RATIO)):
        found = sample_ratio(sign * np.array([1.0, 1.1, 0.9]), np.array([0.1, 0.11, 0.09]), 0.95)
        assert (found.value, found.low, found.high) == (bound,) * 3


@pytest.mark.parametrize(
    ("pairs", "octave"),
    {
        "flat": ([0.1, 0.1, 0.1], [0.1, -0.1, 0.05]),
        "rising": ([0.1, 0.1, 0.1], [-0.1, -0.1, -0.1]),
        "it diverged": ([0.1, INF, 0.1], [0.1, 0.1, 0.1]),
        "the short run diverged": ([0.1, 0.1, 0.1], [0.1, INF, 0.1]),
        "no pair": ([], []),
        "one pair": ([0.1], [0.1]),
    }.values(),
)
def test_no_ratio_without_a_curve(pairs, octave):
    assert sample_ratio(np.array(pairs), np.array(octave), 0.95) is None
