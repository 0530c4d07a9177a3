"""Model of sample overheads over batch sizes and over training, for a first guess.

Branches tell what a batch size costs from their point on. They do not add up to a run from
scratch, so that a number from here is called predicted until it was trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steadygrad.studies.advise.critical import Critical, crossing
from steadygrad.studies.statistics import Floats, isotonic

__all__ = ["MeasuredPoint", "predict"]

NODES = 64


@dataclass(frozen=True)
class MeasuredPoint:
    """A point of training whose critical batch size is resolved.

    Attributes:
        samples: Samples seen there.
        branch_samples: Samples of each branch from there.
        critical: Result of the branches.
    """

    samples: int
    branch_samples: int
    critical: Critical

    @property
    def centre(self) -> float:
        """Samples seen halfway through the branches, to which their overheads refer."""
        return self.samples + self.branch_samples / 2

    def overhead(self, sizes: Floats) -> Floats:
        """Overhead at any batch sizes: linear between those tried, then on at their mean slope."""
        tried = np.asarray(self.critical.sizes, dtype=float)
        known = isotonic(np.asarray(self.critical.overhead))
        slope = (known[-1] - known[0]) / (tried[-1] - tried[0])
        beyond = known[-1] + slope * np.maximum(0.0, sizes - tried[-1])
        return np.where(sizes > tried[-1], beyond, np.interp(sizes, tried, known))


def predict(points: Sequence[MeasuredPoint], length: int, tolerance: float) -> float:
    """Largest constant batch size whose mean overhead over a run is within the tolerance.

    Between the points the overhead is interpolated over the reciprocal of the samples seen, which
    is right for a critical batch size that stays, or that grows in proportion. Before the first
    point it is taken to have grown in proportion from nothing, about as Merrill et al. (2025) saw
    it begin; after the last one it stays.

    Args:
        points: In the order of training; at least one.
        length: Samples of the run.
        tolerance: Extra samples that are acceptable, as a fraction.

    Returns:
        The batch size; at most the largest that was tried.

    References:
        | Critical Batch Size Revisited (Merrill et al., 2025), https://arxiv.org/abs/2505.23971
    """
    base = points[0].critical.sizes[0]
    ladders = (point.critical.sizes for point in points)
    sizes = np.asarray(max(ladders, key=lambda tried: (tried[-1], len(tried))), dtype=float)
    nodes = np.geomspace(min(base, length / 2), length, NODES + 1)
    seen = np.sqrt(nodes[1:] * nodes[:-1])
    rows = np.stack([_overheads(points, sizes, moment) for moment in seen])
    mean = isotonic((rows * np.diff(nodes)[:, None]).sum(0) / length)
    found = crossing(sizes.tolist(), (1 + mean) / (1 + mean[0]) - 1, tolerance)
    return min(float(found), float(sizes[-1]))


def _overheads(points: Sequence[MeasuredPoint], sizes: Floats, seen: float) -> Floats:
    centres = [point.centre for point in points]
    if seen <= centres[0]:
        return points[0].overhead(sizes * centres[0] / seen)
    if seen >= centres[-1]:
        return points[-1].overhead(sizes)
    i = int(np.searchsorted(centres, seen)) - 1
    part = (1 / centres[i] - 1 / seen) / (1 / centres[i] - 1 / centres[i + 1])
    before, after = points[i].overhead(sizes), points[i + 1].overhead(sizes)
    return np.asarray((1 - part) * before + part * after)
