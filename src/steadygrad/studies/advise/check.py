"""Runs from scratch: the sample overhead of a batch size, measured as it will be used."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steadygrad.record.schema.advise import Plan, Point, Scratch, Stage
from steadygrad.studies.advise.critical import CAP, REACH
from steadygrad.studies.advise.loss_curve import LossCurveFit
from steadygrad.studies.advise.trials import RUN_ENDS
from steadygrad.studies.journal import Journal
from steadygrad.studies.statistics import Floats, quantile

__all__ = ["Baseline", "Checked", "averaged_end", "baseline_of", "checked_runs"]

DRAWS = 800
# A batch size is within the tolerance if its overhead is surely below so many tolerances.
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

    @property
    def samples(self) -> int:
        """Samples that the final losses stand for."""
        return int(self.places[-1])

    def overheads(self, curves: Floats, differences: Floats, samples: int) -> Floats:
        """Sample overheads of runs that end with losses so much above the smallest batch's.

        Args:
            curves: Mean losses of the smallest batch at the places, shape ``(D, M)``.
            differences: Of the mean final losses, shape ``(D,)``.
            samples: Samples that the other runs' losses stand for.
        """
        fit = LossCurveFit(self.places.tolist())(curves)
        goals = fit(self.samples) + differences
        needed = fit.samples_at(goals[:, None])[:, 0]
        bounded = np.clip(needed, samples / (1 + CAP), samples * REACH)
        return np.where(np.isfinite(differences), samples / bounded - 1, CAP)

    def overhead(self, difference: float, samples: int) -> float:
        """Sample overhead of a mean final loss so much above the smallest batch's."""
        curve = self.losses.mean(1)[None]
        return float(self.overheads(curve, np.array([difference]), samples)[0])

    def interval(self, differences: Floats, samples: int) -> tuple[float, float, float]:
        """95% interval of an overhead, and its upper bound by nine to one, over seeds.

        Args:
            differences: Final losses less the smallest batch's with the same seed.
            samples: Samples that the final losses stand for.
        """
        if not np.isfinite(differences).all():
            return CAP, CAP, CAP
        generator = np.random.default_rng(len(differences))
        count, seeds = self.losses.shape
        # A few seeds tell little of their spread: Student's distribution.
        spread = differences.std(ddof=1) / math.sqrt(len(differences))
        drawn = differences.mean() + spread * generator.standard_t(len(differences) - 1, DRAWS)
        residuals = self.losses - self.losses.mean(1, keepdims=True)
        # What a seed adds to all of its losses moves the curve, but not its slope.
        residuals = residuals - residuals.mean(0, keepdims=True)
        freedom = max(1, (count - 1) * (seeds - 1))
        scale = (residuals**2).sum() / generator.chisquare(freedom, (DRAWS, 1)) / seeds
        noise = generator.normal(size=(DRAWS, count)) * np.sqrt(scale)
        found = self.overheads(self.losses.mean(1) + noise, drawn, samples)
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
        """Whether it needs as many samples as can be told, or more."""
        return self.overhead >= CAP

    def within(self, tolerance: float) -> bool:
        """Whether its overhead is within the tolerance, and surely not far beyond."""
        return self.overhead <= tolerance and self.upper <= MARGIN * tolerance


def baseline_of(plan: Plan, journal: Journal, point: int) -> Baseline | None:
    """The smallest batch's runs from scratch; None where fewer than two are there.

    Args:
        plan: The plan.
        journal: The events.
        point: Point of training at which the runs end.
    """
    runs = {
        run.repeat: list(run.curve)
        for run in journal.select(Scratch)
        if run.purpose == "constant" and run.batch_size == plan.batch_size and run.rate == 1
    }
    main = journal.get(Point, point)
    if 0 not in runs and main is not None:
        runs[0] = averaged_end(main.curve)
    if len(runs) < 2:
        return None
    seeds = tuple(sorted(runs))
    columns = [[loss for _, loss in runs[seed]] for seed in seeds]
    places = np.array([place for place, _ in runs[seeds[0]]], dtype=float)
    return Baseline(seeds, places, np.array(columns).T)


def averaged_end(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """A curve whose last losses are one, their average, as other runs' final losses are."""
    places, losses = zip(*curve[-RUN_ENDS:], strict=True)
    mean = round(sum(places) / RUN_ENDS), math.fsum(losses) / RUN_ENDS
    return [*curve[:-RUN_ENDS], mean]


def checked_runs(base: Baseline, journal: Journal, plan: Plan, purpose: str) -> list[Checked]:
    """All other batch sizes that were trained from scratch with every seed, ascending."""
    found: dict[int, list[Scratch]] = {}
    for run in journal.select(Scratch):
        if run.purpose == purpose and run.rate == 1:
            found.setdefault(run.batch_size, []).append(run)
    if purpose == "constant":
        found.pop(plan.batch_size, None)
    return [_checked(base, found[size]) for size in sorted(found) if len(found[size]) == plan.seeds]


def _checked(base: Baseline, runs: Sequence[Scratch]) -> Checked:
    finals = dict(zip(base.seeds, base.losses[-1], strict=True))
    differences = np.array([run.loss - finals[run.repeat] for run in runs if run.repeat in finals])
    # All of them end after the same samples.
    samples, first = runs[0].samples, runs[0]
    low, high, upper = base.interval(differences, samples)
    return Checked(
        batch_size=first.batch_size,
        stages=first.stages,
        warmup_samples=first.warmup_samples,
        steps=first.steps,
        seeds=len(differences),
        loss=float(np.mean([run.loss for run in runs])),
        overhead=base.overhead(float(differences.mean()), samples),
        low=low,
        high=high,
        upper=upper,
    )
