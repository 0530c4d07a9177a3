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

__all__ = ["LATE_PART", "WORTH", "RateVerdict", "judge_rate"]

# Another rate is better if its loss is lower at each of the last evaluations, from 60 % of the run
# on, and if it saves so large a part of the samples.
LATE, LATE_PART = 5, 0.4
WORTH = 0.1


@dataclass(frozen=True)
class RateVerdict:
    """Whether the task's learning rate suits a run as long as the main trajectory.

    Attributes:
        verdict: ``"low"``, ``"high"``, ``"fits"``, or ``""`` where it was not asked, the
            validation loss rises, or it does not depend on the rate.
        why: Why other rates were trained and there is no verdict: ``"alone"``, no run at the
            task's own rate is as long; ``"same"``, the losses do not depend on the rate;
            ``"rising"``, the validation loss rises. Otherwise empty.
        losses: Mean losses over the last 40 % from scratch, by rate relative to the task's own,
            that one included where there is such a run.
        overheads: Extra samples that each rate needs by these means, as a fraction; negative where
            it needs fewer. Empty without a verdict.
    """

    verdict: str = ""
    why: str = ""
    losses: Mapping[float, float] = field(default_factory=dict)
    overheads: Mapping[float, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a summary."""
        losses, overheads = (
            {f"{rate:g}": value for rate, value in found.items()}
            for found in (self.losses, self.overheads)
        )
        rest = {"losses": losses, "overheads": overheads}
        return {"verdict": self.verdict, "why": self.why, **rest}


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
    if not runs:
        return RateVerdict()
    # A run that diverged has one loss, which is infinite.
    ends = {rate: np.array(runs[rate].curve[-LATE:], dtype=float)[:, 1] for rate in sorted(runs)}
    losses = {rate: float(end.mean()) for rate, end in ends.items()}
    if own is None:
        return RateVerdict(why="alone", losses=losses)
    places, values = np.array(own, dtype=float).T
    base = Baseline((0,), places, values[:, None])
    losses = dict(sorted({1.0: float(values[-LATE:].mean()), **losses}.items()))
    late = {rate: end - values[-LATE:] for rate, end in ends.items()}
    if all(np.allclose(behind, 0, atol=ROUNDING * abs(values[-1])) for behind in late.values()):
        return RateVerdict(why="same", losses=losses)
    if values[-LATE:].min() > values[:-LATE].max():
        # The data have ended: a rate that trains less looks better.
        return RateVerdict(why="rising", losses=losses)
    overheads = {rate: base.overhead(behind, int(places[-1])) for rate, behind in late.items()}
    better = [
        rate
        for rate, behind in late.items()
        if (behind < 0).all() and -overheads[rate] / (1 + overheads[rate]) > WORTH
    ]
    best = min(better, key=lambda rate: overheads[rate], default=1.0)
    verdict = "low" if best > 1 else "high" if best < 1 else "fits"
    return RateVerdict(verdict, losses=losses, overheads=overheads)


def _own_curve(plan: Plan, journal: Journal, *, decays: bool) -> Curve | None:
    """Losses at the task's own rate over a run as long as the main trajectory."""
    if not decays:
        main = journal.get(Point, len(plan.points) - 1)
        return averaged_end(main.curve) if main else None
    run = journal.get(Scratch, "constant", 0, plan.batch_size, 1.0)
    # Its last loss stands for the mean place of its last evaluations.
    whole = run is not None and run.samples >= (1 - RUN_ENDS * END_STEP) * plan.length
    return run.curve if run and whole else None
