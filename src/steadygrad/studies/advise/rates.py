"""Verdict on the task's learning rate, from runs of the smallest batch at other rates."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steadygrad.studies.advise.check import Baseline
from steadygrad.studies.advise.critical import ROUNDING
from steadygrad.studies.advise.plan import END_STEP
from steadygrad.studies.advise.schema import Plan, Point, Scratch
from steadygrad.studies.advise.trials import RUN_ENDS, averaged_end
from steadygrad.studies.folder import Results

__all__ = ["LATE", "LATE_PART", "WORTH", "RateVerdict", "judge_rate"]

# Another rate is better if its loss is lower at each of the last evaluations, from 60 % of the run
# on, and if it saves this part of the samples.
LATE, LATE_PART = 5, 0.4
WORTH = 0.1


@dataclass(frozen=True)
class RateVerdict:
    """Whether the task's learning rate suits a run of some length.

    Attributes:
        verdict: ``"low"``, ``"high"``, ``"fits"``, or ``""`` where there is none.
        why: Why other rates were trained and there is no verdict: ``"same"``, their losses equal
            those at the task's own; ``"zero"``, so they are, and zero; ``"rising"``, the validation
            loss rises. Otherwise empty.
        samples: Length of the run; 0 where no other rate was trained.
        losses: Mean losses over the last 40 % from scratch, by rate relative to the task's own.
        overheads: Extra samples that each rate needs by a fit through the task's own losses, as a
            fraction between bounds; negative where it needs fewer. Empty without a verdict.
    """

    verdict: str = ""
    why: str = ""
    samples: int = 0
    losses: Mapping[float, float] = field(default_factory=dict)
    overheads: Mapping[float, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a summary."""
        losses = {f"{rate:g}": loss for rate, loss in self.losses.items()}
        return {"verdict": self.verdict, "why": self.why, "samples": self.samples, "losses": losses}


def judge_rate(plan: Plan, results: Results, samples: int, *, decays: bool = False) -> RateVerdict:
    """Judges the task's learning rate for runs of one length.

    The runs are compared over their last 40 %: at its end alone, the noise of two single runs hides
    a rate that is three times too high.

    Args:
        plan: The plan.
        results: The events.
        samples: Length of the runs.
        decays: Whether the task's rate decays; the main trajectory then cannot be compared.
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
    losses = dict(sorted({1.0: float(values[-LATE:].mean()), **losses}.items()))
    late = {rate: end - values[-LATE:] for rate, end in ends.items()}
    if all(np.allclose(behind, 0, atol=ROUNDING * abs(values[-1])) for behind in late.values()):
        why = "same" if values[-LATE:].any() else "zero"
        return RateVerdict(why=why, samples=samples, losses=losses)
    if values[-LATE:].min() > values[:-LATE].max():
        # The data have ended: a rate that trains less looks better.
        return RateVerdict(why="rising", samples=samples, losses=losses)
    overheads = {rate: base.overhead(behind, int(places[-1])) for rate, behind in late.items()}
    better = [
        rate
        for rate, behind in late.items()
        if (behind < 0).all() and -overheads[rate] / (1 + overheads[rate]) > WORTH
    ]
    best = min(better, key=lambda rate: overheads[rate], default=1.0)
    verdict = "low" if best > 1 else "high" if best < 1 else "fits"
    return RateVerdict(verdict, samples=samples, losses=losses, overheads=overheads)
