r"""The critical batch size of a long training, from those of shorter ones.

The critical size is the largest batch that needs at most the tolerated extra samples. It grows with
the length of a training as a power:

.. math:: \log B_k = a + b \log(n_k / N) + \epsilon_k

for the sizes :math:`B_k` over :math:`n_k` samples each, where :math:`a` is the logarithm of the
critical size over :math:`N` samples, and :math:`\epsilon_k` has two parts: the error of
:math:`B_k`, and what a power leaves, which is normal with the deviation :data:`RESIDUAL`. The slope
:math:`b` has a normal prior, and :math:`a` none, so that one length gives an answer, too.

References:
    | Predictable Scale: Part I, Step Law (Li et al., 2025), https://arxiv.org/abs/2503.04715
    | How Does Critical Batch Size Scale in Pre-training? (Zhang et al., 2024),
    | https://arxiv.org/abs/2410.21676
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from steadygrad.studies.advise.analysis import BatchSizes
from steadygrad.studies.advise.plan import LENGTHS, named_sizes
from steadygrad.studies.advise.schema import WIDTH, Cost, Critical, Growth, Header
from steadygrad.studies.folder import Results

# Deviation of the logarithm of a critical size from a power of length and model size, over all 17
# lengths and models of Li et al.'s dense table; and of that from a smaller model's over one length.
RESIDUAL = STAND_IN = 0.13
# Deviation of the slope beyond the longest length from that up to there: it rises in noisy
# quadratics, where without this 20 of 29 intervals over 16 times the longest length held.
BEND = 0.15
# Mean and deviation of the slope, as known before any training: slopes of Li et al.'s dense models
# are 0.23 to 0.47, those of their mixtures of experts 0.25 to 0.30, and those of noisy quadratics
# 0.09 to 0.32.
TUNED = (0.35, 0.15)


def predict(lengths: Sequence[Critical], samples: int, stand_in: float = 0.0) -> Growth:
    """The critical batch size over ``samples``, by that of shorter trainings.

    A length whose critical size has a lower end alone counts where it lies above the line of the
    others, and leaves the prediction without an upper end.

    ``stand_in``: deviation of the logarithm of the real model's critical size from that of a model
    that was trained in its place; 0: the real one was trained.
    """
    if not lengths:
        return Growth(samples=samples, why="none")
    known = [one for one in lengths if one.is_closed]
    least = [replace(one, high=one.low) for one in lengths if not one.is_closed]
    # With no slope but the prior's: the sizes that can be tried grow with the length themselves.
    strongest = sorted(least, key=lambda one: one.low / one.samples ** TUNED[0])[-1:]
    line = _Line.through(known or strongest, samples)
    above = [one for one in least if known and math.log(one.low) > line.at(one.samples)]
    line = _Line.through([*known, *above], samples) if above else line
    level, deviation = line.at(samples), math.hypot(line.deviation, stand_in)
    size, low, high = (math.exp(level + side * WIDTH * deviation) for side in (0, -1, 1))
    high = high if known and not above else math.inf
    return Growth(
        samples=samples,
        predicted=Critical(samples=samples, batch_size=size, low=low, high=high),
        lengths=tuple(lengths),
        slope=line.slope,
        agree=line.agrees,
    )


class _Line(NamedTuple):
    """The line through critical sizes: the logarithm's level over a length, and its slope."""

    samples: int
    level: float
    slope: float
    deviation: float
    agrees: bool

    def at(self, samples: int) -> float:
        return self.level + self.slope * math.log(samples / self.samples)

    @classmethod
    def through(cls, lengths: Sequence[Critical], samples: int) -> "_Line":
        at = np.array([math.log(one.samples / samples) for one in lengths])
        # The middles of the intervals: by few pairs the sizes themselves lie near one of the ends.
        sizes = np.log([one.low * one.high for one in lengths]) / 2
        errors = np.hypot([one.error for one in lengths], RESIDUAL)
        # The prior is one more observation, of the slope alone.
        rows = np.column_stack([np.ones_like(at), at]) / errors[:, None]
        rows = np.vstack([rows, [0, 1 / TUNED[1]]])
        seen = np.append(sizes / errors, TUNED[0] / TUNED[1])
        covariance = np.linalg.inv(rows.T @ rows)
        level, slope = covariance @ (rows.T @ seen)
        # By one length it is exact.
        misfit = float(((seen - rows @ (level, slope)) ** 2).sum())
        excess = max(1.0, misfit / max(1, len(lengths) - 1))
        deviation = math.sqrt(excess * covariance[0, 0] + RESIDUAL**2 + (BEND * at.max()) ** 2)
        return cls(samples, float(level), float(slope), deviation, excess <= WIDTH**2)


