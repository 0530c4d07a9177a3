"""The model of extra samples over batch sizes and over training, on which all advice rests."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steadygrad.studies.advise.critical import Critical
from steadygrad.studies.advise.curves import crossing, isotonic, relative

__all__ = ["Measured", "Surface", "extended"]

NODES = 64


@dataclass(frozen=True)
class Measured:
    """A point of training whose critical batch size is known.

    Attributes:
        samples: Samples seen there.
        branch_samples: Samples of each branch from there.
        critical: What the branches showed.
    """

    samples: int
    branch_samples: int
    critical: Critical

    @property
    def centre(self) -> float:
        """Samples seen halfway through the branches: what they speak of."""
        return self.samples + self.branch_samples / 2


class Surface:
    """Extra samples at any batch size, at any time of training.

    Between the points the excess is interpolated over the reciprocal of the samples seen, which is
    right for a critical batch size that stays, or that grows in proportion. Before the first one
    nothing is measured; there it is taken to have grown in proportion from nothing, which is
    about how Merrill et al. (2025) saw it begin, or to have been the same from the start, which is
    the most that it can have been. After the last one it stays.

    Args:
        points: In the order of training; at least one.
        rows: The excess of each batch size, for each point; what was measured by default.
        grows: Which of the two is assumed before the first point.

    Attributes:
        sizes: Batch sizes tried, ascending.
        end: Samples in the whole run.
        nodes: Samples seen, on a logarithmic grid from the first step to the end, and at the
            points' centres, where the model has its corners.
    """

    def __init__(
        self,
        points: Sequence[Measured],
        rows: Sequence[Sequence[float]] | None = None,
        *,
        grows: bool = True,
    ) -> None:
        self._points, self._grows = points, grows
        rows = [point.critical.excess for point in points] if rows is None else rows
        pairs = zip(points, rows, strict=True)
        self._curves = [extended(point.critical.sizes, isotonic(row)) for point, row in pairs]
        self._centres = [point.centre for point in points]
        self.sizes = max((point.critical.sizes for point in points), key=len)
        self.end = points[-1].samples + points[-1].branch_samples
        start = float(min(self.sizes[0], points[0].samples))
        grid = (start * (self.end / start) ** (node / NODES) for node in range(NODES + 1))
        self.nodes = sorted({*grid, *self._centres})
        self._table = [[self.excess(size, seen) for size in self.sizes] for seen in self.nodes]

    def excess(self, size: float, seen: float) -> float:
        """Extra samples of a batch size, as a fraction, after so many samples."""
        centres = self._centres
        if seen <= centres[0]:
            return self._curves[0](size * centres[0] / seen if self._grows else size)
        if seen >= centres[-1]:
            return self._curves[-1](size)
        i = bisect_right(centres, seen) - 1
        part = (1 / centres[i] - 1 / seen) / (1 / centres[i] - 1 / centres[i + 1])
        return (1 - part) * self._curves[i](size) + part * self._curves[i + 1](size)

    def mean(self) -> list[float]:
        """Mean excess of each size over all samples of the run, relative to the smallest."""
        means = [self._mean(column) for column in range(len(self.sizes))]
        return isotonic(relative(means))

    def _mean(self, column: int) -> float:
        # A batch's first step cannot be better or worse than another's: nothing is learned before.
        start = float(min(self.sizes[column], self._points[0].samples))
        edges = [a * math.sqrt(b / a) for a, b in zip(self.nodes, self.nodes[1:], strict=False)]
        total, left = 0.0, start
        for row, right in zip(self._table, [*edges, self.nodes[-1]], strict=True):
            right = max(left, right)
            total += row[column] * (right - left)
            left = right
        return total / self.end

    def tolerable(self, tolerance: float) -> list[float]:
        """At each node the largest batch size within the tolerance, never decreasing.

        Where it would decrease it is pooled: the geometric mean over a stretch of the grid, as
        what is uncertain about a batch size is a factor. At most the largest size tried.
        """
        sizes = [float(size) for size in self.sizes]
        rows = (relative(row) for row in self._table)
        found = [min(crossing(sizes, row, tolerance), sizes[-1]) for row in rows]
        # Before the first point, where the model extrapolates, it can only have been smaller.
        for node in range(bisect_right(self.nodes, self._centres[0]) - 1, -1, -1):
            found[node] = min(found[node], found[node + 1])
        logs = [math.log(size) for size in found]
        # What needs no pooling stays as it is, to the last bit.
        return [
            size if fit == log else math.exp(fit)
            for size, log, fit in zip(found, logs, isotonic(logs), strict=True)
        ]


def extended(sizes: Sequence[int], excess: Sequence[float]) -> Callable[[float], float]:
    """Excess as a function of any batch size.

    Linear between the sizes tried, as the trade-off is; beyond the last, on the trade-off through
    the first and the last, and never less than the last.

    Args:
        sizes: Batch sizes tried, ascending.
        excess: Their extra samples, non-decreasing.
    """

    def at(size: float) -> float:
        if size >= sizes[-1]:
            line = excess[-1] * (size - sizes[0]) / (sizes[-1] - sizes[0])
            return max(excess[-1], line)
        index = max(0, bisect_right(sizes, size) - 1)
        part = max(0.0, (size - sizes[index]) / (sizes[index + 1] - sizes[index]))
        return excess[index] + (excess[index + 1] - excess[index]) * part

    return at
