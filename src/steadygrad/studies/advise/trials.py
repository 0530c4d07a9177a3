"""The trials of ``advise``, and how each is run.

In their order: at each point of training the main trajectory, the noise scale, the branches and
what refines them; then the smallest batch from scratch with other seeds, the candidates for the
recommendation, and the schedule.
"""

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from steadygrad.formulas.batch_size import learning_rate
from steadygrad.record import Event, Key
from steadygrad.record.schema.advise import Branch, Noise, Plan, Point, Scratch, Stage
from steadygrad.studies.advise.plan import EVALUATION_COST, MICRO_BATCHES
from steadygrad.studies.checkpoint import State
from steadygrad.studies.journal import Journal
from steadygrad.studies.order import Order, branch_order, main_order
from steadygrad.studies.study import Job, Trial, Workplace
from steadygrad.studies.trainer import Diverged, Rate, Trainer

__all__ = ["END_FRACTIONS", "RATES", "Decisions", "make_trials", "run_job"]

# Other learning rates at which the smallest batch is tried, relative to the task's.
RATES = (0.5, 2.0)
# Parts of a branch after which the smallest batch is evaluated.
FRACTIONS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Evaluations at the end of every branch, one step of the largest batch apart: the loss after a
# single optimizer step depends too much on that step's samples.
END_MARKS = 3
# Parts of a run from scratch after which the smallest batch is evaluated, and every batch.
RUN_FRACTIONS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
END_FRACTIONS = (0.96, 0.98, 1.0)
# Training losses of a segment of the main trajectory that are recorded, each an average.
TRAINING_MARKS = 32


class Decisions:
    """Choices that depend on results; the planner, which only counts, makes none."""

    def middle(self, journal: Journal, point: int, repeat: int) -> Job | None:
        """A batch size between the largest tolerable one and the next."""
        raise NotImplementedError

    def baseline(self, journal: Journal, repeat: int) -> Job | None:
        """The smallest batch from scratch with another seed."""
        raise NotImplementedError

    def candidate(self, journal: Journal, number: int, repeat: int) -> Job | None:
        """A batch size to train from scratch."""
        raise NotImplementedError

    def schedule(self, journal: Journal, repeat: int) -> Job | None:
        """A growing batch to train from scratch."""
        raise NotImplementedError


def make_trials(
    plan: Plan, valid_size: int, decide: Decisions, *, decays: bool = False
) -> list[Trial]:
    """All trials of a plan, in the order in which they are recorded.

    Args:
        plan: The plan.
        valid_size: Samples in one evaluation.
        decide: Choices that depend on results.
        decays: Whether the task's learning rate decays. The main trajectory and the branches
            leave the decay out, so that none of the runs from scratch is the main trajectory.
    """
    maker = _Maker(plan, math.ceil(valid_size * EVALUATION_COST), decide)
    maker.main_repeats = 0 if decays else 1
    return [*maker.points(), *maker.runs()]


