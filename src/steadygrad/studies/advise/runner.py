"""Runs the trials of ``advise``."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from steadygrad.formulas.batch_size import learning_rate
from steadygrad.studies.advise.plan import MICRO_BATCHES
from steadygrad.studies.advise.schema import Branch, Noise, Plan, Point, Scratch, Stage
from steadygrad.studies.advise.trials import (
    END_MARKS,
    FRACTIONS,
    averaged_end,
    end_marks,
    run_marks,
    stretches,
)
from steadygrad.studies.checkpoint import State
from steadygrad.studies.order import Order, branch_order, main_order
from steadygrad.studies.schema import Result
from steadygrad.studies.study import Workplace
from steadygrad.studies.trainer import Diverged, Rate
from steadygrad.studies.trials import Job

__all__ = ["run_job"]

# Training losses of a segment of the main trajectory that are recorded, each an average.
TRAINING_MARKS = 32


def run_job(job: Job, plan: Plan, place: Workplace) -> Result:
    """Runs one trial; see :meth:`steadygrad.studies.study.Study.run`."""
    fields = {name: value for name, value in job.items() if name != "kind"}
    event: Result = getattr(_Runner(plan, place), str(job["kind"]))(**fields)
    return event


class _Runner:
    def __init__(self, plan: Plan, place: Workplace) -> None:
        self.plan, self.place = plan, place
        self.trainer, self.task = place.trainer, place.trainer.task

    def point(self, point: int) -> Point:
        """Trains the main trajectory from the point before to a point, and keeps its state."""
        trainer, stop = self.trainer, self.plan.points[point]
        start = self.plan.points[point - 1] if point else 0
        if point:
            trainer.load(self.state(point - 1))
        else:
            trainer.restart()
        trainer.seed_everything("train", point)
        stride = max(1, math.ceil((stop - start) / self.task.batch_size / TRAINING_MARKS))
        training = []

        def steps() -> Iterator[int]:
            order = main_order(len(self.task.train), trainer.seed)
            way = trainer.run(order, start, stop, self.task.batch_size)
            for number, seen in enumerate(way, start=1):
                if number % stride == 0 or seen == stop:
                    losses = trainer.take_losses()
                    training.append((seen, math.fsum(losses) / len(losses)))
                yield seen

        marks = run_marks(stop, self.task.batch_size, start)
        curve = self._curve(steps(), start, marks, f"training to {stop:,} samples", own=True)
        state = trainer.state(stop)
        # The others continue once the file is there.
        trainer.context.on_main(lambda: self.place.checkpoints.save(f"point-{point}", state))
        return Point(
            point=point,
            samples=stop,
            steps=trainer.steps,
            valid_loss=curve[-1][1],
            curve=tuple(curve),
            training=tuple(training),
        )

    def state(self, point: int) -> State:
        """The state at a point: read, or trained again."""
        samples = self.plan.points[point]
        return self.place.state(f"point-{point}", samples, partial(self.point, point))

    def noise(self, point: int) -> Noise:
        """Measures the gradient noise scale at a point."""
        trainer, what = self.trainer, f"noise scale at {self.plan.points[point]:,} samples"
        trainer.load(self.state(point))
        trainer.seed_everything("noise", point)
        order, used = self._order(point, "noise"), 0
        with trainer.noise_scale() as noise:
            steps = self.plan.noise_steps[point]
            for samples in trainer.measure(noise, order, steps, MICRO_BATCHES):
                self.place.advance(samples - used, what)
                used = samples
            found = noise.estimate().as_dict()
        trainer.look()
        names = set(Noise.__struct_fields__) - {"point", "samples", "time"}
        return Noise(point=point, samples=used, **{name: found[name] for name in names})

    def branch(self, point: int, repeat: int, batch_size: int) -> Branch:
        """Trains on from a point with a batch size."""
        trainer, base, length = self.trainer, self.task.batch_size, self.plan.branch_samples[point]
        trainer.load(self.state(point))
        # The same name for all batch sizes: they see the same data and the same random numbers.
        trainer.seed_everything("branch", point, repeat)
        first, seen = trainer.steps, self.plan.points[point]
        unit, own = self.plan.multiples[point][-1] * base, batch_size == base
        ends = [length - unit * back for back in reversed(range(min(END_MARKS, length // unit)))]
        way = [round(part * length / base) * base for part in FRACTIONS] if own else []
        order, rate = self._order(point, f"branch-{repeat}"), Rate(batch_size)
        steps = trainer.run(order, 0, length, batch_size, rate=rate, seen=seen)
        what = f"branch of {batch_size:,} at {seen:,}"
        found = self._averaged(steps, length, ends, way, what, own=own)
        return Branch(
            point=point,
            repeat=repeat,
            batch_size=batch_size,
            lr=self._lr(batch_size, 1.0),
            steps=trainer.steps - first,
            **found,
        )

    def scratch(
        self,
        purpose: Any,
        repeat: int,
        batch_size: int,
        rate: float,
        samples: int,
        warmup_samples: int,
        stages: list[list[int]],
    ) -> Scratch:
        """Trains from scratch, with one batch size or with a growing one."""
        trainer, base = self.trainer, self.task.batch_size
        trainer.restart(repeat)
        trainer.seed_everything("run", repeat)

        def steps() -> Iterator[int]:
            at, order = 0, main_order(len(self.task.train), trainer.seed, repeat)
            for _, border, size in stretches(stages, samples):
                chosen = Rate(size, rate, warmup_samples, samples)
                # A stage ends with its last whole batch; the next one begins there.
                for seen in trainer.run(order, at, border, size, rate=chosen):
                    at = seen
                    yield at

        # Only the smallest batch's curve is compared as a whole, also with that of another rate.
        way = run_marks(samples, base) if batch_size == base else []
        ends, what = end_marks(samples, base), f"{batch_size:,} from scratch"
        own = batch_size == base and rate == 1
        found = self._averaged(steps(), samples, ends, way, what, own=own)
        rows = ((start, size, self._lr(size, rate)) for start, size in stages)
        return Scratch(
            purpose=purpose,
            repeat=repeat,
            batch_size=batch_size,
            rate=rate,
            stages=tuple(Stage(from_samples=s, batch_size=b, lr=lr) for s, b, lr in rows),
            warmup_samples=warmup_samples,
            steps=trainer.steps,
            **found,
        )

    def _averaged(
        self,
        steps: Iterable[int],
        length: int,
        ends: list[int],
        way: list[int],
        what: str,
        *,
        own: bool,
    ) -> dict[str, Any]:
        """Losses on the way, the last one being the average over the end marks."""
        try:
            marks = [*(mark for mark in way if mark < ends[0]), *ends]
            curve = self._curve(steps, 0, marks, what, own=own)
        except Diverged:
            # With the task's own settings this is an error; otherwise it is a result.
            if own:
                raise
            curve = [(length, math.inf)]
        # Large batches may end before the first end mark.
        late = sum(place >= ends[0] for place, _ in curve)
        curve = averaged_end(curve, max(1, late))
        return {"samples": curve[-1][0], "loss": curve[-1][1], "curve": tuple(curve)}

    def _curve(
        self, steps: Iterable[int], start: int, marks: Iterable[int], what: str, *, own: bool
    ) -> list[tuple[int, float]]:
        """Trains, and evaluates once after each mark is reached."""
        found, left, at = [], sorted(set(marks)), start
        for seen in steps:
            self.place.advance(seen - at, what)
            at = seen
            if left and at >= left[0]:
                found.append((at, self._evaluate(own=own)))
                left = [mark for mark in left if mark > at]
        return [*found, (at, self._evaluate(own=own))] if left else found

    def _evaluate(self, *, own: bool) -> float:
        loss = self.place.evaluate()
        if own and not math.isfinite(loss):
            raise Diverged(
                f"The validation loss should stay finite. Found {loss} after {self.trainer.steps} "
                f"steps. Remedy: a lower Task.lr than {self.task.lr:g}."
            )
        return loss

    def _lr(self, size: int, rate: float) -> float:
        return rate * learning_rate(self.task.lr, size, self.task.batch_size, self.task.lr_rule)

    def _order(self, point: int, kind: str) -> Order:
        seen, size = self.plan.points[point], len(self.task.train)
        return branch_order(size, self.trainer.seed, seen=seen, stream=f"{kind}-{point}")
