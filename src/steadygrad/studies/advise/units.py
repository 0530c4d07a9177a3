"""The units of work, in their fixed order.

Each is a pure function of the task, the seed and the state at its point of training. Its events
are recorded when it is whole; a unit that is cut short leaves no trace.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from steadygrad.formulas.batch_size import learning_rate
from steadygrad.studies.advise.critical import Branch, Critical, find_critical
from steadygrad.studies.advise.plan import EVALUATION_COST, FRACTIONS, MICRO_BATCHES, Plan
from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.engine import Diverged, Engine, State
from steadygrad.studies.ledger import Ledger
from steadygrad.studies.order import branch_order, main_order, seed_for

__all__ = ["Units", "branches_of", "critical_at"]

# Loss values of a segment of the main trajectory that are recorded, each an average.
MARKS = 32


class Units:
    """Runs a plan.

    Args:
        engine: Trains.
        plan: The amounts of work.
        ledger: Keeps what is done.
        checkpoints: Keeps the states at the points of training; None where none are written.
        tolerance: Extra samples that are acceptable, as a fraction.
        advance: Told how many samples of work are done, as they are done, and on what
            (empty: on the same as before).
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        ledger: Ledger,
        checkpoints: Checkpoints,
        *,
        tolerance: float,
        advance: Callable[[int, str], None],
    ) -> None:
        self.engine, self.plan, self.ledger = engine, plan, ledger
        self.checkpoints, self.tolerance, self.advance = checkpoints, tolerance, advance
        self._states: dict[int, State] = {}

    def run(self) -> None:
        """Does everything that is not recorded yet.

        Raises:
            Halt: When the study has to stop.
            Diverged: If training at the task's own batch size does not stay finite.
        """
        for i in range(len(self.plan.points)):
            if self.ledger.find("point", i) is None:
                self._trajectory(i)
            if self.ledger.find("noise", i) is None:
                self._noise(i)
            for repeat, multiple in self._branches(i):
                if self.ledger.find("branch", i, repeat, multiple) is None:
                    self._branch(i, repeat, multiple)
            if self.ledger.find("critical", i) is None:
                self._critical(i)
            self._states.pop(i - 1, None)

    def _branches(self, i: int) -> Iterator[tuple[int, int]]:
        # Repeat by repeat: a study that is cut short has whole repeats, not half of the sizes.
        for repeat in range(self.plan.repeats):
            for multiple in self.plan.points[i].multiples:
                yield repeat, multiple

    def _trajectory(self, i: int) -> State:
        """Trains the main trajectory from the point before to point ``i``."""
        began = time.monotonic()
        engine, stop = self.engine, self.plan.points[i].samples
        start = 0
        if i == 0:
            engine.restart()
        else:
            engine.load(self.state(i - 1))
            start = self.plan.points[i - 1].samples
        engine.seed_everything("train", i)
        events = list(self._curve(i, start, stop))
        loss = self._finite(self._evaluate())
        state = self._states[i] = engine.state(stop)
        if engine.ranks.is_main:
            self.checkpoints.save(i, state)
        for fields in events:
            self.ledger.add("train", **fields)
        self.ledger.add(
            "point",
            point=i,
            samples=stop,
            steps=engine.steps,
            valid_loss=loss,
            time={"seconds": time.monotonic() - began},
        )
        return state

    def _curve(self, i: int, start: int, stop: int) -> Iterator[dict[str, Any]]:
        order = main_order(len(self.engine.task.train), self.engine.seed)
        size, losses = self.engine.task.batch_size, []
        stride = max(1, math.ceil((stop - start) / size / MARKS))
        for seen, loss in self.engine.run(order, start, stop, size):
            losses.append(loss)
            self.advance(size, f"training to {stop:,} samples")
            if len(losses) == stride or seen == stop:
                mean = math.fsum(losses) / len(losses)
                yield {"point": i, "samples": seen, "steps": self.engine.steps, "loss": mean}
                losses.clear()

    def state(self, i: int) -> State:
        """The state at point ``i``: kept, read, or trained again."""
        if i not in self._states:
            loaded = self.checkpoints.load(i)
            # On every rank or on none: training again takes all of them.
            whole = all(self.engine.ranks.gather(loaded is not None))
            self._states[i] = loaded if loaded and whole else self._trajectory(i)
        return self._states[i]

    def _noise(self, i: int) -> None:
        began, point = time.monotonic(), self.plan.points[i]
        self.engine.load(self.state(i))
        self.engine.seed_everything("noise", i)
        order = self._order(i, "noise")
        used = 0
        with self.engine.noise_scale() as noise:
            for samples in self.engine.measure(noise, order, point.noise_steps, MICRO_BATCHES):
                self.advance(samples - used, f"noise scale at {point.samples:,} samples")
                used = samples
            estimate = noise.estimate().as_dict()
        self.engine.ranks.poll()
        seconds = {"seconds": time.monotonic() - began}
        self.ledger.add("noise", point=i, **estimate, samples=used, time=seconds)

    def _branch(self, i: int, repeat: int, multiple: int) -> None:
        began, task = time.monotonic(), self.engine.task
        size = multiple * task.batch_size
        self.engine.load(self.state(i), multiple)
        # The same name for all batch sizes: they see the same data and the same random numbers.
        self.engine.seed_everything("branch", i, repeat)
        first = self.engine.steps
        try:
            curve = self._branch_curve(i, repeat, size)
        except Diverged:
            # At the task's own learning rate this is an error, at a larger one it is a result.
            if multiple == 1:
                raise
            curve = [(self._end(i), math.inf)]
        self.ledger.add(
            "branch",
            point=i,
            multiple=multiple,
            repeat=repeat,
            batch_size=size,
            lr=learning_rate(task.lr, multiple, 1, task.lr_rule),
            steps=self.engine.steps - first,
            samples=curve[-1][0],
            loss=curve[-1][1],
            curve=[list(pair) for pair in curve],
            time={"seconds": time.monotonic() - began},
        )

    def _branch_curve(self, i: int, repeat: int, size: int) -> list[tuple[int, float]]:
        """Losses on the way, the last one being the average over the end marks."""
        point, base = self.plan.points[i], self.engine.task.batch_size
        length, marks = point.branch_samples, point.end_marks(base)
        order = self._order(i, f"branch-{repeat}")
        on_the_way = {round(part * length / base) * base for part in FRACTIONS}
        ends, curve, done = [], [], 0
        for seen, _ in self.engine.run(order, 0, length, size):
            self.advance(seen - done, f"branch of {size:,} at {point.samples:,}")
            done = seen
            if seen in marks:
                ends.append(self._evaluate())
            elif size == base and seen in on_the_way and seen < marks[0]:
                curve.append((seen, self._finite(self._evaluate())))
        loss = sum(ends) / len(ends)
        return [*curve, (self._end(i), self._finite(loss) if size == base else loss)]

    def _end(self, i: int) -> int:
        """Samples of a branch that its final loss stands for: halfway between the end marks."""
        marks = self.plan.points[i].end_marks(self.engine.task.batch_size)
        return (marks[0] + marks[-1]) // 2

    def _order(self, i: int, kind: str) -> Any:
        seen, task = self.plan.points[i].samples, self.engine.task
        return branch_order(len(task.train), self.engine.seed, seen=seen, stream=f"{kind}-{i}")

    def _critical(self, i: int) -> None:
        branches = branches_of(self.ledger.select("branch"), i)
        critical = critical_at(branches, self.tolerance, self.engine.seed, i)
        self.ledger.add("critical", point=i, **critical.event())

    def _evaluate(self) -> float:
        loss = self.engine.evaluate()
        self.advance(round(len(self.engine.task.valid) * EVALUATION_COST), "")
        return loss

    def _finite(self, loss: float) -> float:
        if not math.isfinite(loss):
            raise Diverged(
                f"The validation loss should stay finite. Found {loss} after {self.engine.steps} "
                f"steps. Remedy: a lower Task.lr than {self.engine.task.lr:g}."
            )
        return loss


def branches_of(events: list[dict[str, Any]], i: int) -> list[Branch]:
    """The branches from point ``i`` among recorded ``branch`` events."""
    return [
        Branch(
            batch_size=event["batch_size"],
            repeat=event["repeat"],
            samples=event["samples"],
            loss=event["loss"],
            curve=[(samples, loss) for samples, loss in event["curve"]],
        )
        for event in events
        if event["point"] == i
    ]


def critical_at(branches: list[Branch], tolerance: float, seed: int, i: int) -> Critical:
    """The critical batch size at point ``i``; the same branches always give the same interval."""
    return find_critical(branches, tolerance, seed=seed_for(seed, "critical", i))
