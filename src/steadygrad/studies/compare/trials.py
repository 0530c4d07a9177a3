"""The trials of ``compare``, and the search for learning rates that decides which they are.

Every optimizer gets the same trials: complete short schedules on a ladder of learning rates, runs
twice as long at the best and its two neighbours, and so on. Where the best rate of one optimizer is
at the end of its ladder, the ladders of all grow. Then come the verdicts, on seeds of their own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from steadygrad.record import Key
from steadygrad.record.schema.compare import Plan, Run
from steadygrad.studies.journal import Journal
from steadygrad.studies.study import Job, Trial, evaluation_cost

__all__ = ["MARKS", "Search", "center", "make_trials"]

# Octaves of the first ladder around an optimizer's default rate.
LADDER = (-2, -1, 0, 1, 2)
# Rates that a ladder may grow by, in short runs and in those twice as long.
WIDENINGS = (4, 1)
# Seeds at the default learning rate.
DEFAULTS = 2
# Evaluations of a verdict's run.
MARKS = 4
# Measurements of the step's time: turns, and optimizer steps of the task's batch in each.
TURNS = 24


def center(multiple: int) -> int:
    """Octaves by which the learning rate's default follows the batch size: the square root."""
    return round(math.log2(multiple) / 2)


@dataclass(frozen=True)
class Search:
    """The search for the learning rates, as far as its trials are recorded.

    Decisions read only what earlier rounds of the search have asked for, so that they are the same
    whatever else has been recorded meanwhile.

    Args:
        plan: The plan.
        journal: The results.
        multiple: Batch size over the task's.
    """

    plan: Plan
    journal: Journal
    multiple: int

    def loss(self, optimizer: str, rung: int, step: int, point: int = 0) -> float:
        """Loss of the search's seed; infinite where it diverged or is not recorded."""
        samples = self.plan.horizons[rung]
        run = self.journal.get(Run, optimizer, self.multiple, samples, point, step, 0)
        return math.inf if run is None or math.isnan(run.loss) else run.loss

    def ladders(self, rung: int, rounds: int | None = None) -> Mapping[str, list[int]]:
        """Steps that each optimizer has tried in a rung, after some rounds of widening."""
        middle = center(self.multiple)
        if rung == 0:
            found = {name: [middle + step for step in LADDER] for name in self.plan.optimizers}
        else:
            bests = {name: self.best(name, rung - 1) for name in self.plan.optimizers}
            # In the last rung the best rate can only have moved down, as runs are longer.
            above = 1 if rung == 1 else 0
            found = {name: [*range(best - 1, best + above + 1)] for name, best in bests.items()}
        most = WIDENINGS[rung] if rung < len(WIDENINGS) else 0
        for _ in range(most if rounds is None else rounds):
            sides = {name: self._edge(name, rung, steps) for name, steps in found.items()}
            if not any(sides.values()):
                break
            for name, steps in found.items():
                lower = (sides[name] or self._nearer(name, rung, steps)) < 0
                found[name] = [steps[0] - 1, *steps] if lower else [*steps, steps[-1] + 1]
        return found

    def best(self, optimizer: str, rung: int) -> int:
        """The step with the lowest loss; the lower one of equals."""
        steps = self.ladders(rung)[optimizer]
        return min(steps, key=lambda step: (self.loss(optimizer, rung, step), step))

    def is_interior(self, optimizer: str, rung: int) -> bool:
        """Whether the best step has worse neighbours on both sides."""
        return not self._edge(optimizer, rung, self.ladders(rung)[optimizer])

    def point(self, optimizer: str) -> int:
        """The best point of the other knobs."""
        step = self.best(optimizer, 1)
        points = range(self.plan.points)
        return min(points, key=lambda point: (self.loss(optimizer, 1, step, point), point))

    def tuned(self, optimizer: str, rung: int) -> tuple[int, int]:
        """Point of the other knobs, and step of the learning rate, of the verdict at a rung."""
        return self.point(optimizer), self.best(optimizer, rung if self.plan.full else 1)

    def _edge(self, optimizer: str, rung: int, steps: Sequence[int]) -> int:
        """Side of the ladder on which the best step has no neighbour: -1, 1, or 0 for none."""
        best = min(steps, key=lambda step: (self.loss(optimizer, rung, step), step))
        return -1 if best == steps[0] else int(best == steps[-1])

    def _nearer(self, optimizer: str, rung: int, steps: Sequence[int]) -> int:
        """Side of the ladder whose end has the lower loss."""
        ends = (self.loss(optimizer, rung, step) for step in (steps[0], steps[-1]))
        low, high = ends
        return -1 if low <= high else 1


