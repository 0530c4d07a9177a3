"""From critical batch sizes along training to one batch size, and to a schedule."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steadygrad.formulas.batch_size import learning_rate, samples_ratio, steps_ratio
from steadygrad.studies.advise.critical import Critical
from steadygrad.studies.advise.curves import crossing, fit_tradeoff, isotonic

__all__ = ["Measured", "WholeRun", "schedule", "tradeoff_rows", "whole_run"]

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


@dataclass(frozen=True)
class WholeRun:
    """One batch size for a whole run from scratch.

    Attributes:
        samples: Length of the run.
        value: Largest batch size whose mean excess over the run is within the tolerance.
        low: Lower end of its 95% interval.
        high: Upper end; infinite when the largest batch size tried may still be within it.
        batch_size: ``value``, rounded down to 1, 1.5, 2, 3, 4, 6, ... times the smallest batch.
        sizes: Batch sizes tried, ascending.
        excess: Mean extra samples of each over the run, relative to the smallest.
        fitted: Critical batch size of the trade-off that fits these excesses.
    """

    samples: int
    value: float
    low: float
    high: float
    batch_size: int
    sizes: tuple[int, ...]
    excess: tuple[float, ...]
    fitted: float

    @property
    def excess_here(self) -> float:
        """Mean extra samples at the recommended batch size."""
        return _extended(self.sizes, self.excess)(self.batch_size)


def whole_run(points: Sequence[Measured], tolerance: float) -> WholeRun:
    """The largest batch size whose excess, averaged over all samples of a run, is tolerable.

    Between the points the excess is interpolated over the reciprocal of the samples seen, which is
    right for a critical batch size that stays, or that grows in proportion. Before the first one
    nothing is measured; there it is taken to have grown in proportion from nothing, which is
    about how Merrill et al. (2025) saw it begin.

    Args:
        points: In the order of training; at least one.
        tolerance: Extra samples that are acceptable, as a fraction.
    """
    end = points[-1].samples + points[-1].branch_samples
    sizes = max((point.critical.sizes for point in points), key=len)

    tried = [float(size) for size in sizes]
    excess = _average(points, [point.critical.excess for point in points], sizes, end)
    drawn = sorted(
        crossing(tried, _average(points, rows, sizes, end), tolerance)
        for rows in zip(*(point.critical.draws[::2] for point in points), strict=True)
    )
    value, cut = min(crossing(tried, excess, tolerance), tried[-1]), len(drawn) // 40
    return WholeRun(
        samples=end,
        value=value,
        low=min(drawn[cut], tried[-1]),
        high=drawn[-1 - cut],
        batch_size=_floor(value, sizes[0]),
        sizes=sizes,
        excess=tuple(excess),
        fitted=fit_tradeoff(sizes, excess, math.inf),
    )


def _average(
    points: Sequence[Measured],
    rows: Sequence[Sequence[float]],
    sizes: Sequence[int],
    end: int,
) -> list[float]:
    """Mean excess of each size over a run, relative to the smallest, from a row for each point."""
    pairs = zip(points, rows, strict=True)
    curves = [_extended(point.critical.sizes, isotonic(row)) for point, row in pairs]
    means = [_mean_excess(points, curves, size, end) for size in sizes]
    return isotonic([(1 + mean) / (1 + means[0]) - 1 for mean in means])


def _extended(sizes: Sequence[int], excess: Sequence[float]) -> Callable[[float], float]:
    """Excess as a function of any batch size.

    Linear between the sizes tried, as the trade-off is; beyond the last, on the trade-off through
    the first and the last.
    """

    def at(size: float) -> float:
        if size >= sizes[-1]:
            return excess[-1] * (size - sizes[0]) / (sizes[-1] - sizes[0])
        index = max(0, bisect_right(sizes, size) - 1)
        part = max(0.0, (size - sizes[index]) / (sizes[index + 1] - sizes[index]))
        return excess[index] + (excess[index + 1] - excess[index]) * part

    return at


def _mean_excess(
    points: Sequence[Measured],
    curves: Sequence[Callable[[float], float]],
    size: int,
    end: int,
) -> float:
    """Average over the samples of a run, by the midpoint rule on a logarithmic grid."""
    # A batch's first step cannot be better or worse than another's: nothing is learned before it.
    start = float(min(size, points[0].samples))
    ratio = (end / start) ** (1 / NODES)
    total = 0.0
    for node in range(NODES):
        left = start * ratio**node
        total += _excess_at(points, curves, size, left * math.sqrt(ratio)) * left * (ratio - 1)
    return total / end


def _excess_at(
    points: Sequence[Measured],
    curves: Sequence[Callable[[float], float]],
    size: int,
    seen: float,
) -> float:
    centres = [point.centre for point in points]
    if seen <= centres[0]:
        return curves[0](size * centres[0] / seen)
    for i in range(len(points) - 1):
        if seen <= centres[i + 1]:
            part = (1 / centres[i] - 1 / seen) / (1 / centres[i] - 1 / centres[i + 1])
            return (1 - part) * curves[i](size) + part * curves[i + 1](size)
    return curves[-1](size)


def schedule(points: Sequence[Measured], lr: float, rule: str) -> list[dict[str, Any]]:
    """A batch size for each stretch of training, never decreasing.

    Args:
        points: In the order of training.
        lr: Learning rate tuned at the smallest batch size.
        rule: How it follows the batch size.

    Returns:
        ``{"from_samples", "batch_size", "lr"}`` wherever the batch size changes, first from 0.
    """
    rows: list[dict[str, Any]] = []
    for point in points:
        base = point.critical.sizes[0]
        size = _floor(point.critical.value, base)
        if not rows or size > rows[-1]["batch_size"]:
            rate = learning_rate(lr, size, base, rule)
            start = point.samples if rows else 0
            rows.append({"from_samples": start, "batch_size": size, "lr": rate})
    return rows


def tradeoff_rows(critical: float, sizes: Sequence[int]) -> list[dict[str, float]]:
    """Steps and samples at each batch size, relative to the least possible of either."""
    return [
        {
            "batch_size": size,
            "steps_ratio": steps_ratio(float(size), critical),
            "samples_ratio": samples_ratio(float(size), critical),
        }
        for size in sizes
    ]


def _floor(value: float, base: int) -> int:
    """The largest of 1, 1.5, 2, 3, 4, 6, ... times ``base`` that is at most ``value``.

    At least ``base``. Powers of two alone would give away up to half of what was measured.
    """
    size = base
    while size * 2 <= value:
        size *= 2
    between = size + size // 2
    return between if size % 2 == 0 and between <= value else size
