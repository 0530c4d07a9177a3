"""The trials of ``advise``: what each kind does with a trainer."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import partial
from statistics import fmean

import torch

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from steadygrad.noise.schedule import learning_rate
from steadygrad.studies.advise import schema
from steadygrad.studies.advise.plan import (
    END_MARKS,
    FRACTIONS,
    MICRO_BATCHES,
    RUNS,
    end_marks,
    lengths_of,
    make_plan,
    stages_of,
    stretches,
)
from steadygrad.studies.advise.schema import Branch, Noise, Plan, Point, Scratch, Stage
from steadygrad.studies.advise.search import trials_of
from steadygrad.studies.calibration import clock_of, measured_speed
from steadygrad.studies.learning_rate import Rate
from steadygrad.studies.order import Order, branch_order, main_order
from steadygrad.studies.sequential import LOOKS
from steadygrad.studies.trainer import Diverged, Trainer
from steadygrad.studies.trials import SHARE
from steadygrad.studies.work import Workplace
from steadygrad.tasks import guarded

__all__ = ["TRIALS", "plan_for", "trials_of"]


def plan_for(settings: schema.Settings, trainer: Trainer, *, speed: float, workers: int) -> Plan:
    """The longest training whose batch sizes can be told apart in the budget.

    Raises:
        InputError: If the budget is too small for any answer.
    """
    task, context = trainer.task, trainer.context
    if settings.seeds in (1, 2):
        raise InputError(
            f"--seeds should be at least {LOOKS[0]}, or 0. Found {settings.seeds}. "
            f"Remedy: --seeds {LOOKS[0]}."
        )
    own, seconds = measured_speed(trainer, task.batch_size), {1: 1 / speed}
    for multiple in RUNS:
        size = multiple * task.batch_size
        # A slow task is not kept waiting for what a few steps would tell.
        if multiple > 1 and 4 * size <= min(len(task.train), SHARE * settings.budget * own):
            seconds[multiple] = own / speed / measured_speed(trainer, size, few=True)
    clock = clock_of(trainer)
    began = clock()
    trainer.evaluate()
    # In seconds of a machine with the speed that is reckoned with.
    evaluation = context.gather((clock() - began) * own / speed)[0]
    plan = make_plan(
        settings.budget,
        seconds,
        evaluation,
        batch_size=task.batch_size,
        train_size=len(task.train),
        workers=workers,
        samples=settings.samples,
        seeds=settings.seeds,
        tolerance=settings.tolerance,
        decays=task.lr_decay != "none",
        tune=settings.tune,
    )
    if task.warmup_samples > plan.samples:
        raise InputError(
            f"The warm-up should end within the run of {plan.samples:,} samples. Found "
            f"Task.warmup_samples = {task.warmup_samples:,}. Remedy: more --samples or a longer "
            "--budget, or a shorter warm-up."
        )
    return plan


def point(plan: Plan, place: Workplace, point: int) -> Point:
    """Trains the main trajectory from the point before to a point, and keeps its state."""
    trainer, task, stop = place.trainer, place.trainer.task, plan.points[point]
    start = plan.points[point - 1] if point else 0
    if point:
        _go_to(plan, place, point - 1)
    else:
        trainer.restart()
    trainer.seed_everything("train", point)
    way = trainer.run(main_order(len(task.train), trainer.seed), start, stop, task.batch_size)
    what = f"training to {stop:,} samples"
    ((_, loss),) = _curve(place, way, [stop], what, own=True, at=start)
    state = trainer.state(stop)
    # The others continue once the file is there.
    trainer.context.on_main(lambda: place.checkpoints.save(f"point-{point}", state))
    return Point(point=point, samples=stop, steps=trainer.steps, valid_loss=loss)


def noise(plan: Plan, place: Workplace, point: int) -> Noise:
    """Measures the gradient noise scale at a point."""
    trainer, context, base = place.trainer, place.trainer.context, place.trainer.task.batch_size
    _go_to(plan, place, point)
    trainer.seed_everything("noise", point)
    scale, size = trainer.scaler.get_scale(), min(base // context.size, trainer.micro_batch_size)
    count = base * MICRO_BATCHES // (size * context.size)
    samples, order = count * size * context.size, _order(plan, place, point, "noise")
    # The weights stand still, and all measurements count alike.
    noise = NoiseScale(trainer.wrapped, decay=1.0, drift=False)
    for step in range(plan.noise_steps[point]):
        context.poll()
        share = context.share(order.take(step * samples, samples))
        for micro in torch.split(share, size):
            with noise.microbatch(size, loss_scale=scale):
                loss = trainer.losses(trainer.batch(micro), size).mean()
                with guarded("The backward pass of Task.per_sample_loss"):
                    (loss * (scale / count)).backward()
        noise.step()
        trainer.model.zero_grad()
        place.advance(samples, f"noise scale at {plan.points[point]:,} samples")
    noise.remove()
    found, used = noise.estimate().as_dict(), plan.noise_steps[point] * samples
    trainer.look()
    names = set(Noise.__struct_fields__) - {"point", "samples", "time"}
    return Noise(point=point, samples=used, **{name: found[name] for name in names})


def branch(plan: Plan, place: Workplace, point: int, repeat: int, batch_size: int) -> Branch:
    """Trains on from a point with a batch size."""
    trainer, base, length = place.trainer, place.trainer.task.batch_size, plan.branch_samples[point]
    _go_to(plan, place, point)
    # The same name for all batch sizes: they see the same data and the same random numbers.
    trainer.seed_everything("branch", point, repeat)
    first, seen = trainer.steps, plan.points[point]
    unit, own = plan.multiples[point][-1] * base, batch_size == base
    ends = [length - unit * back for back in reversed(range(min(END_MARKS, length // unit)))]
    way = [round(part * length / base) * base for part in FRACTIONS] if own else []
    order, rate = _order(plan, place, point, f"branch-{repeat}"), Rate(batch_size)
    steps = trainer.run(order, 0, length, batch_size, rate=rate, seen=seen)
    what = f"branch of {batch_size:,} at {seen:,}"
    found = _curve(place, steps, [*(mark for mark in way if mark < ends[0]), *ends], what, own)
    end, loss = _averaged(found, ends)
    curve = (*(row for row in found if row[0] < ends[0]), (round(end), loss))
    return Branch(
        point=point,
        repeat=repeat,
        batch_size=batch_size,
        lr=learning_rate(place.trainer.task.lr, batch_size, base, place.trainer.task.lr_rule),
        steps=trainer.steps - first,
        samples=round(end),
        loss=loss,
        curve=curve,
    )


def scratch(
    plan: Plan,
    place: Workplace,
    course: str,
    repeat: int,
    rate: float,
    samples: int,
    warmup_samples: int,
) -> Scratch:
    """Trains from the initial weights, with one batch size or with a growing one."""
    trainer, task, base = place.trainer, place.trainer.task, place.trainer.task.batch_size
    trainer.restart(repeat)
    trainer.seed_everything("run", repeat)
    stages, decays = stages_of(course), task.lr_decay != "none"
    smallest = stages == ((0, base),)
    # Where rates are searched, the task's own is none to begin with.
    start = 0.0 if place.header.settings.tune else 1.0
    own = smallest and rate == 1 and not place.header.settings.tune

    def steps() -> Iterator[int]:
        at, order = 0, main_order(len(task.train), trainer.seed, repeat)
        for _, border, size in stretches(stages, samples):
            chosen = Rate(size, rate, warmup_samples, samples, start)
            # A stage ends with its last whole batch; the next one begins there.
            for seen in trainer.run(order, at, border, size, rate=chosen):
                at = seen
                yield at

    # On the way, the smallest batch's losses at shorter lengths, where no rate decays.
    tolerance = place.header.settings.tolerance
    lengths = lengths_of(samples, tolerance) if smallest and not decays else [samples]
    windows = [end_marks(length, decays=decays) for length in lengths]
    marks = [mark for window in windows for mark in window]
    found = _curve(place, steps(), marks, f"{course} over {samples:,}", own)
    curve = tuple(_averaged(found, window) for window in windows)
    rates = [rate * learning_rate(task.lr, size, base, task.lr_rule) for _, size in stages]
    rows = zip(stages, rates, strict=True)
    return Scratch(
        course=course,
        repeat=repeat,
        rate=rate,
        samples=samples,
        batch_size=stages[-1][1],
        stages=tuple(Stage(from_samples=s, batch_size=b, lr=lr) for (s, b), lr in rows),
        warmup_samples=warmup_samples,
        steps=trainer.steps,
        place=curve[-1][0],
        loss=curve[-1][1],
        curve=curve,
    )


TRIALS = {"point": point, "noise": noise, "branch": branch, "scratch": scratch}


def _go_to(plan: Plan, place: Workplace, at: int) -> None:
    """Loads the state at a point: read, or trained again."""
    state = place.state(f"point-{at}", plan.points[at], partial(point, plan, place, at))
    place.trainer.load(state)


def _averaged(curve: list[tuple[int, float]], marks: list[int]) -> tuple[float, float]:
    """Mean place and mean loss of the evaluations for some marks.

    A large batch may have fewer of them than there are marks; the last one may come before its.
    """
    places = [at for at, _ in curve]
    ends = {min(bisect_left(places, mark), len(places) - 1) for mark in marks}
    return fmean(curve[i][0] for i in ends), fmean(curve[i][1] for i in ends)


def _curve(
    place: Workplace, steps: Iterable[int], marks: list[int], what: str, own: bool, at: int = 0
) -> list[tuple[int, float]]:
    """Trains from ``at`` samples on, and evaluates once after each mark is reached.

    With the task's ``own`` settings divergence is an error; otherwise it is a result.
    """

    def evaluate() -> float:
        loss, trainer = place.evaluate(), place.trainer
        if own and not math.isfinite(loss):
            raise Diverged(
                f"The validation loss should stay finite. Found {loss} after {trainer.steps} "
                f"steps. Remedy: a lower Task.lr than {trainer.task.lr:g}."
            )
        return loss

    found, left = [], sorted(set(marks))
    try:
        for seen in steps:
            place.advance(seen - at, what)
            at = seen
            if left and at >= left[0]:
                found.append((at, evaluate()))
                left = [mark for mark in left if mark > at]
        return [*found, (at, evaluate())] if left else found
    except Diverged:
        if own:
            raise
        return [(marks[-1], math.inf)]


def _order(plan: Plan, place: Workplace, point: int, kind: str) -> Order:
    size, seed = len(place.trainer.task.train), place.trainer.seed
    return branch_order(size, seed, seen=plan.points[point], stream=f"{kind}-{point}")
