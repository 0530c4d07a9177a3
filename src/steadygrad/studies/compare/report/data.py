"""Contents of a ``compare`` record, gathered for its page."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from steadygrad.studies.compare.schema import BASELINE, Header
from steadygrad.studies.compare.schema import Run as Training
from steadygrad.studies.folder import Run
from steadygrad.studies.text import plural

__all__ = ["Comparison", "Row"]

Row = Mapping[str, Any]


class Comparison:
    """A record and its summary, which is empty where the study has not ended."""

    def __init__(self, run: Run) -> None:
        self.header: Header = run.header
        self.plan = self.header.plan
        self.summary: Mapping[str, Any] = run.summary or {}
        self.trainings = run.select(Training)
        names = {name: name for name in self.plan.optimizers}
        self.titles: Mapping[str, str] = self.summary.get("optimizers") or names
        self.samples = plural(self.header.task.sample)
        self.half, self.longest = self.plan.horizons[1:]
        # Losses of the search for learning rates, by octave.
        self.search: dict[tuple[str, int, int], dict[float, float]] = {}
        for one in self.trainings:
            if not (one.repeat or self.is_point(one)):
                place = one.optimizer, one.multiple, one.samples
                self.search.setdefault(place, {})[one.step] = one.loss
        # Rows of the optimizers whose search has gone as far as a best rate.
        self.tuned = [row for row in self.summary.get("tuned", ()) if row["lr"] is not None]

    def is_point(self, run: Training) -> bool:
        """Whether a run tried a point of the other options, at a rate that was known."""
        return run.point > 0 and run.samples == self.half

    def rows(self, samples: int) -> list[Row]:
        """Verdicts at a horizon; at each batch size AdamW's own losses come first."""
        found: list[Row] = []
        for multiple in self.plan.multiples:
            place = {"multiple": multiple, "samples": samples}
            own = [r for r in self.summary.get("verdicts", ()) if place.items() <= r.items()]
            losses = {seed: loss for row in own for seed, loss in row["baseline_losses"].items()}
            if own:
                base = {"optimizer": BASELINE, "losses": losses, "verdict": "baseline"}
                found += [{**place, **base}, *own]
        return found

    def curve(self, name: str, samples: int) -> Sequence[tuple[int, float]]:
        """Samples and mean loss on the way, of the seeds of a verdict that did not diverge."""
        first = (row for row in self.rows(samples) if row["multiple"] == 1)
        own = [row["losses"] for row in first if row["optimizer"] == name]
        losses: Mapping[str, float] = own[0] if own else {}
        curves = [
            run.curve
            for run in self.trainings
            if (run.optimizer, run.multiple, run.samples) == (name, 1, samples)
            and losses.get(str(run.repeat)) == run.loss < math.inf
        ]
        columns = zip(*curves, strict=True)
        return [(marks[0][0], fmean(loss for _, loss in marks)) for marks in columns]
