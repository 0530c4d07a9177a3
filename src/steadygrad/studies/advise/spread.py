"""How the losses of branches might have come out with other noise."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steadygrad.studies.advise.curves import Decline, DeclineFit

__all__ = ["Noise", "Yardstick", "mean_loss"]


@dataclass(frozen=True)
class Noise:
    """Noise of the branches' final losses.

    Attributes:
        variance: Of one loss, batch size and repeat effects taken out.
        freedom: Degrees of freedom of that variance; 0 when it cannot be estimated.
        repeats: Losses in a mean.
        common: Standard deviation of what the repeats' data orders add to all means together.
    """

    variance: float
    freedom: int
    repeats: int
    common: float

    @classmethod
    def of(cls, losses: Mapping[int, Sequence[float]]) -> "Noise":
        """Estimates it from losses by batch size, each in the order of the repeats."""
        rows = [row for row in losses.values() if all(map(math.isfinite, row))]
        repeats = len(next(iter(losses.values())))
        freedom = max(0, len(rows) - 1) * (repeats - 1)
        if not freedom:
            return cls(0.0, 0, repeats, 0.0)
        grand = mean_loss([mean_loss(row) for row in rows])
        columns = [mean_loss([row[r] for row in rows]) - grand for r in range(repeats)]
        square = math.fsum(
            (loss - mean_loss(row) - column) ** 2
            for row in rows
            for loss, column in zip(row, columns, strict=True)
        )
        common = math.fsum(column**2 for column in columns) / (repeats - 1) / repeats
        return cls(square / freedom, freedom, repeats, math.sqrt(common))

    def draw_sigma(self, generator: random.Random) -> float:
        """A standard deviation of a mean loss, as uncertain as it is."""
        return math.sqrt(_redrawn(self.variance, self.freedom, generator) / self.repeats)


class Yardstick:
    """The smooth curve through the losses of the smallest batch size.

    Args:
        curves: ``(samples, loss)`` of each repeat, at the same samples.

    Attributes:
        curve: The fit through the means of the repeats.
    """

    def __init__(self, curves: Sequence[Sequence[tuple[float, float]]]) -> None:
        columns = [[loss for _, loss in column] for column in zip(*curves, strict=True)]
        self._means = [mean_loss(column) for column in columns]
        self._fit = DeclineFit([samples for samples, _ in curves[0]])
        self.curve: Decline = self._fit(self._means)
        self._repeats = len(curves)
        # The last one has a noise of its own: it is an average, and all batch sizes share it.
        before = list(zip(columns[:-1], self._means, strict=False))
        self._freedom = len(before) * (self._repeats - 1)
        square = math.fsum((loss - mean) ** 2 for column, mean in before for loss in column)
        self._variance = square / self._freedom if self._freedom else 0.0

    def draw(self, generator: random.Random, end: float) -> Decline:
        """The curve as other noise would have made it.

        Args:
            generator: Of the draws.
            end: What the draw adds to the last mean.
        """
        variance = _redrawn(self._variance, self._freedom, generator)
        sigma = math.sqrt(variance / self._repeats)
        drawn = [mean + generator.gauss(0, sigma) for mean in self._means[:-1]]
        return self._fit([*drawn, self._means[-1] + end])


def _redrawn(variance: float, freedom: int, generator: random.Random) -> float:
    """What a variance may be, given so few degrees of freedom: a scaled inverse chi-square."""
    return variance * freedom / generator.gammavariate(freedom / 2, 2) if freedom else 0.0


def mean_loss(losses: Sequence[float]) -> float:
    """The mean, or infinity when one of them is not finite."""
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf
