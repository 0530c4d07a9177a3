"""Runs from the initial weights: what a batch size, or a learning rate, costs as it is used."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steadygrad.studies.advise.critical import DRAWS, REACH, ROUNDING, fit_curves
from steadygrad.studies.advise.plan import END_STEP, RUN_ENDS, averaged_end
from steadygrad.studies.advise.schema import CAP, Checked, Plan, Point, RateVerdict, Scratch
from steadygrad.studies.folder import Results
from steadygrad.studies.statistics import Floats, quantile, redraw

# Power of the samples by which the loss curve is fitted: overheads concern its end.
EMPHASIS = 4.0
# Multiple of the tolerance that the 90 % upper bound of the overhead must not exceed.
MARGIN = 1.25
# Another rate is better if its loss is lower at each of the last evaluations, from 60 % of the run
# on, and if it saves this part of the samples.
LATE, WORTH = 5, 0.1


@dataclass(frozen=True)
class Baseline:
    """Runs of the smallest batch from the initial weights, and its loss curve.

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

        Those are of mean final losses, shape ``(*)``, and ``curves``, of shape ``(*, M)``, the mean
        losses of the smallest batch at the places. The runs' losses stand for ``samples``.
        """
        end, fit = self.places[-1], fit_curves(self.places, curves, EMPHASIS)
        needed = fit.samples_at((fit(end) + differences)[..., None])[..., 0]
        # Where the curve is flat a larger loss is still no gain.
        needed = np.where(differences > 0, np.minimum(needed, end), np.maximum(needed, end))
        bounded = np.clip(needed, samples / (1 + CAP), samples * REACH)
        return np.where(np.isfinite(differences), samples / bounded - 1, CAP)

    def overhead(self, differences: Floats, samples: int) -> float:
        """Sample overhead by the mean of the differences; see :meth:`overheads`."""
        mean = np.asarray(np.mean(differences))
        return float(self.overheads(self.losses.mean(1), mean, samples))

    def interval(
        self, differences: Floats, samples: int, common: float = 0.0
    ) -> tuple[float, float, float]:
        """95% interval of an overhead, and its upper bound at 90 % confidence, over seeds.

        The differences are :meth:`behind`; ``common`` is their variance over all batch sizes.
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


def scratch_runs(results: Results, purpose: str) -> dict[int, list[Scratch]]:
    """Runs from the initial weights at the rule's learning rate by batch size, ascending."""
    found: dict[int, list[Scratch]] = {}
    for run in sorted(results.select(Scratch), key=lambda run: run.batch_size):
        if run.purpose == purpose and run.rate == 1:
            found.setdefault(run.batch_size, []).append(run)
    return found


def baseline_of(plan: Plan, results: Results, point: int) -> Baseline | None:
    """The smallest batch's runs that end at a point; None where fewer than two are there."""
    own = scratch_runs(results, "constant").get(plan.batch_size, [])
    curves = {run.repeat: run.curve for run in own}
    if main := results.get(Point, point):
        curves.setdefault(0, averaged_end(main.curve))
    if len(curves) < 2:
        return None
    seeds = tuple(sorted(curves))
    table = np.array([curves[seed] for seed in seeds], dtype=float)
    return Baseline(seeds, table[0, :, 0], table[..., 1].T)


def checked_runs(
    base: Baseline, results: Results, plan: Plan, purpose: str, tolerance: float
) -> list[Checked]:
    """All other batch sizes that were trained with every seed, ascending.

    One is within the tolerance if its overhead is, and the upper bound is within the margin.
    """
    found = scratch_runs(results, purpose)
    if purpose == "constant":
        found.pop(plan.batch_size, None)
    whole = [runs for runs in found.values() if len(runs) == plan.seeds]
    table = [base.behind(runs) for runs in whole]
    finite = [row.var(ddof=1) for row in table if np.isfinite(row).all()]
    common = float(np.mean(finite)) if finite else 0.0
    checked = []
    for runs, differences in zip(whole, table, strict=True):
        first = runs[0]  # all of them end after the same samples
        overhead = base.overhead(differences, first.samples)
        low, high, upper = base.interval(differences, first.samples, common)
        checked.append(
            Checked(
                batch_size=first.batch_size,
                stages=first.stages,
                warmup_samples=first.warmup_samples,
                steps=first.steps,
                seeds=len(differences),
                loss=float(np.mean([run.loss for run in runs])),
                overhead=overhead,
                low=low,
                high=high,
                upper=upper,
                within=overhead <= tolerance and upper <= MARGIN * tolerance,
            )
        )
    return checked


def judge_rate(plan: Plan, results: Results, samples: int, *, decays: bool = False) -> RateVerdict:
    """Judges the task's learning rate for runs of one length.

    The runs are compared over their last 40 %: at its end alone, the noise of two single runs hides
    a rate that is three times too high. If the task's rate decays, the main trajectory cannot be
    compared.
    """
    # A run's last loss stands for the mean place of its last evaluations.
    lengths = range(math.floor((1 - RUN_ENDS * END_STEP) * samples), samples + 1)
    runs = {
        run.rate: run
        for run in results.select(Scratch)
        if (run.purpose, run.batch_size, run.repeat) == ("constant", plan.batch_size, 0)
        and run.samples in lengths
    }
    first, main = runs.pop(1.0, None), results.get(Point, len(plan.points) - 1)
    own = first and first.curve if decays else main and averaged_end(main.curve)
    if not runs or own is None:
        return RateVerdict()
    # A run that diverged has one loss, which is infinite.
    ends = {rate: np.array(runs[rate].curve[-LATE:], dtype=float)[:, 1] for rate in sorted(runs)}
    losses = {rate: float(end.mean()) for rate, end in ends.items()}
    places, values = np.array(own, dtype=float).T
    base = Baseline((0,), places, values[:, None])
    losses = {1.0: float(values[-LATE:].mean()), **losses}
    named = {f"{rate:g}": losses[rate] for rate in sorted(losses)}
    late = {rate: end - values[-LATE:] for rate, end in ends.items()}
    if all(np.allclose(behind, 0, atol=ROUNDING * abs(values[-1])) for behind in late.values()):
        why = "same" if values[-LATE:].any() else "zero"
        return RateVerdict(why=why, samples=samples, losses=named)
    if values[-LATE:].min() > values[:-LATE].max():
        # The data have ended: a rate that trains less looks better.
        return RateVerdict(why="rising", samples=samples, losses=named)
    extra = {rate: base.overhead(behind, int(places[-1])) for rate, behind in late.items()}
    lower = [rate for rate, behind in late.items() if (behind < 0).all()]
    better = [rate for rate in lower if -extra[rate] / (1 + extra[rate]) > WORTH]
    best = min(better, key=lambda rate: extra[rate], default=1.0)
    verdict = "low" if best > 1 else "high" if best < 1 else "fits"
    overheads = {f"{rate:g}": value for rate, value in extra.items()}
    return RateVerdict(verdict=verdict, samples=samples, losses=named, overheads=overheads)
