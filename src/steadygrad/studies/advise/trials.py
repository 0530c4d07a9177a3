"""The trials of ``advise``: what each kind does with a trainer."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from steadygrad.noise.schedule import learning_rate
from steadygrad.studies.advise import schema
from steadygrad.studies.advise.analysis import Chooser
from steadygrad.studies.advise.plan import (
    END_MARKS,
    FRACTIONS,
    MICRO_BATCHES,
    averaged_end,
    end_marks,
    make_plan,
    make_trials,
    run_marks,
    stretches,
)
from steadygrad.studies.advise.schema import Branch, Curve, Noise, Plan, Point, Scratch, Stage
from steadygrad.studies.learning_rate import Rate
from steadygrad.studies.order import Order, branch_order, main_order
from steadygrad.studies.trainer import Diverged, Trainer
from steadygrad.studies.trials import Trial
from steadygrad.studies.workplace import Workplace
from steadygrad.tasks import guarded

# Training losses of a segment of the main trajectory that are recorded, each an average.
TRAINING_MARKS = 32
Marks = tuple[list[int], list[int]]
"""Samples on the way, and at the end, after which a run is evaluated."""

TRAINING: dict[str, Any] = {}


def plan_for(settings: schema.Settings, trainer: Trainer, *, speed: float, workers: int) -> Plan:
    """The longest training whose measurements fit the budget.

    Raises:
        InputError: If the budget is too small for any answer.
    """
    task = trainer.task
    # A task's own evaluation is done whole on every rank.
    valid = len(task.valid) * (trainer.context.size if task.evaluate else 1)
    kinds = {"decays": task.lr_decay != "none", "noise": not trainer.dependent}
    plan = make_plan(
        settings.budget,
        speed,
        batch_size=task.batch_size,
        train_size=len(task.train),
        workers=workers,
        trials_of=lambda plan: make_trials(plan, valid, lambda key, results: None, **kinds),
    )
    if task.warmup_samples > plan.length:
        raise InputError(
            f"The warm-up should end within the run of {plan.length:,} samples. Found "
            f"Task.warmup_samples = {task.warmup_samples:,}. Remedy: a larger --budget or a "
            "shorter warm-up."
        )
    return plan


def trials_of(header: schema.Header) -> list[Trial]:
    """Trials in the order of training, then the runs from the initial weights."""
    task, chooser = header.task, Chooser(header)
    decays, noise = task.lr_decay != "none", not task.dependent
    return make_trials(header.plan, task.valid_size, chooser, decays=decays, noise=noise)


def point(plan: Plan, place: Workplace, point: int) -> Point:
    """Trains the main trajectory from the point before to a point, and keeps its state."""
    trainer, task, stop = place.trainer, place.trainer.task, plan.points[point]
    start = plan.points[point - 1] if point else 0
    if point:
        _go_to(plan, place, point - 1)
    else:
        trainer.restart()
    trainer.seed_everything("train", point)
    stride = max(1, math.ceil((stop - start) / task.batch_size / TRAINING_MARKS))
    training = []

    def steps() -> Iterator[int]:
        way = trainer.run(main_order(len(task.train), trainer.seed), start, stop, task.batch_size)
        for number, seen in enumerate(way, start=1):
            if number % stride == 0 or seen == stop:
                losses = trainer.take_losses()
                training.append((seen, math.fsum(losses) / len(losses)))
            yield seen

    marks = run_marks(stop, task.batch_size, start)
    curve = _curve(place, steps(), marks, f"training to {stop:,} samples", True, start)
    state = trainer.state(stop)
    # The others continue once the file is there.
    trainer.context.on_main(lambda: place.checkpoints.save(f"point-{point}", state))
    return Point(
        point=point,
        samples=stop,
        steps=trainer.steps,
        valid_loss=curve[-1][1],
        curve=tuple(curve),
        training=tuple(training),
    )


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
    curve = _averaged(place, steps, length, (way, ends), what, own=own)
    return Branch(
        point=point,
        repeat=repeat,
        batch_size=batch_size,
        lr=learning_rate(place.trainer.task.lr, batch_size, base, place.trainer.task.lr_rule),
        steps=trainer.steps - first,
        samples=curve[-1][0],
        loss=curve[-1][1],
        curve=curve,
    )


def scratch(
    plan: Plan,
    place: Workplace,
    purpose: Any,
    repeat: int,
    batch_size: int,
    rate: float,
    samples: int,
    warmup_samples: int,
    stages: list[list[int]],
) -> Scratch:
    """Trains from the initial weights, with one batch size or with a growing one."""
    trainer, task, base = place.trainer, place.trainer.task, place.trainer.task.batch_size
    trainer.restart(repeat)
    trainer.seed_everything("run", repeat)

    def steps() -> Iterator[int]:
        at, order = 0, main_order(len(task.train), trainer.seed, repeat)
        for _, border, size in stretches(stages, samples):
            chosen = Rate(size, rate, warmup_samples, samples)
            # A stage ends with its last whole batch; the next one begins there.
            for seen in trainer.run(order, at, border, size, rate=chosen):
                at = seen
                yield at

    # Only the smallest batch's curve is compared as a whole, also with that of another rate.
    way = run_marks(samples, base) if batch_size == base else []
    ends, what = end_marks(samples, base), f"{batch_size:,} from the initial weights"
    own = batch_size == base and rate == 1
    curve = _averaged(place, steps(), samples, (way, ends), what, own=own)
    rates = [rate * learning_rate(task.lr, size, base, task.lr_rule) for _, size in stages]
    rows = zip(stages, rates, strict=True)
    return Scratch(
        purpose=purpose,
        repeat=repeat,
        batch_size=batch_size,
        rate=rate,
        stages=tuple(Stage(from_samples=s, batch_size=b, lr=lr) for (s, b), lr in rows),
        warmup_samples=warmup_samples,
        steps=trainer.steps,
        samples=curve[-1][0],
        loss=curve[-1][1],
        curve=curve,
    )


TRIALS = {"point": point, "noise": noise, "branch": branch, "scratch": scratch}


def _go_to(plan: Plan, place: Workplace, at: int) -> None:
    """Loads the state at a point: read, or trained again."""
    state = place.state(f"point-{at}", plan.points[at], partial(point, plan, place, at))
    place.trainer.load(state)


def _averaged(
    place: Workplace, steps: Iterable[int], length: int, marks: Marks, what: str, *, own: bool
) -> Curve:
    """Losses on the way, the last one being the average over the end marks."""
    way, ends = marks
    try:
        curve = _curve(place, steps, [*(mark for mark in way if mark < ends[0]), *ends], what, own)
    except Diverged:
        # With the task's own settings this is an error; otherwise it is a result.
        if own:
            raise
        curve = [(length, math.inf)]
    # Large batches may end before the first end mark.
    return averaged_end(curve, max(1, sum(at >= ends[0] for at, _ in curve)))


def _curve(
    place: Workplace, steps: Iterable[int], marks: list[int], what: str, own: bool, at: int = 0
) -> list[tuple[int, float]]:
    """Trains from ``at`` samples on, and evaluates once after each mark is reached."""

    def evaluate() -> float:
        loss, trainer = place.evaluate(), place.trainer
        if own and not math.isfinite(loss):
            raise Diverged(
                f"The validation loss should stay finite. Found {loss} after {trainer.steps} "
                f"steps. Remedy: a lower Task.lr than {trainer.task.lr:g}."
            )
        return loss

    found, left = [], sorted(set(marks))
    for seen in steps:
        place.advance(seen - at, what)
        at = seen
        if left and at >= left[0]:
            found.append((at, evaluate()))
            left = [mark for mark in left if mark > at]
    return [*found, (at, evaluate())] if left else found


def _order(plan: Plan, place: Workplace, point: int, kind: str) -> Order:
    size, seed = len(place.trainer.task.train), place.trainer.seed
    return branch_order(size, seed, seen=plan.points[point], stream=f"{kind}-{point}")
