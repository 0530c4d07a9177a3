"""From critical batch sizes along training to one batch size, and to a schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steadygrad.formulas.batch_size import learning_rate, samples_ratio, steps_ratio
from steadygrad.studies.advise.critical import quantile
from steadygrad.studies.advise.curves import crossing, fit_tradeoff
from steadygrad.studies.advise.surface import Measured, Surface, extended

__all__ = ["WholeRun", "rung", "schedule", "tradeoff_rows", "whole_run"]

# A stage with fewer steps ends before the optimizer's averages have turned over.
STAGE_STEPS = 30
# What a rounding error may take from a batch size without costing a whole rung.
ALMOST = 1 - 1e-9


@dataclass(frozen=True)
class WholeRun:
    """One batch size for a whole run from scratch.

    Attributes:
        samples: Length of the run.
        value: Largest batch size whose mean excess over the run is within the tolerance.
        low: Lower end of its 95% interval, if the critical batch size grew from nothing before the
            first point, as ``value`` takes it.
        high: Upper end, if it was the same from the start; infinite when the largest batch size
            tried may still be within it.
        assumed: Share of the run before the middle of the first branches, for which one or the
            other is assumed.
        batch_size: ``value``, rounded down to 1, 1.5, 2, 3, 4, 6, ... times the smallest batch.
        sizes: Batch sizes tried, ascending.
        excess: Mean extra samples of each over the run, relative to the smallest.
        fitted: Critical batch size of the trade-off that fits these excesses.
    """

    samples: int
    value: float
    low: float
    high: float
    assumed: float
    batch_size: int
    sizes: tuple[int, ...]
    excess: tuple[float, ...]
    fitted: float

    @property
    def excess_here(self) -> float:
        """Mean extra samples at the recommended batch size."""
        return extended(self.sizes, self.excess)(self.batch_size)


def whole_run(points: Sequence[Measured], tolerance: float) -> WholeRun:
    """The largest batch size whose excess, averaged over all samples of a run, is tolerable.

    Never more than the schedule ends at: what is too large at every time is too large for all.

    Args:
        points: In the order of training; at least one.
        tolerance: Extra samples that are acceptable, as a fraction.
    """
    surface = Surface(points)
    sizes = surface.sizes
    rows = list(zip(*(point.critical.draws[::2] for point in points), strict=True))
    least = sorted(_constant(Surface(points, row), tolerance) for row in rows)
    most = sorted(_constant(Surface(points, row, grows=False), tolerance) for row in rows)
    value = min(_constant(surface, tolerance), float(sizes[-1]))
    excess = surface.mean()
    return WholeRun(
        samples=surface.end,
        value=value,
        low=min(quantile(least, 0.025), value),
        high=max(quantile(most, 0.975), value),
        assumed=points[0].centre / surface.end,
        batch_size=rung(value, sizes[0]),
        sizes=sizes,
        excess=tuple(excess),
        fitted=fit_tradeoff(sizes, excess, math.inf),
    )


def _constant(surface: Surface, tolerance: float) -> float:
    """The largest constant batch size; infinite when all that were tried are tolerable."""
    sizes = [float(size) for size in surface.sizes]
    last = surface.tolerable(tolerance)[-1]
    most = last if last < sizes[-1] else math.inf
    return min(crossing(sizes, surface.mean(), tolerance), most)


def schedule(
    points: Sequence[Measured], tolerance: float, lr: float, rule: str
) -> list[dict[str, Any]]:
    """A batch size for each stretch of training, never decreasing.

    It follows the largest tolerable batch size of the same model that :func:`whole_run` averages.
    Every stage but the last has at least 30 steps, unless the last point comes sooner.

    Args:
        points: In the order of training; at least one.
        tolerance: Extra samples that are acceptable, as a fraction.
        lr: Learning rate tuned at the smallest batch size.
        rule: How it follows the batch size.

    Returns:
        ``{"from_samples", "batch_size", "lr"}`` wherever the batch size changes, first from 0.
    """
    surface = Surface(points)
    base, fit = surface.sizes[0], surface.tolerable(tolerance)
    first, *later = [size for size in _rungs(base, fit[-1]) if size >= rung(fit[0], base)]
    stages = [(_reached(surface.nodes, fit, size), size) for size in later]
    # The last point's branches began there: what they bear holds from there on.
    latest, soonest = points[-1].samples, STAGE_STEPS * first
    stages = [(min(max(start, soonest), latest), size) for start, size in stages]
    return [
        {"from_samples": start, "batch_size": size, "lr": learning_rate(lr, size, base, rule)}
        for start, size in [(0, first), *_long_enough(stages)]
    ]


def _reached(nodes: Sequence[float], fit: Sequence[float], size: int) -> int:
    """After how many samples the fit first reaches a size that it does not begin with."""
    after = next(node for node, tolerable in enumerate(fit) if tolerable >= size * ALMOST)
    before = after - 1
    part = math.log(size / fit[before]) / math.log(fit[after] / fit[before])
    return math.ceil(nodes[before] * math.exp(part * math.log(nodes[after] / nodes[before])))


def _long_enough(stages: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Leaves out stages that end too soon; the smaller batch before them goes on instead."""
    kept: list[tuple[int, int]] = []
    for start, size in reversed(stages):
        if not kept or kept[0][0] - start >= STAGE_STEPS * size:
            kept.insert(0, (start, size))
    return kept


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


def rung(value: float, base: int) -> int:
    """The largest of 1, 1.5, 2, 3, 4, 6, ... times ``base`` that is at most ``value``.

    At least ``base``. Powers of two alone would give away up to half of what was measured.
    """
    return _rungs(base, value)[-1]


def _rungs(base: int, most: float) -> list[int]:
    """1, 1.5, 2, 3, 4, 6, ... times ``base``, as far as they are whole and at most ``most``."""
    found, size = [base], base
    while size * ALMOST <= most:
        found += [size, size + size // 2] if size % 2 == 0 else [size]
        size *= 2
    return [base, *(size for size in found if base < size and size * ALMOST <= most)]
