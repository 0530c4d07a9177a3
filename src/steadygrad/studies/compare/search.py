"""The search for learning rates: it decides over the trainings, and over each verdict's rate.

Every optimizer gets the same trials: complete short schedules on a ladder of learning rates, runs
twice as long at the best and its two neighbours, and so on. Where the best rate of one optimizer is
at the end of its ladder, the ladders of all grow. One that sets its own rate has no ladder.
"""

import math
from collections.abc import Mapping, Sequence

from steadygrad.studies.compare.schema import Plan, Run
from steadygrad.studies.folder import Results

# Octaves of the first ladder around an optimizer's default rate, and around the best rate of
# shorter runs.
LADDER, NEAR = (-2, -1, 0, 1, 2), (-1, 0, 1)
# Rates that a ladder may grow by, in short runs, in those twice as long, and in the longest.
WIDENINGS = (4, 1, 1)

Ladders = Mapping[str, Sequence[int]]


def center(multiple: int) -> int:
    """Octaves by which the learning rate's default follows the batch size: the square root."""
    return round(math.log2(multiple) / 2)


class Search:
    """The search with one batch size, as far as its trials are recorded.

    Decisions read only what earlier rounds of the search have asked for, so that they are the same
    whatever else has been recorded meanwhile. They are kept: results that have grown need another.
    """

    def __init__(self, plan: Plan, results: Results, multiple: int) -> None:
        self.plan, self.results, self.multiple = plan, results, multiple
        # Rung of the verdict on the longest horizon.
        self.last = 2 if plan.full else 1
        # Those of optimizers that set their own rate.
        self._fixed = {name: [0] for name, traits in plan.traits.items() if traits.own_rate}
        self._ladders: dict[tuple[int, int], Ladders] = {}

    def _run(self, optimizer: str, rung: int, step: int) -> Run | None:
        """The training with the search's seed; None where it is not recorded."""
        return self.results.get(Run, optimizer, self.multiple, self.plan.horizons[rung], step, 0)

    def _loss(self, optimizer: str, rung: int, step: int) -> float:
        """Its loss; infinite where it diverged or is not recorded."""
        run = self._run(optimizer, rung, step)
        return run.end if run else math.inf

    def ladders(self, rung: int, rounds: int | None = None) -> Ladders:
        """Steps that each optimizer tries in a rung, after some rounds of widening."""
        rounds = WIDENINGS[rung] if rounds is None else rounds
        if (rung, rounds) not in self._ladders:
            self._ladders[rung, rounds] = self._widened(rung, rounds)
        return self._ladders[rung, rounds]

    def _widened(self, rung: int, rounds: int) -> Ladders:
        if not rounds:
            names, offsets = self.plan.optimizers, NEAR if rung else LADDER
            middles = {n: self.best(n, rung - 1) if rung else center(self.multiple) for n in names}
            ladders = {
                name: [best + offset for offset in offsets] for name, best in middles.items()
            }
            return ladders | self._fixed
        found = self.ladders(rung, rounds - 1)
        sides = {name: self._edge(name, rung, steps) for name, steps in found.items()}
        if not any(sides.values()):
            return found
        for name, steps in found.items():
            # Those whose best rate is inside grow at the end with the lower loss.
            low, high = (self._loss(name, rung, step) for step in (steps[0], steps[-1]))
            sides[name] = sides[name] or (-1 if low <= high else 1)
        grown = {
            name: [steps[0] - 1, *steps] if sides[name] < 0 else [*steps, steps[-1] + 1]
            for name, steps in found.items()
        }
        return grown | self._fixed

    def tried(self, optimizer: str, rung: int) -> dict[int, float]:
        """Recorded losses, by step."""
        steps = self.ladders(rung)[optimizer]
        return {step: run.end for step in steps if (run := self._run(optimizer, rung, step))}

    def best(self, optimizer: str, rung: int, steps: Sequence[int] = ()) -> int:
        """The step with the lowest loss; the lower one of equals. Default: of the whole ladder."""
        steps = steps or self.ladders(rung)[optimizer]
        return min(steps, key=lambda step: (self._loss(optimizer, rung, step), step))

    def is_interior(self, optimizer: str, rung: int) -> bool:
        """Whether the best step has worse neighbours on both sides."""
        return not self._edge(optimizer, rung, self.ladders(rung)[optimizer])

    def tuned(self, optimizer: str, rung: int) -> float:
        """Step of the learning rate of the verdict at a rung.

        It is where the parabola through the best one and its neighbours has its minimum, so that no
        optimizer profits from a ladder that happens to contain its best rate.
        """
        rung = min(rung, self.last)
        best = self.best(optimizer, rung)
        (below, _, above), bend = self._near(optimizer, rung), self.bend(optimizer, rung)
        if not 0 < bend < math.inf:
            return float(best)
        # A quarter of an octave is as fine as it matters.
        return best + round(2 * (below - above) / bend) / 4

    def bend(self, optimizer: str, rung: int) -> float:
        """Second difference of the losses around the best rate; infinite if one of them is."""
        below, at, above = self._near(optimizer, min(rung, self.last))
        return below - 2 * at + above if at < math.inf else math.inf

    def _near(self, optimizer: str, rung: int) -> list[float]:
        best = self.best(optimizer, rung)
        return [self._loss(optimizer, rung, best + offset) for offset in NEAR]

    def _edge(self, optimizer: str, rung: int, steps: Sequence[int]) -> int:
        """Side of the ladder on which the best step has no neighbour: -1, 1, or 0 for none."""
        if optimizer in self._fixed:
            return 0
        best = self.best(optimizer, rung, steps)
        return -1 if best == steps[0] else int(best == steps[-1])