class _Maker:
    def __init__(self, plan: Plan, evaluation: int, decide: Decisions) -> None:
        self.plan, self.evaluation, self.decide = plan, evaluation, decide
        self.repeats = range(plan.repeats)
        self.main_repeats = 1

    def _trial(
        self,
        key: Key,
        samples: int,
        evaluations: int,
        job: Job | Callable[[Journal], Job | None],
        what: str,
        needs: tuple[Key, ...],
    ) -> Trial:
        cost = samples + evaluations * self.evaluation
        return Trial(key, cost, job if callable(job) else lambda _: job, what, needs)

    def points(self) -> Iterator[Trial]:
        for i, samples in enumerate(self.plan.points):
            yield self._point(i, samples)
            needs: tuple[Key, ...] = (("point", i),)
            used = self.plan.noise_steps[i] * MICRO_BATCHES * self.plan.batch_size
            job = {"event": "noise", "point": i}
            yield self._trial(("noise", i), used, 0, job, f"noise scale at {samples:,}", needs)
            branches = list(self._branches(i, needs))
            yield from branches
            keys = tuple(trial.key for trial in branches)
            for repeat in self.repeats:
                yield self._middle(i, repeat, (*needs, *keys))

    def _point(self, i: int, samples: int) -> Trial:
        start = self.plan.points[i - 1] if i else 0
        marks = len(run_marks(samples, self.plan.batch_size, first=start))
        needs: tuple[Key, ...] = (("point", i - 1),) if i else ()
        job, what = {"event": "point", "point": i}, f"training to {samples:,} samples"
        return self._trial(("point", i), samples - start, marks, job, what, needs)

    def _branches(self, i: int, needs: tuple[Key, ...]) -> Iterator[Trial]:
        # Repeat by repeat: a study that is cut short has whole repeats, not half of the sizes.
        for repeat, multiple in product(self.repeats, self.plan.multiples[i]):
            size = multiple * self.plan.batch_size
            extra = len(FRACTIONS) if multiple == 1 else 0
            yield self._branch(i, repeat, size, END_MARKS + extra, needs)

    def _branch(self, i: int, repeat: int, size: int, marks: int, needs: tuple[Key, ...]) -> Trial:
        job = {"event": "branch", "point": i, "repeat": repeat, "batch_size": size}
        what = f"branch of {size:,} at {self.plan.points[i]:,}"
        key = ("branch", i, repeat, size)
        return self._trial(key, self.plan.branch_samples[i], marks, job, what, needs)

    def _middle(self, i: int, repeat: int, needs: tuple[Key, ...]) -> Trial:
        what = f"branch between two sizes at {self.plan.points[i]:,}"
        length = self.plan.branch_samples[i]

        def job(journal: Journal) -> Job | None:
            return self.decide.middle(journal, i, repeat)

        return self._trial(("middle", i, repeat), length, END_MARKS, job, what, needs)

    def runs(self) -> Iterator[Trial]:
        known = self._measured()
        for rate in RATES if self.plan.rates else ():
            yield self._rate_run(rate)
        if not self.plan.candidates:
            return
        keys: tuple[Key, ...] = tuple(("baseline", r) for r in self.repeats[self.main_repeats :])
        for repeat in self.repeats[self.main_repeats :]:
            yield self._baseline(repeat, known)
        before = (*known, *keys)
        for number in range(self.plan.candidates):
            for repeat in self.repeats:
                yield self._candidate(number, repeat, before)
            before = (*before, *(("candidate", number, r) for r in self.repeats))
        for repeat in self.repeats:
            yield self._schedule(repeat, before)

    def _rate_run(self, rate: float) -> Trial:
        size, length = self.plan.batch_size, self.plan.length
        job = scratch_job("constant", 0, size, length, rate=rate)
        what, marks = f"learning rate times {rate:g} from scratch", len(END_FRACTIONS)
        return self._trial(("rate", f"{rate:g}"), length, marks, job, what, ())

    def _baseline(self, repeat: int, needs: tuple[Key, ...]) -> Trial:
        def job(journal: Journal) -> Job | None:
            return self.decide.baseline(journal, repeat)

        marks = len(RUN_FRACTIONS) + len(END_FRACTIONS)
        what = f"{self.plan.batch_size:,} from scratch"
        return self._trial(("baseline", repeat), self.plan.length, marks, job, what, needs)

    def _measured(self) -> tuple[Key, ...]:
        return tuple(trial.key for trial in self.points() if trial.key[0] in MEASURES)

    def _candidate(self, number: int, repeat: int, needs: tuple[Key, ...]) -> Trial:
        def job(journal: Journal) -> Job | None:
            return self.decide.candidate(journal, number, repeat)

        key, marks = ("candidate", number, repeat), len(END_FRACTIONS)
        return self._trial(key, self.plan.length, marks, job, "a candidate from scratch", needs)

    def _schedule(self, repeat: int, needs: tuple[Key, ...]) -> Trial:
        def job(journal: Journal) -> Job | None:
            return self.decide.schedule(journal, repeat)

        key, marks = ("schedule", repeat), len(END_FRACTIONS)
        return self._trial(key, self.plan.length, marks, job, "the schedule from scratch", needs)


# Trials that a prediction rests on.
MEASURES = ("point", "branch", "middle")


def scratch_job(
    purpose: str,
    repeat: int,
    batch_size: int,
    samples: int,
    *,
    rate: float = 1.0,
    warmup_samples: int = 0,
    stages: tuple[tuple[int, int], ...] = (),
) -> Job:
    """A run from scratch.

    Args:
        purpose: ``"constant"`` or ``"schedule"``.
        repeat: Number of the seed.
        batch_size: Of the last stage.
        samples: Length of the run.
        rate: Learning rate over the one that the rule gives.
        warmup_samples: Samples over which the rate rises from the task's own.
        stages: Beginnings and batch sizes of a schedule. Default: one batch size.
    """
    return {
        "event": "scratch",
        "purpose": purpose,
        "repeat": repeat,
        "batch_size": batch_size,
        "rate": rate,
        "samples": samples,
        "warmup_samples": warmup_samples,
        "stages": [list(stage) for stage in stages or ((0, batch_size),)],
    }


