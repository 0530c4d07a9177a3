"""The trials of ``advise``: what each kind does with a trainer."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from steadygrad.studies.advise import plan as planning
from steadygrad.studies.advise import schema
from steadygrad.studies.advise.schema import Noise, NoiseAt, Plan
from steadygrad.studies.advise.search import trials_of
from steadygrad.studies.calibration import clock_of, measured_speed
from steadygrad.studies.learning_rate import Rate
from steadygrad.studies.order import Order
from steadygrad.studies.paired import FIRST
from steadygrad.studies.schema import Training
from steadygrad.studies.trainer import Diverged, Trainer
from steadygrad.studies.trials import SHARE
from steadygrad.studies.work import Workplace

__all__ = ["TRIALS", "plan_for", "trials_of"]

# Fewest micro-batches of a step in which the noise scale is measured; parts of the training.
MICRO_BATCHES, POINTS = 2, (1 / 16, 1 / 4, 1 / 2, 1)


def plan_for(settings: schema.Settings, trainer: Trainer, *, speed: float, workers: int) -> Plan:
    """The longest training whose batch sizes can be told apart in the budget."""
    task, context = trainer.task, trainer.context
    if 0 < settings.seeds < FIRST:
        raise InputError(
            f"--seeds should be at least {FIRST}, or 0. Found {settings.seeds}. "
            f"Remedy: --seeds {FIRST}."
        )
    own, seconds = measured_speed(trainer, task.batch_size), {1: 1 / speed}
    for multiple in planning.RUNS:
        size = multiple * task.batch_size
        # A slow task is not kept waiting for what a few steps would tell.
        if multiple > 1 and 4 * size <= min(len(task.train), SHARE * settings.budget * own):
            seconds[multiple] = own / speed / measured_speed(trainer, size, few=True)
    clock = clock_of(trainer)
    began = clock()
    trainer.evaluate()
    # In seconds of a machine with the speed that is reckoned with.
    evaluation = context.gather((clock() - began) * own / speed)[0]
    world = context.size
    plan = planning.make_plan(settings, task, seconds, evaluation, workers=workers, world=world)
    if task.warmup_samples > plan.samples:
        raise InputError(
            f"The warm-up should end within the run of {plan.samples:,} samples. Found "
            f"Task.warmup_samples = {task.warmup_samples:,}. Remedy: more --samples or a longer "
            "--budget, or a shorter warm-up."
        )
    return plan


def training(
    plan: Plan, place: Workplace, arm: int, samples: int, step: float, seed: int
) -> Training:
    """Trains from the initial weights with one batch size."""
    task, settings, size = place.trainer.task, place.header.settings, plan.arms[arm]
    decays = task.lr_decay != "none"
    warmup = planning.warmup_samples(task, samples, size, tunes=settings.tune)
    # On the way, the smallest batch's losses at shorter lengths, where no rate decays.
    lengths = [samples] if arm or decays else planning.lengths_of(samples, settings.tolerance)
    windows = [planning.end_marks(length, decays=decays) for length in lengths]
    found = place.train(
        size,
        samples,
        seed,
        # Where rates are searched, the task's own is none to begin with.
        Rate(size, 2.0**step, warmup, samples, start=0.0 if settings.tune else 1.0),
        marks=[mark for window in windows for mark in window],
        must_hold=not (arm or step or settings.tune),
    )
    lost = math.isinf(found[-1][1])
    ends = zip(lengths, windows, strict=True)
    curve = tuple((n, math.inf) if lost else _averaged(found, window) for n, window in ends)
    lr = planning.rate_of(task, size, step)
    return Training(
        arm=arm, samples=samples, step=step, seed=seed, lr=lr, loss=curve[-1][1], curve=curve
    )


def _averaged(curve: Sequence[tuple[int, float]], marks: Sequence[int]) -> tuple[float, float]:
    """Mean place and mean loss of the evaluations for some marks.

    A large batch may have fewer of them than there are marks; the last one may come before its.
    """
    places = [at for at, _ in curve]
    ends = {min(bisect_left(places, mark), len(places) - 1) for mark in marks}
    return fmean(curve[i][0] for i in ends), fmean(curve[i][1] for i in ends)


def noise(plan: Plan, place: Workplace, samples: int, step: float) -> Noise:
    """Measures the gradient noise scale along the smallest batch's training, in micro-batches."""
    trainer, world, size = place.trainer, place.trainer.context.size, plan.arms[0]
    if size < MICRO_BATCHES:  # one gradient a step has no spread
        return Noise(samples=samples, points=())
    # As few as there may be, of one size, so that any number of processes has the same ones.
    most = min(trainer.micro_batch_size, size // MICRO_BATCHES)
    trainer.micro_batch_size = max(n for n in range(1, most + 1) if size // world % n == 0)
    trainer.restart(0)
    trainer.seed_everything("run", 0)
    scale = NoiseScale(trainer.wrapped, samples=trainer.micro_batch_size, scaler=trainer.scaler)
    trainer.optimizer.register_step_pre_hook(lambda *_: scale.step(grad_scale=1.0))
    order = Order(len(trainer.task.train), trainer.seed)
    rate = Rate(factor=2.0**step, total=samples)
    left, points, at = [part * samples for part in POINTS], list[NoiseAt](), 0
    names = {*NoiseAt.__struct_fields__} - {"samples"}
    with suppress(Diverged):
        for seen in trainer.run(order, 0, samples, size, rate=rate):
            place.advance(seen - at)
            at = seen
            if at + size > left[0]:
                found = scale.estimate().as_dict()
                points.append(NoiseAt(samples=at, **{name: found[name] for name in names}))
                left = left[1:] or [math.inf]
    scale.remove()
    return Noise(samples=samples, points=tuple(points))


TRIALS = {"training": training, "noise": noise}