def make_trials(plan: Plan, valid_size: int) -> list[Trial]:
    """All trials, in the order in which they are recorded; one evaluates ``valid_size`` samples."""
    maker, found = _Maker(plan, evaluation_cost(valid_size)), [_speed(plan)]
    for multiple in plan.multiples:
        found += maker.search(multiple)
    for multiple in plan.multiples:
        found += maker.verdicts(multiple)
    return [*found, *maker.defaults()]


def _speed(plan: Plan) -> Trial:
    cost = TURNS * plan.batch_size * (1 + len(plan.optimizers))
    return Trial(("speed",), cost, lambda journal: {"event": "speed"}, "time of a step")


class _Maker:
    def __init__(self, plan: Plan, evaluation: int) -> None:
        self.plan, self.evaluation = plan, evaluation
        # Keys of the last trials of the search with one batch size.
        self.searched: dict[int, tuple[Key, ...]] = {}

    def trial(self, key: Key, rung: int, needs: tuple[Key, ...], what: str, marks: int) -> Trial:
        cost = self.plan.horizons[rung] + marks * self.evaluation
        return Trial(key, cost, partial(_job, self.plan, key), what, needs)

    def search(self, multiple: int) -> Iterator[Trial]:
        """The search with one batch size: rung by rung, round by round."""
        plan, needs = self.plan, (("speed",),)
        lengths = [len(LADDER), 3, 2][: 2 + plan.full]
        for rung, length in enumerate(lengths):
            rounds = WIDENINGS[rung] if rung < len(WIDENINGS) else 0
            for number in range(1 + rounds):
                keys: list[Key] = []
                for place in range(1 if number else length):
                    for name in plan.optimizers:
                        keys.append(("search", multiple, rung, number, place, name))
                        what = f"{name}: learning rate over {plan.horizons[rung]:,}"
                        yield self.trial(keys[-1], rung, needs, what, 1)
                needs = tuple(keys)
            if rung == 1 and plan.points > 1:
                keys = []
                for point in range(1, plan.points):
                    for name in plan.optimizers:
                        keys.append(("point", multiple, point, name))
                        yield self.trial(keys[-1], 1, needs, f"{name}: other knobs", 1)
                needs = tuple(keys)
        self.searched[multiple] = needs

    def verdicts(self, multiple: int) -> Iterator[Trial]:
        """The runs on seeds of their own, at both horizons; seed by seed, so that pairs are whole.

        The longer horizon comes first: a study that is cut short has said the more important.
        """
        for rung in (2, 1):
            for seed in range(1, self.plan.seeds + 1):
                for name in self.plan.optimizers:
                    key: Key = ("verdict", multiple, rung, seed, name)
                    what = f"{name}: seed {seed} over {self.plan.horizons[rung]:,}"
                    yield self.trial(key, rung, self.searched[multiple], what, MARKS)

    def defaults(self) -> Iterator[Trial]:
        """The runs at the default learning rates."""
        for seed in range(1, DEFAULTS + 1):
            for name in self.plan.optimizers:
                key: Key = ("default", seed, name)
                what = f"{name}: default rate, seed {seed}"
                yield self.trial(key, 2, self.searched[1], what, MARKS)


def _job(plan: Plan, key: Key, journal: Journal) -> Job | None:
    """What a trial runs; None where the search has nothing to ask."""
    kind, name = key[0], str(key[-1])
    multiple = 1 if kind == "default" else int(key[1])
    search, rung, point, repeat = Search(plan, journal, multiple), 2, 0, 0
    if kind == "search":
        rung, number, place = (int(part) for part in key[2:5])
        before = search.ladders(rung, number - 1)[name] if number else []
        steps = [s for s in search.ladders(rung, number)[name] if s not in before]
        if place >= len(steps):
            return None
        step = steps[place]
    elif kind == "point":
        rung, point, step = 1, int(key[2]), search.best(name, 1)
    elif kind == "verdict":
        rung, repeat = int(key[2]), int(key[3])
        point, step = search.tuned(name, rung)
    else:
        repeat, step = int(key[1]), 0
    return {
        "event": "training",
        "optimizer": name,
        "multiple": multiple,
        "samples": plan.horizons[rung],
        "point": point,
        "step": step,
        "repeat": repeat,
    }
