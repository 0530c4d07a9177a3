"""The trials of ``compare``, and the search for learning rates that decides which they are.

Every optimizer gets the same trials: complete short schedules on a ladder of learning rates, runs
twice as long at the best and its two neighbours, and so on. Where the best rate of one optimizer is
at the end of its ladder, the ladders of all grow. Then come the verdicts, on seeds of their own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from steadygrad.studies.compare.optimizers import KNOWN
from steadygrad.studies.compare.schema import Plan, Run
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Key
from steadygrad.studies.trials import Job, Trial, evaluation_cost

__all__ = ["DEFAULTS", "MARKS", "TURNS", "Search", "center", "make_trials"]

# Octaves of the first ladder around an optimizer's default rate, and around the best rate of
# shorter runs.
LADDER, NEAR = (-2, -1, 0, 1, 2), (-1, 0, 1)
# Rates that a ladder may grow by, in short runs, in those twice as long, and in the longest.
WIDENINGS = (4, 1, 1)
# Seeds at the default learning rate.
DEFAULTS = 2
# Evaluations of a verdict's run.
MARKS = 4
# Measurements of a step's time.
TURNS = 28

Ladders = Mapping[str, Sequence[int]]


def center(multiple: int) -> int:
    """Octaves by which the learning rate's default follows the batch size: the square root."""
    return round(math.log2(multiple) / 2)


class Search:
    """The search for the learning rates, as far as its trials are recorded.

    Decisions read only what earlier rounds of the search have asked for, so that they are the same
    whatever else has been recorded meanwhile. They are kept: a search is made anew for a results
    that has grown.

    Args:
        plan: The plan.
        results: The results.
        multiple: Batch size over the task's.
    """

    def __init__(self, plan: Plan, results: Results, multiple: int) -> None:
        self.plan, self.results, self.multiple = plan, results, multiple
        # Rung of the verdict on the longest horizon.
        self.last = 2 if plan.full else 1
        self._ladders: dict[tuple[int, int], Ladders] = {}

    def loss(
        self, optimizer: str, rung: int, step: float, point: int | None = None
    ) -> float | None:
        """Loss of the search's seed; infinite where it diverged, None where it is not recorded.

        The default point of the other knobs is the one that the rung is searched at.
        """
        if point is None:
            point = self.point(optimizer) if rung == 2 else 0
        samples = self.plan.horizons[rung]
        run = self.results.get(Run, optimizer, self.multiple, samples, point, step, 0)
        if run is None:
            return None
        return math.inf if math.isnan(run.loss) else run.loss

    def ladders(self, rung: int, rounds: int | None = None) -> Ladders:
        """Steps that each optimizer tries in a rung, after some rounds of widening."""
        rounds = WIDENINGS[rung] if rounds is None else rounds
        if (rung, rounds) not in self._ladders:
            self._ladders[rung, rounds] = self._widened(rung, rounds)
        return self._ladders[rung, rounds]

    def _widened(self, rung: int, rounds: int) -> Ladders:
        if not rounds:
            first = {name: center(self.multiple) for name in self.plan.optimizers}
            middles = {name: self.best(name, rung - 1) for name in first} if rung else first
            offsets = NEAR if rung else LADDER
            return {name: [best + offset for offset in offsets] for name, best in middles.items()}
        found = self.ladders(rung, rounds - 1)
        sides = {name: self._edge(name, rung, steps) for name, steps in found.items()}
        if not any(sides.values()):
            return found
        return {
            name: [steps[0] - 1, *steps]
            if (sides[name] or self._nearer(name, rung, steps)) < 0
            else [*steps, steps[-1] + 1]
            for name, steps in found.items()
        }

    def tried(self, optimizer: str, rung: int) -> dict[int, float]:
        """Recorded losses, by step."""
        losses = {step: self.loss(optimizer, rung, step) for step in self.ladders(rung)[optimizer]}
        return {step: loss for step, loss in losses.items() if loss is not None}

    def is_done(self, optimizer: str, rung: int) -> bool:
        """Whether everything up to a rung is recorded."""
        rungs = range(rung + 1)
        return all(len(self.tried(optimizer, r)) == len(self.ladders(r)[optimizer]) for r in rungs)

    def best(self, optimizer: str, rung: int) -> int:
        """The step with the lowest loss; the lower one of equals."""
        return self._best(optimizer, rung, self.ladders(rung)[optimizer])

    def is_interior(self, optimizer: str, rung: int) -> bool:
        """Whether the best step has worse neighbours on both sides."""
        return not self._edge(optimizer, rung, self.ladders(rung)[optimizer])

    def point(self, optimizer: str) -> int:
        """The best point of the other knobs."""
        step, points = self.best(optimizer, 1), range(self.plan.points)
        return min(points, key=lambda point: (self._known(optimizer, 1, step, point), point))

    def tuned(self, optimizer: str, rung: int) -> tuple[int, float]:
        """Point of the other knobs, and step of the learning rate, of the verdict at a rung.

        The step is where the parabola through the best one and its neighbours has its minimum, so
        that no optimizer profits from a ladder that happens to contain its best rate.
        """
        rung = min(rung, self.last)
        point, best = self.point(optimizer), self.best(optimizer, rung)
        below, _, above = self._near(optimizer, rung)
        bend = self.bend(optimizer, rung)
        # Before the last rung, points but the default one were tried at one rate only.
        if (point and rung < 2) or not 0 < bend < math.inf:
            return point, float(best)
        # A quarter of an octave is as fine as it matters.
        return point, best + round(2 * (below - above) / bend) / 4

    def bend(self, optimizer: str, rung: int) -> float:
        """Second difference of the losses around the best rate.

        Infinite if the run at the best rate or at a neighbouring rate diverged or is missing.
        """
        below, at, above = self._near(optimizer, min(rung, self.last))
        return below - 2 * at + above if at < math.inf else math.inf

    def _near(self, optimizer: str, rung: int) -> list[float]:
        """Losses at the best rate and beside it."""
        best = self.best(optimizer, rung)
        return [self._known(optimizer, rung, best + offset) for offset in NEAR]

    def _known(self, optimizer: str, rung: int, step: int, point: int | None = None) -> float:
        loss = self.loss(optimizer, rung, step, point)
        return math.inf if loss is None else loss

    def _best(self, optimizer: str, rung: int, steps: Sequence[int]) -> int:
        return min(steps, key=lambda step: (self._known(optimizer, rung, step), step))

    def _edge(self, optimizer: str, rung: int, steps: Sequence[int]) -> int:
        """Side of the ladder on which the best step has no neighbour: -1, 1, or 0 for none."""
        best = self._best(optimizer, rung, steps)
        return -1 if best == steps[0] else int(best == steps[-1])

    def _nearer(self, optimizer: str, rung: int, steps: Sequence[int]) -> int:
        """Side of the ladder whose end has the lower loss."""
        low, high = (self._known(optimizer, rung, step) for step in (steps[0], steps[-1]))
        return -1 if low <= high else 1


