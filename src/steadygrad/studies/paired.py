r"""One test of paired differences and one ladder of rates for all studies.

The test stays valid however often one looks.

With :math:`S` and :math:`V` the sums of :math:`d_i - \mu` and of its squares over :math:`n` pairs,
the interval has all :math:`\mu` with

.. math:: (1 + g n)^{-1/2} (1 - g S^2 / ((1 + g n) W))^{-(n + \nu) / 2} < 1 / \alpha

where :math:`W = V + \nu s^2` for a variance :math:`s^2` that comes from elsewhere, with
:math:`\nu` degrees of freedom (else :math:`\nu = 0`). For normal differences all intervals, however
many, hold together with the probability :math:`1 - \alpha`. :math:`g` is the variance of the
effects, over that of one difference, at which the test is fastest.

``benchmarks/ab_truth.py`` tries other distributions, other values of :math:`g`, and other tests.

References:
    | Anytime-Valid t-Tests and Confidence Sequences for Gaussian Means with Unknown Variance
    | (Wang and Ramdas, 2024), https://arxiv.org/abs/2310.03722
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadygrad.studies.folder import Results
from steadygrad.studies.schema import TaskInfo, Training

Floats = NDArray[np.float64]

ALPHA = 0.05
# Of all values, 2 takes the fewest pairs for effects of half a deviation to four of them together.
EFFECT_VARIANCE = 2.0
# Pairs of the first look, before which nothing can be told, and of the last.
FIRST, MOST = 4, 64
# More pairs than anybody runs.
BEYOND = 10_000

# Octaves around the best rate; the first three that are tried are around the arm's own.
NEAR = (-1, 0, 1)
# Most octaves from the arm's own rate that a search goes.
FARTHEST = 6
# The seeds of a search: no pair has one, so that no choice favours an arm.
SEEDS = range(MOST, MOST + 2)
# Trainings that most searches take.
USUAL = 4 * len(SEEDS)


def next_look(pairs: int, most: int = MOST) -> int:
    """Pairs of the next look, a quarter more and at most so many; 0 where there is none.

    Trials up to a look can run side by side, and all that they change is known at the look.
    """
    return min(max(FIRST, pairs + max(1, pairs // 4)), most) if pairs < most else 0


def looked(pairs: int) -> int:
    """Pairs of the last look; 0 before the first."""
    look = 0
    while 0 < (following := next_look(look)) <= pairs:
        look = following
    return look


@dataclass(frozen=True)
class Prior:
    """A variance of the differences that comes from elsewhere.

    ``freedom``: the degrees of freedom that it counts for.

    References:
        | Linear Models and Empirical Bayes Methods for Assessing Differential Expression
        | (Smyth, 2004), https://doi.org/10.2202/1544-6115.1027
    """

    variance: float = 0.0
    freedom: float = 0.0


NOTHING = Prior()


def half_width(
    pairs: Floats, variance: Any, alpha: float, prior: Prior = NOTHING, choice: float = 0.0
) -> Floats:
    """From the mean to the interval's ends; infinite for too few pairs.

    ``variance``: that of the pairs' own differences; it broadcasts with ``pairs``. ``choice``:
    variance that all differences have in common, such as that of learning rates that were chosen by
    noisy runs: the interval is as many standard errors wide, of a mean that has it too.
    """
    g, freedom = EFFECT_VARIANCE, pairs + prior.freedom
    limit = -np.expm1(-(2 * math.log(1 / alpha) + np.log1p(g * pairs)) / freedom)
    margin = g * pairs / (1 + g * pairs) - limit
    squares = prior.freedom * prior.variance + (pairs - 1) * variance
    squares = squares + (freedom - 1) * pairs * choice
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = limit / (pairs * margin)
    return np.asarray(np.where(margin > 0, np.sqrt(np.abs(ratio) * squares), np.inf))


def intervals(differences: Floats, alpha: float, choice: float = 0.0) -> tuple[Floats, Floats]:
    """Mean and half width after each pair, for differences of shape ``(*, pairs)``."""
    n = np.arange(1.0, 1 + differences.shape[-1])
    # From the first one: squares of large numbers would lose small deviations.
    shifted = differences - differences[..., :1]
    mean = shifted.cumsum(-1) / n
    squares = np.maximum((shifted**2).cumsum(-1) - n * mean**2, 0.0)
    variance = squares / np.maximum(n - 1, 1)
    return differences[..., :1] + mean, half_width(n, variance, alpha, choice=choice)


def interval(
    differences: Floats, alpha: float = ALPHA, prior: Prior = NOTHING
) -> tuple[Floats, Floats, Floats]:
    """Mean of differences of shape ``(*, pairs)``, and the ends of its interval."""
    pairs, mean = differences.shape[-1], differences.mean(-1)
    half = half_width(np.float64(pairs), differences.var(-1, ddof=1), alpha, prior)
    return mean, np.asarray(mean - half), np.asarray(mean + half)


def pairs_needed(
    mean: float,
    variance: float,
    alpha: float,
    smallest: float = 0.0,
    prior: Prior = NOTHING,
    choice: float = 0.0,
) -> int | None:
    """Pairs that should tell if mean and variance stay as they are; None beyond ten thousand.

    ``smallest``: the smallest difference that matters.
    """
    half = half_width(np.arange(1.0, BEYOND + 1), variance, alpha, prior, choice)
    tells = (half < abs(mean)) | (abs(mean) + half <= smallest)
    return 1 + int(tells.argmax()) if tells.any() else None


class Course(NamedTuple):
    """A comparison after each pair: arrays of the shape ``(*, pairs)``.

    ``mean`` is B's minus A's: of the metric or, once a run has ``failed``, of the share of failed
    runs; ``half`` is the half width of its interval.
    """

    mean: Floats
    half: Floats
    failed: Any


def compare(a: Floats, b: Floats, alpha: float, choice: float = 0.0) -> Course:
    """Compares metrics pair by pair; NaN is a failed run. ``choice``: of :func:`half_width`."""
    failed = np.logical_or.accumulate(np.isnan(a) | np.isnan(b), -1)
    apart, first, rounding = b - a, (b - a)[..., :1], 1e-12 * np.maximum(abs(a), abs(b))
    apart = np.where(abs(apart - first) <= rounding, first, apart)
    of_metric = intervals(np.where(failed, 0.0, apart), alpha, choice)
    of_failures = intervals(np.isnan(b).astype(float) - np.isnan(a), alpha)
    mean, half = (np.where(failed, *ends) for ends in zip(of_failures, of_metric, strict=True))
    return Course(mean, half, failed)


class Told(NamedTuple):
    """A comparison of B with A after all pairs."""

    # Mean of B's less A's metric or, once a run has failed, of the shares of failed runs.
    mean: float
    low: float  # lower end of its interval; `high` is the upper one
    high: float
    variance: float  # of one difference; NaN by a single pair
    lost: tuple[int, int]  # failed runs of A and of B
    is_told: bool  # whether the interval leaves out zero


def tell(a: Floats, b: Floats, alpha: float = ALPHA, choice: float = 0.0) -> Told:
    """Compares metrics of one pair or more, NaN of a failed run: the end of a :class:`Course`."""
    mean, half, failed = (part[-1].item() for part in compare(a, b, alpha, choice))
    lost = np.isnan([a, b])
    apart = 1.0 * lost[1] - lost[0] if failed else b - a
    variance = float(apart.var(ddof=1)) if len(apart) > 1 else math.nan
    failures = int(lost[0].sum()), int(lost[1].sum())
    return Told(mean, mean - half, mean + half, variance, failures, abs(mean) > half)


def judged(
    pairs: int, judge: Callable[[int], Any], most: int = MOST, first: int = FIRST
) -> tuple[Any, int]:
    """The verdict of the last look, None before the first, and how many pairs to train.

    ``judge`` gives the verdict by so many of the ``pairs`` that are there. The pairs to train are
    those of the next look; of the last one, once a verdict ``is_final`` or there are the ``most``.
    The ``first`` look needs enough pairs for a verdict: more where several comparisons share an
    error.
    """
    found, needed = None, first
    while needed <= pairs:
        found = judge(needed)
        if found.is_final or needed >= most:
            break
        needed = next_look(needed, most)
    return found, needed


class Evidence:
    """The trainings of a run: of each arm, over each length, at each rate, by seed."""

    def __init__(self, header: Any, results: Results) -> None:
        self.header, self.plan, self.settings = header, header.plan, header.settings
        self.task: TaskInfo = header.task
        self._found: dict[tuple[int, int, float], dict[int, Training]] = {}
        for one in results.select(Training):
            self._found.setdefault((one.arm, one.samples, one.step), {})[one.seed] = one

    def trainings(self, arm: int, samples: int, step: float = 0.0) -> Mapping[int, Training]:
        """Trainings by number of the seed, at so many octaves from the arm's own rate."""
        return self._found.get((arm, samples, step), {})