def run_marks(samples: int, size: int, first: int = 0) -> tuple[int, ...]:
    """Samples of a run of the smallest batch after which it is evaluated, beyond ``first``."""
    fractions = (*RUN_FRACTIONS, *END_FRACTIONS)
    found = sorted({math.ceil(samples * part / size) * size for part in fractions})
    return tuple(mark for mark in found if mark > first)


def run_job(job: Job, plan: Plan, place: Workplace) -> Event:
    """Runs one trial; see :meth:`steadygrad.studies.study.Study.run`."""
    runner = _Runner(plan, place)
    fields = {name: value for name, value in job.items() if name != "event"}
    event: Event = getattr(runner, str(job["event"]))(**fields)
    return event


class _Runner:
    def __init__(self, plan: Plan, place: Workplace) -> None:
        self.plan, self.place = plan, place
        self.trainer: Trainer = place.trainer
        self.task = place.trainer.task

    def point(self, point: int) -> Point:
        """Trains the main trajectory from the point before to a point, and keeps its state."""
        trainer, stop = self.trainer, self.plan.points[point]
        start = self.plan.points[point - 1] if point else 0
        if point:
            trainer.load(self.state(point - 1))
        else:
            trainer.restart()
        trainer.seed_everything("train", point)
        marks, curve, training = run_marks(stop, self.task.batch_size, start), [], []
        stride = max(1, math.ceil((stop - start) / self.task.batch_size / TRAINING_MARKS))
        order = main_order(len(self.task.train), trainer.seed)
        steps = trainer.run(order, start, stop, self.task.batch_size)
        for number, seen in enumerate(steps, start=1):
            self.place.advance(self.task.batch_size, f"training to {stop:,} samples")
            if number % stride == 0 or seen == stop:
                losses = trainer.take_losses()
                training.append((seen, math.fsum(losses) / len(losses)))
            if seen in marks:
                curve.append((seen, self._finite(self._evaluate())))
        state = trainer.state(stop)
        # The others go on once the file is there.
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
        name, samples = f"point-{point}", self.plan.points[point]
        found = self.place.checkpoints.load(name, samples)
        # On every rank or on none: training again takes all of them.
        missing = self.trainer.context.gather(found is None)
        if found is None or any(missing):
            self.place.repeated.append(self.point(point))
            return self.trainer.state(samples)
        return found

    def noise(self, point: int) -> Noise:
        """Measures the gradient noise scale at a point."""
        trainer, seen = self.trainer, self.plan.points[point]
        trainer.load(self.state(point))
        trainer.seed_everything("noise", point)
        order, used = self._order(point, "noise"), 0
        steps = self.plan.noise_steps[point]
        with trainer.noise_scale() as noise:
            for samples in trainer.measure(noise, order, steps, MICRO_BATCHES):
                self.place.advance(samples - used, f"noise scale at {seen:,} samples")
                used = samples
            found = noise.estimate().as_dict()
        trainer.look()
        names = set(Noise.__struct_fields__) - {"point", "samples", "time"}
        fields = {name: found[name] for name in names}
        return Noise(point=point, samples=used, **fields)

    def branch(self, point: int, repeat: int, batch_size: int) -> Branch:
        """Trains on from a point with a batch size."""
        trainer, task = self.trainer, self.task
        trainer.load(self.state(point))
        # The same name for all batch sizes: they see the same data and the same random numbers.
        trainer.seed_everything("branch", point, repeat)
        first, own = trainer.steps, batch_size == task.batch_size
        try:
            curve = self._branch_curve(point, repeat, batch_size, whole=own)
        except Diverged:
            # With the task's own settings this is an error; otherwise it is a result.
            if own:
                raise
            curve = [(self.plan.branch_samples[point], math.inf)]
        samples, loss = curve[-1]
        return Branch(
            point=point,
            repeat=repeat,
            batch_size=batch_size,
            lr=self._lr(batch_size, 1.0),
            steps=trainer.steps - first,
            samples=samples,
            loss=loss,
            curve=tuple(curve),
        )

    def _branch_curve(
        self, point: int, repeat: int, size: int, *, whole: bool
    ) -> list[tuple[int, float]]:
        """Losses on the way, the last one being the average over the end marks."""
        base, length = self.task.batch_size, self.plan.branch_samples[point]
        largest = self.plan.multiples[point][-1] * base
        ends = [length - largest * back for back in range(END_MARKS)]
        marks = _Marks([mark for mark in ends if mark > 0])
        way = _Marks([round(part * length / base) * base for part in FRACTIONS] if whole else [])
        seen, order = self.plan.points[point], self._order(point, f"branch-{repeat}")
        chosen = Rate(batch_size=size)
        curve, found, done = [], [], 0
        for at in self.trainer.run(order, 0, length, size, rate=chosen, seen=seen):
            self.place.advance(at - done, f"branch of {size:,} at {seen:,}")
            done = at
            last, middle = marks.passed(at), way.passed(at)
            if last:
                found.append((at, self._evaluate()))
            elif middle and at < marks.left[0]:
                curve.append((at, self._finite(self._evaluate())))
        samples, loss = _mean(found)
        return [*curve, (samples, self._finite(loss) if whole else loss)]

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
        trainer, own = self.trainer, batch_size == self.task.batch_size and rate == 1
        trainer.restart(repeat)
        trainer.seed_everything("run", repeat)
        curve: list[tuple[int, float]] = []
        try:
            curve = self._run_curve(repeat, samples, rate, warmup_samples, stages, whole=own)
        except Diverged:
            if own:
                raise
            curve = [(samples, math.inf)]
        return Scratch(
            purpose=purpose,
            repeat=repeat,
            batch_size=batch_size,
            rate=rate,
            stages=tuple(
                Stage(from_samples=start, batch_size=size, lr=self._lr(size, rate))
                for start, size in stages
            ),
            warmup_samples=warmup_samples,
            steps=trainer.steps,
            samples=curve[-1][0],
            loss=curve[-1][1],
            curve=tuple(curve),
        )

    def _run_curve(
        self,
        repeat: int,
        samples: int,
        rate: float,
        warmup: int,
        stages: list[list[int]],
        *,
        whole: bool,
    ) -> list[tuple[int, float]]:
        """Losses on the way, the last one being the average over the end marks."""
        base, order = self.task.batch_size, self._main_order(repeat)
        ends = _Marks([math.ceil(samples * part / base) * base for part in END_FRACTIONS])
        way = _Marks(list(run_marks(samples, base)) if whole else [])
        curve, found, at = [], [], 0
        borders = [*(start for start, _ in stages[1:]), samples]
        for (_, size), border in zip(stages, borders, strict=True):
            chosen = Rate(size, rate, warmup, self.plan.length)
            # A stage ends with its last whole batch; the next one begins there.
            for reached in self.trainer.run(order, at, border, size, rate=chosen):
                self.place.advance(reached - at, f"{size:,} from scratch")
                at = reached
                last, middle = ends.passed(at), way.passed(at)
                if last:
                    found.append((at, self._evaluate()))
                elif middle:
                    curve.append((at, self._finite(self._evaluate())))
        if not found or ends.left:
            found.append((at, self._evaluate()))
        mean, loss = _mean(found)
        return [*curve, (mean, self._finite(loss) if whole else loss)]

    def _lr(self, size: int, rate: float) -> float:
        return rate * learning_rate(self.task.lr, size, self.task.batch_size, self.task.lr_rule)

    def _main_order(self, repeat: int) -> Order:
        return main_order(len(self.task.train), self.trainer.seed, repeat)

    def _order(self, point: int, kind: str) -> Order:
        seen, size = self.plan.points[point], len(self.task.train)
        return branch_order(size, self.trainer.seed, seen=seen, stream=f"{kind}-{point}")

    def _evaluate(self) -> float:
        loss = self.trainer.evaluate()
        self.place.advance(math.ceil(len(self.task.valid) * EVALUATION_COST), "")
        return loss

    def _finite(self, loss: float) -> float:
        if not math.isfinite(loss):
            raise Diverged(
                f"The validation loss should stay finite. Found {loss} after {self.trainer.steps} "
                f"steps. Remedy: a lower Task.lr than {self.task.lr:g}."
            )
        return loss


class _Marks:
    """Places of a run, each of which is passed once."""

    def __init__(self, places: list[int]) -> None:
        self.left = sorted(places)

    def passed(self, at: int) -> bool:
        """Whether a place was reached or passed since the last call."""
        before = len(self.left)
        self.left = [place for place in self.left if place > at]
        return len(self.left) < before


def _mean(found: list[tuple[int, float]]) -> tuple[int, float]:
    places, losses = zip(*found, strict=True)
    return round(sum(places) / len(places)), math.fsum(losses) / len(losses)
