"""Runs from scratch: the sample overhead of a batch size, measured as it will be used."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steadygrad.studies.advise.critical import CAP, DRAWS, REACH
from steadygrad.studies.advise.loss_curve import fit_curves
from steadygrad.studies.advise.schema import Plan, Point, Scratch, Stage
from steadygrad.studies.advise.trials import Curve, averaged_end
from steadygrad.studies.folder import Results
from steadygrad.studies.statistics import Floats, quantile, redraw

__all__ = ["Baseline", "Checked", "baseline_of", "checked_runs", "scratch_runs"]

# Power of the samples by which the loss curve is fitted: overheads concern its end.
EMPHASIS = 4.0
# Multiple of the tolerance that the 90 % upper bound of the overhead must not exceed.
MARGIN = 1.25


@dataclass(frozen=True)
class Baseline:
    """Runs of the smallest batch from scratch, and its loss curve.

    Attributes:
        seeds: Numbers of the seeds, ascending.
        places: Samples of the curve's losses, shape ``(M,)``; the last one stands for the end.
        losses: Losses there by seed, shape ``(M, seeds)``.
    """

    seeds: tuple[int, ...]
    places: Floats
    losses: Floats

    def behind(self, runs: Sequence[Scratch]) -> Floats:
        """Final losses of runs less the smallest batch's with the same seed."""
        finals = dict(zip(self.seeds, self.losses[-1], strict=True))
        return np.array([run.loss - finals[run.repeat] for run in runs if run.repeat in finals])

    def overheads(self, curves: Floats, differences: Floats, samples: int) -> Floats:
        """Sample overheads of runs whose losses end above the smallest batch's by ``differences``.

        Args:
            curves: Mean losses of the smallest batch at the places, shape ``(*, M)``.
            differences: Differences of the mean final losses, shape ``(*)``.
            samples: Samples that the other runs' losses stand for.
        """
        end, fit = self.places[-1], fit_curves(self.places, curves, EMPHASIS)
        needed = fit.samples_at((fit(end) + differences)[..., None])[..., 0]
        # Where the curve is flat a larger loss is still no gain.
        needed = np.where(differences > 0, np.minimum(needed, end), np.maximum(needed, end))
        bounded = np.clip(needed, samples / (1 + CAP), samples * REACH)
        return np.where(np.isfinite(differences), samples / bounded - 1, CAP)

    def overhead(self, differences: Floats, samples: int) -> float:
        """Sample overhead by the mean; arguments as in :meth:`interval`."""
        mean = np.asarray(np.mean(differences))
        return float(self.overheads(self.losses.mean(1), mean, samples))

    def interval(
        self, differences: Floats, samples: int, common: float = 0.0
    ) -> tuple[float, float, float]:
        """95% interval of an overhead, and its upper bound at 90 % confidence, over seeds.

        Args:
            differences: Final losses less the smallest batch's with the same seed.
            samples: Samples that the final losses stand for.
            common: Variance of such differences, over all batch sizes that were trained.
        """
        if not np.isfinite(differences).all():
            return CAP, CAP, CAP
        generator = np.random.default_rng(len(differences))
        # A few seeds tell little of their spread: Student's distribution. Seeds that agree by
        # chance would make it too small.
        own = float(differences.var(ddof=1))
        spread = math.sqrt(max(own, (own + common) / 2) / len(differences))
        drawn = differences.mean() + spread * generator.standard_t(len(differences) - 1, DRAWS)
        means = self.losses.mean(1)
        residuals = self.losses - means[:, None]
        # What a seed adds to all of its losses moves the curve, but not its slope.
        residuals = residuals - residuals.mean(0)
        found = self.overheads(redraw(means, residuals, generator, DRAWS), drawn, samples)
        return quantile(found, 0.025), quantile(found, 0.975), quantile(found, 0.9)


@dataclass(frozen=True)
class Checked:
    """A batch size, or a schedule, that was trained from scratch.

    Attributes:
        batch_size: In samples; of a schedule the last one.
        stages: Beginnings, batch sizes and learning rates.
        warmup_samples: Samples over which the learning rate rises from the task's own.
        steps: Optimizer steps.
        seeds: Number of seeds.
        loss: Mean final validation loss; infinite where a run diverged.
        overhead: Extra samples, as a fraction of what the smallest batch needs.
        low: Lower end of its 95% interval over seeds.
        high: Upper end.
        upper: Overhead that the truth exceeds with a chance of 10 %.
    """

    batch_size: int
    stages: tuple[Stage, ...]
    warmup_samples: int
    steps: int
    seeds: int
    loss: float
    overhead: float
    low: float
    high: float
    upper: float

    @property
    def diverged(self) -> bool:
        """Whether the overhead is at or above ``CAP``, the largest one that is distinguished."""
        return self.overhead >= CAP

    def within(self, tolerance: float) -> bool:
        """Whether the overhead is within the tolerance, and its upper bound within the margin."""
        return self.overhead <= tolerance and self.upper <= MARGIN * tolerance


def scratch_runs(results: Results, purpose: str) -> dict[int, list[Scratch]]:
    """Runs from scratch at the rule's learning rate by batch size, ascending."""
    found: dict[int, list[Scratch]] = {}
    for run in sorted(results.select(Scratch), key=lambda run: run.batch_size):
        if run.purpose == purpose and run.rate == 1:
            found.setdefault(run.batch_size, []).append(run)
    return found


def baseline_of(plan: Plan, results: Results, point: int) -> Baseline | None:
    """The smallest batch's runs from scratch; None where fewer than two are there.

    Args:
        plan: The plan.
        results: The events.
        point: Point of training at which the runs end.
    """
    own = scratch_runs(results, "constant").get(plan.batch_size, [])
    curves: dict[int, Curve] = {run.repeat: run.curve for run in own}
    main = results.get(Point, point)
    if main is not None:
        curves.setdefault(0, averaged_end(main.curve))
    if len(curves) < 2:
        return None
    seeds = tuple(sorted(curves))
    table = np.array([curves[seed] for seed in seeds], dtype=float)
    return Baseline(seeds, table[0, :, 0], table[..., 1].T)


def checked_runs(base: Baseline, results: Results, plan: Plan, purpose: str) -> list[Checked]:
    """All other batch sizes that were trained from scratch with every seed, ascending."""
    found = scratch_runs(results, purpose)
    if purpose == "constant":
        found.pop(plan.batch_size, None)
    whole = [runs for runs in found.values() if len(runs) == plan.seeds]
    table = [base.behind(runs) for runs in whole]
    finite = [row.var(ddof=1) for row in table if np.isfinite(row).all()]
    common = float(np.mean(finite)) if finite else 0.0
    return [_checked(base, *row, common) for row in zip(whole, table, strict=True)]


def _checked(
    base: Baseline, runs: Sequence[Scratch], differences: Floats, common: float
) -> Checked:
    # All of them end after the same samples.
    first = runs[0]
    low, high, upper = base.interval(differences, first.samples, common)
    return Checked(
        batch_size=first.batch_size,
        stages=first.stages,
        warmup_samples=first.warmup_samples,
        steps=first.steps,
        seeds=len(differences),
        loss=float(np.mean([run.loss for run in runs])),
        overhead=base.overhead(differences, first.samples),
        low=low,
        high=high,
        upper=upper,
    )