def losses_of(*arms: Mapping[int, Training]) -> Floats:
    """Losses of arms, NaN of a failed run, in their whole pairs before the first gap."""
    pairs = next(seed for seed in count() if any(seed not in runs for runs in arms))
    found = np.array([[runs[seed].loss for seed in range(pairs)] for runs in arms], float)
    return np.where(np.isfinite(found), found, np.nan)


class Ladder:
    """The search for an arm's learning rate: a ladder of octaves, and a parabola through the best.

    It has three octaves, from ``start`` on, and more until the best one has a worse one on either
    side. ``losses`` are means by octave above the arm's own rate, ascending; None: not trained yet.
    """

    def __init__(self, evidence: Evidence, arm: int, samples: int, start: int = 0) -> None:
        self._evidence, self._arm, self._samples = evidence, arm, samples
        steps = [max(1 - FARTHEST, min(start, FARTHEST - 1)) + side for side in NEAR]
        while True:
            self.losses = {step: self._loss(step) for step in steps}
            if None in self.losses.values():
                break
            if self.best == steps[0] > -FARTHEST:
                steps.insert(0, self.best - 1)
            elif self.best == steps[-1] < FARTHEST:
                steps.append(self.best + 1)
            else:
                break

    def _tried(self, step: float) -> Mapping[int, float]:
        runs = self._evidence.trainings(self._arm, self._samples, step)
        return {seed: run.loss for seed, run in runs.items()}

    def _loss(self, step: int) -> float | None:
        found = self._tried(step)
        return fmean(found[seed] for seed in SEEDS) if {*SEEDS} <= {*found} else None

    @property
    def missing(self) -> Iterator[tuple[int, int]]:
        """Octaves and seeds that are to be trained next."""
        for step in self.losses:
            found = self._tried(step)
            yield from ((step, seed) for seed in SEEDS if seed not in found)

    @property
    def best(self) -> int:
        """The octave of the lowest loss; of equals, the one nearest to the arm's own rate.

        The lowest one where trainings diverged at all of them.
        """
        known = {step: loss for step, loss in self.losses.items() if loss is not None}
        if math.inf == min(known.values()):
            return min(known)
        return min(known, key=lambda step: (known[step], abs(step), step))

    @property
    def bend(self) -> float:
        """Second difference of the losses around the best octave; infinite if one of them is."""
        below, at, above = self._near()
        return below - 2 * at + above if at < math.inf else math.inf

    def _near(self) -> list[float]:
        found = (self.losses.get(self.best + side) for side in NEAR)
        return [math.inf if loss is None else loss for loss in found]

    @property
    def minimum(self) -> float | None:
        """Octaves above the arm's own rate at which the loss is lowest; None while not known.

        It is where the parabola through the lowest loss and its neighbours has its minimum, to a
        quarter of an octave, so that no arm profits from where its ladder begins.
        """
        if None in self.losses.values():
            return None
        below, _, above = self._near()
        is_bowl = 0 < self.bend < math.inf
        return self.best + (round(2 * (below - above) / self.bend) / 4 if is_bowl else 0.0)

    @property
    def tuned(self) -> float | None:
        """The minimum, or a lower rate where a training at that one diverged."""
        step = self.minimum
        while step is not None and step > -FARTHEST and math.inf in self._tried(step).values():
            step -= 0.25
        return step
