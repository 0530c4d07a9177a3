"""The search for an arm's learning rate: a ladder of octaves, and a parabola through the best."""

import math
from collections.abc import Iterator, Mapping
from statistics import fmean

from steadygrad.studies.paired import MOST, Evidence

# Octaves around the best rate; the first three that are tried are around the arm's own.
NEAR = (-1, 0, 1)
# Most octaves from the arm's own rate that a search goes.
FARTHEST = 6
# The seeds of a search: no pair has one, so that no choice favours an arm.
SEEDS = range(MOST, MOST + 2)
# Trainings that most searches take.
USUAL = 4 * len(SEEDS)


class Ladder:
    """Mean losses of an arm by octave from its own learning rate, over trainings of one length.

    It has three octaves, and more until the best one has a worse one on either side.

    ``start``: the octave around which it begins.

    Attributes:
        losses: By octave, ascending; None: not trained yet.
    """

    def __init__(self, evidence: Evidence, arm: int, samples: int, start: int = 0) -> None:
        self._evidence, self._arm, self._samples = evidence, arm, samples
        steps = [max(1 - FARTHEST, min(start, FARTHEST - 1)) + side for side in NEAR]
        while True:
            self.losses = {step: self._loss(step) for step in steps}
            if None in self.losses.values():
                break
            if self.best == steps[0] > -FARTHEST:
                steps.insert(0, self.best - 1)
            elif self.best == steps[-1] < FARTHEST:
                steps.append(self.best + 1)
            else:
                break

    def _tried(self, step: float) -> Mapping[int, float]:
        runs = self._evidence.trainings(self._arm, self._samples, step)
        return {seed: run.loss for seed, run in runs.items()}

    def _loss(self, step: int) -> float | None:
        found = self._tried(step)
        return fmean(found[seed] for seed in SEEDS) if {*SEEDS} <= {*found} else None

    @property
    def missing(self) -> Iterator[tuple[int, int]]:
        """Octaves and seeds that are to be trained next."""
        for step in self.losses:
            found = self._tried(step)
            yield from ((step, seed) for seed in SEEDS if seed not in found)

    @property
    def best(self) -> int:
        """The octave of the lowest loss; of equals, the one nearest to the arm's own rate.

        The lowest one where trainings diverged at all of them.
        """
        known = {step: loss for step, loss in self.losses.items() if loss is not None}
        if math.inf == min(known.values()):
            return min(known)
        return min(known, key=lambda step: (known[step], abs(step), step))

    @property
    def bend(self) -> float:
        """Second difference of the losses around the best octave; infinite if one of them is."""
        below, at, above = self._near()
        return below - 2 * at + above if at < math.inf else math.inf

    def _near(self) -> list[float]:
        found = (self.losses.get(self.best + side) for side in NEAR)
        return [math.inf if loss is None else loss for loss in found]

    @property
    def minimum(self) -> float | None:
        """Octaves above the arm's own rate at which the loss is lowest; None while not known.

        It is where the parabola through the lowest loss and its neighbours has its minimum, to a
        quarter of an octave, so that no arm profits from where its ladder begins.
        """
        if None in self.losses.values():
            return None
        below, _, above = self._near()
        is_bowl = 0 < self.bend < math.inf
        return self.best + (round(2 * (below - above) / self.bend) / 4 if is_bowl else 0.0)

    @property
    def tuned(self) -> float | None:
        """The minimum, or a lower rate where a training at that one diverged."""
        step = self.minimum
        while step is not None and step > -FARTHEST and math.inf in self._tried(step).values():
            step -= 0.25
        return step
