"""Verdict on the task's learning rate, from runs of the smallest batch at other rates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steadygrad.record.schema.advise import Plan, Point, Scratch
from steadygrad.studies.advise.check import Baseline
from steadygrad.studies.advise.critical import ROUNDING
from steadygrad.studies.advise.plan import END_STEP
from steadygrad.studies.advise.trials import RUN_ENDS, Curve, averaged_end
from steadygrad.studies.journal import Journal

__all__ = ["RateVerdict", "judge_rate"]

# Another rate is better if its loss is lower at each of the last evaluations, from 60 % of the run
# on, and if it saves so large a part of the samples.
LATE = 5
WORTH = 0.1


@dataclass(frozen=True)
class RateVerdict:
    """Whether the task's learning rate suits a run of this length.

    Attributes:
        verdict: ``"low"``, ``"high"``, ``"fits"``, or ``""`` where it was not asked, the
            validation loss rises, or it does not depend on the rate.
        losses: Final losses from scratch by rate relative to the task's own, that one included.
        overheads: Extra samples that each rate needs, as a fraction; negative where it needs fewer.
    """

    verdict: str = ""
    losses: Mapping[float, float] = field(default_factory=dict)
    overheads: Mapping[float, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a summary."""
        losses, overheads = (
            {f"{rate:g}": value for rate, value in found.items()}
            for found in (self.losses, self.overheads)
        )
        return {"verdict": self.verdict, "losses": losses, "overheads": overheads}


def judge_rate(plan: Plan, journal: Journal, *, decays: bool = False) -> RateVerdict:
    """Judges the task's learning rate for a run as long as the main trajectory.

    The runs are compared over their last 40 %: at its end alone, the noise of two single runs hides
    a rate that is three times too high.

    Args:
        plan: The plan.
        journal: The events.
        decays: Whether the task's rate decays; the main trajectory then cannot be compared.
    """
    own = _own_curve(plan, journal, decays=decays)
    runs = {
        run.rate: run
        for run in journal.select(Scratch)
        if run.purpose == "constant" and run.batch_size == plan.batch_size and run.rate != 1
    }
    if own is None or not runs:
        return RateVerdict()
    places, values = np.array(own, dtype=float).T
    base = Baseline((0,), places, values[:, None])
    # A run that diverged has one loss, which is infinite.
    late = {rate: np.array(run.curve[-LATE:])[:, 1] - values[-LATE:] for rate, run in runs.items()}
    overheads = {rate: base.overhead(behind, int(places[-1])) for rate, behind in late.items()}
    better = [
        rate
        for rate, behind in late.items()
        if (behind < 0).all() and -overheads[rate] / (1 + overheads[rate]) > WORTH
    ]
    if all(np.allclose(behind, 0, atol=ROUNDING * abs(values[-1])) for behind in late.values()):
        return RateVerdict()  # the losses do not depend on the rate
    best = min(better, key=lambda rate: overheads[rate], default=1.0)
    verdict = "low" if best > 1 else "high" if best < 1 else "fits"
    if values[-LATE:].min() > values[:-LATE].max():
        verdict = ""  # the data have ended: a rate that trains less looks better
    losses = {1.0: float(values[-1]), **{rate: run.loss for rate, run in runs.items()}}
    return RateVerdict(verdict, dict(sorted(losses.items())), dict(sorted(overheads.items())))


def _own_curve(plan: Plan, journal: Journal, *, decays: bool) -> Curve | None:
    """Losses at the task's own rate over a run as long as the main trajectory."""
    if not decays:
        main = journal.get(Point, len(plan.points) - 1)
        return averaged_end(main.curve) if main else None
    run = journal.get(Scratch, "constant", 0, plan.batch_size, 1.0)
    # Its last loss stands for the mean place of its last evaluations.
    whole = run is not None and run.samples >= (1 - RUN_ENDS * END_STEP) * plan.length
    return run.curve if run and whole else None
