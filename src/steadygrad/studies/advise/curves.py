"""Small monotone fits in plain Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

__all__ = [
    "Decline",
    "DeclineFit",
    "between",
    "crossing",
    "fit_decline",
    "fit_tradeoff",
    "isotonic",
    "relative",
]


POWERS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Decline:
    r"""A smooth, falling loss curve: :math:`L(s) = a - c\,(1 - (1 + s/s_0)^{-p}) / p`.

    With :math:`p = 0` this is :math:`a - c \ln(1 + s/s_0)`: language modelling. A large ``p`` comes
    near an exponential approach to a floor, a large :math:`s_0` near a straight line.

    Attributes:
        start: :math:`a`.
        fall: :math:`c`; not positive when the loss did not fall.
        scale: :math:`s_0`, in samples.
        power: :math:`p`.
    """

    start: float
    fall: float
    scale: float
    power: float

    def __call__(self, samples: float) -> float:
        """The loss after ``samples``."""
        return self.start - self.fall * _progress(samples, self.scale, self.power)

    def samples_at(self, loss: float) -> float:
        """After how many samples the curve has a loss; infinite if it never has."""
        if self.fall <= 0:
            return math.inf
        progress = (self.start - loss) / self.fall
        if self.power == 0:
            return self.scale * math.expm1(progress) if progress < 700 else math.inf
        rest = 1 - self.power * progress
        return float(self.scale * (rest ** (-1 / self.power) - 1)) if rest > 0 else math.inf


def _progress(samples: float, scale: float, power: float) -> float:
    if power == 0:
        return math.log1p(samples / scale)
    return float((1 - (1 + samples / scale) ** -power) / power)


def fit_decline(points: Sequence[tuple[float, float]]) -> Decline:
    """Fits a curve through ``(samples, loss)`` pairs by least squares."""
    return DeclineFit([samples for samples, _ in points])([loss for _, loss in points])


class DeclineFit:
    """Fits curves through losses at the same places, over and over.

    Every shape on a grid is a straight line in its own progress, so that all that does not depend
    on the losses is worked out once.

    Args:
        samples: Where the losses are known, in samples.
    """

    def __init__(self, samples: Sequence[float]) -> None:
        longest = max(samples)
        shapes = [(longest * 2.0 ** (half / 2), p) for p in POWERS for half in range(-8, 9)]
        self._lines = [_Line.of(samples, scale, power) for scale, power in shapes]

    def __call__(self, losses: Sequence[float]) -> Decline:
        """The curve with the least squared error at these losses."""
        mean = math.fsum(losses) / len(losses)
        rest = [loss - mean for loss in losses]
        slopes = [sum(map(mul, line.weights, rest)) for line in self._lines]
        # What is left of the squared losses is least where the line takes most of them away.
        taken = [slope**2 * line.spread for slope, line in zip(slopes, self._lines, strict=True)]
        best = max(range(len(taken)), key=taken.__getitem__)
        line, slope = self._lines[best], slopes[best]
        return Decline(mean - slope * line.mean, -slope, line.scale, line.power)


@dataclass(frozen=True)
class _Line:
    """The regression on the progress of one shape: ``slope = weights @ losses``."""

    scale: float
    power: float
    mean: float
    spread: float
    weights: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float], scale: float, power: float) -> "_Line":
        xs = [_progress(place, scale, power) for place in samples]
        mean = math.fsum(xs) / len(xs)
        spread = math.fsum((x - mean) ** 2 for x in xs)
        weights = tuple((x - mean) / spread if spread > 0 else 0.0 for x in xs)
        return cls(scale, power, mean, spread, weights)


def isotonic(values: Sequence[float]) -> list[float]:
    """The nearest non-decreasing sequence, by pooling adjacent violators."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            last, n = blocks.pop()
            mean, count = (last * n + mean * count) / (n + count), n + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def relative(values: Sequence[float]) -> list[float]:
    """Excesses over the first one's samples, which need not be zero once values are pooled."""
    return [(1 + value) / (1 + values[0]) - 1 for value in values]


def crossing(sizes: Sequence[float], values: Sequence[float], level: float) -> float:
    """Largest size whose value is within ``level``; infinite when all of them are.

    Args:
        sizes: Ascending batch sizes.
        values: Non-decreasing; between sizes they are linear in the size, as the trade-off
            between steps and samples is.
        level: What a value may be at most.
    """
    low, high = between(sizes, values, level)
    if low == high or math.isinf(high):
        return high
    above = sizes.index(high)
    part = (level - values[above - 1]) / (values[above] - values[above - 1])
    return float(low + (high - low) * part)


def between(sizes: Sequence[float], values: Sequence[float], level: float) -> tuple[float, float]:
    """The neighbouring sizes between which values come to exceed ``level``.

    The first size twice when even its value does; infinity follows the last.
    """
    above = next((i for i, value in enumerate(values) if value > level), len(values))
    return sizes[max(0, above - 1)], sizes[above] if above < len(sizes) else math.inf


def fit_tradeoff(sizes: Sequence[float], excess: Sequence[float], cap: float) -> float:
    r"""Fits :math:`B_c` in :math:`1 + x = (1 + B/B_c) / (1 + B_0/B_c)`, in samples.

    Args:
        sizes: Batch sizes ``B``; the first is :math:`B_0`.
        excess: Extra samples ``x`` of each, as fractions.
        cap: Excesses of at least this are known only to be that large.

    Returns:
        The least-squares :math:`B_c` in logarithms; infinite when no size needed extra samples.

    References:
        | An Empirical Model of Large-Batch Training (McCandlish et al., 2018)
        | https://arxiv.org/abs/1812.06162
    """
    low, high = math.log(sizes[0] / 64), math.log(sizes[-1] * 64)

    def error(log_critical: float) -> float:
        critical = math.exp(log_critical)
        total = 0.0
        for size, extra in zip(sizes, excess, strict=True):
            expected = math.log1p(size / critical) - math.log1p(sizes[0] / critical)
            miss = math.log1p(extra) - expected
            total += max(0.0, miss) ** 2 if extra >= cap else miss**2
        return total

    for _ in range(3):
        step = (high - low) / 24
        best = min((low + step * i for i in range(25)), key=error)
        low, high = best - step, best + step
    return math.inf if best > math.log(sizes[-1] * 48) else math.exp(best)