def make_trials(plan: Plan, valid_size: int) -> list[Trial]:
    """All trials, in the order in which they are recorded; one evaluates ``valid_size`` samples."""
    cost = TURNS * plan.batch_size * (1 + len(plan.optimizers))
    speed = Trial(("speed",), cost, lambda results: {"kind": "speed"}, "time of a step")
    return [speed, *_trainings(plan, evaluation_cost(valid_size))]


def _trainings(plan: Plan, evaluation: int) -> Iterator[Trial]:
    def trials(rung: int, needs: tuple[Key, ...], what: str, *key: str | int) -> Iterator[Trial]:
        cost = plan.horizons[rung] + (MARKS if key[0] == "verdict" else 1) * evaluation
        for name in plan.optimizers:
            called = f"{name}: {what} over {plan.horizons[rung]:,}"
            yield Trial((*key, name), cost, partial(_job, plan, (*key, name)), called, needs)

    def searches(multiple: int) -> Iterator[list[Trial]]:
        """The search with one batch size: groups of trials, each of which needs the one before."""
        needs: tuple[Key, ...] = (("speed",),)
        for rung in range(2 + plan.full):
            for number in range(1 + WIDENINGS[rung]):
                places = range(1 if number else len(NEAR if rung else LADDER))
                key = "search", multiple, rung, number
                group = [t for p in places for t in trials(rung, needs, "learning rate", *key, p)]
                needs = tuple(trial.key for trial in group)
                yield group
            if rung == 1 and plan.points > 1:
                points, what = range(1, plan.points), "other knobs"
                group = [t for p in points for t in trials(1, needs, what, "point", multiple, p)]
                needs = tuple(trial.key for trial in group)
                yield group

    for multiple in plan.multiples:
        needs: tuple[Key, ...] = ()
        for group in searches(multiple):
            needs = tuple(trial.key for trial in group)
            yield from group
        # The longer horizon first: a study that is cut short has said the more important. Seed by
        # seed, so that pairs are whole.
        for rung in (2, 1):
            for seed in range(1, plan.seeds + 1):
                yield from trials(rung, needs, f"seed {seed}", "verdict", multiple, rung, seed)
        if multiple == 1:
            for seed in range(1, DEFAULTS + 1):
                yield from trials(2, needs, f"default rate, seed {seed}", "default", 1, 2, seed)


def _job(plan: Plan, key: Key, results: Results) -> Job | None:
    """The job of a trial; None where the search has nothing to ask."""
    kind, multiple, name = key[0], int(key[1]), str(key[-1])
    rung, point, repeat, numbers = 1, 0, 0, [int(part) for part in key[2:-1]]
    step: float
    search = Search(plan, results, multiple)
    if kind == "search":
        rung, number, place = numbers
        before = search.ladders(rung, number - 1)[name] if number else ()
        steps = [step for step in search.ladders(rung, number)[name] if step not in before]
        if place >= len(steps):
            return None
        step, point = steps[place], search.point(name) if rung == 2 else 0
    elif kind == "point":
        point, step = numbers[0], search.best(name, 1)
        # Without knobs it would be the same training.
        if name not in KNOWN:
            return None
    elif kind == "verdict":
        rung, repeat = numbers
        point, step = search.tuned(name, rung)
    else:
        rung, repeat = numbers
        step = 0
    return {
        "kind": "training",
        "optimizer": name,
        "multiple": multiple,
        "samples": plan.horizons[rung],
        "point": point,
        # A number of one type: it is a part of the event's name.
        "step": float(step),
        "repeat": repeat,
    }