def rungs_of(header: Header, results: Results) -> tuple[list[BatchSizes], BatchSizes | None]:
    """The batch sizes over each length, ascending; and the real model's, if a stand-in has these.

    The real model's are over the shortest length at which the stand-in has a critical size. A
    search begins near the size that the shorter lengths, or the stand-in, predict for it.
    """
    rungs = list[BatchSizes]()
    for samples in header.plan.rungs:
        then = predict([one.critical for one in rungs if one.critical], samples).predicted
        near, below = then.batch_size if then else 0.0, rungs[-1] if rungs else None
        rungs.append(BatchSizes(header, results, samples, near=near, below=below))
    checked = next((one for one in rungs if one.critical and one.critical.is_closed), None)
    if checked is None or checked.critical is None or not header.plan.stand_in:
        return rungs, None
    near, skipped = checked.critical.batch_size, len(header.plan.sizes)
    return rungs, BatchSizes(header, results, checked.samples, near=near, skipped=skipped)


def longest(rungs: Sequence[BatchSizes]) -> BatchSizes:
    """The longest one over which sizes were compared; the longest of all where none were."""
    return next((one for one in reversed(rungs) if one.pairs), rungs[-1])


def growth_of(rungs: Sequence[BatchSizes], real: BatchSizes | None) -> Growth | None:
    """The prediction for the plan's target by :func:`rungs_of`; None where the plan has none."""
    plan, lengths = rungs[-1].plan, [one.critical for one in rungs if one.critical]
    if not plan.target:
        return None
    if plan.stand_in and lengths:
        checked = next((one for one in lengths if one.is_closed), None)
        why = "stand-in" if real and real.pairs else "unchecked"
        if not _agree(real.critical if real else None, checked):
            return Growth(samples=plan.target, lengths=tuple(lengths), why=why)
    grown = predict(lengths, plan.target, stand_in=STAND_IN if real else 0.0)
    steps = [one.tuned for one in rungs if one.tuned is not None] or [0.0]
    costs = tuple(_costs(longest(rungs), grown))
    return replace(grown, costs=costs, drift=steps[-1] - steps[0])


def _agree(real: Critical | None, stand_in: Critical | None) -> bool:
    if real is None or stand_in is None or not real.is_closed:
        return False
    apart = abs(math.log(real.batch_size / stand_in.batch_size))
    return apart <= WIDTH * math.hypot(real.error, stand_in.error, STAND_IN)


def _costs(top: BatchSizes, grown: Growth) -> Iterator[Cost]:
    """The predicted overheads of the sizes that were named, or that were compared.

    They are those of sizes over the longest rung that are as many times smaller as the critical
    size has grown.
    """
    then, most = grown.predicted, LENGTHS[0] * top.settings.tolerance
    if then is None:
        return
    sizes, _, least, dearest = np.minimum(top.overheads, [[math.inf], [most], [most], [most]])
    # A larger size costs as much as a smaller one at least.
    least = np.maximum.accumulate(least)
    dearest = np.minimum.accumulate(dearest[::-1])[::-1]
    now = math.log(then.batch_size) + grown.slope * math.log(top.samples / then.samples)
    for size in named_sizes(top.settings) or [top.sizes[arm] for arm in top.pairs]:
        best, worst = (math.log(size) + now - math.log(end) for end in (then.high, then.low))
        found = np.interp(best, sizes, least), np.interp(worst, sizes, dearest, right=most)
        low, high = (float(end) if end < most else math.inf for end in found)
        yield Cost(batch_size=size, low=low, high=high)
