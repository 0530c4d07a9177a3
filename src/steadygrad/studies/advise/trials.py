"""The trials of ``advise``: what each kind does with a trainer."""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean

from msgspec.structs import replace

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from steadygrad.studies.advise import plan as planning
from steadygrad.studies.advise import schema
from steadygrad.studies.advise.schema import Noise, NoiseAt, Plan
from steadygrad.studies.advise.search import trials_of
from steadygrad.studies.calibration import clock_of, measured_speed
from steadygrad.studies.course import Order, Rate
from steadygrad.studies.paired import FIRST
from steadygrad.studies.schema import SHARE, Training
from steadygrad.studies.trainer import Diverged, Trainer
from steadygrad.studies.work import Workplace, make_trainer

__all__ = ["TRIALS", "plan_for", "trials_of"]

# Fewest micro-batches of a step in which the noise scale is measured; parts of the training.
MICRO_BATCHES, POINTS = 2, (1 / 16, 1 / 4, 1 / 2, 1)


def plan_for(settings: schema.Settings, trainer: Trainer, *, speed: float, workers: int) -> Plan:
    """The longest training whose batch sizes can be told apart in the budget."""
    task = trainer.task
    if 0 < settings.seeds < FIRST:
        raise InputError(
            f"--seeds should be at least {FIRST}, or 0. Found {settings.seeds}. "
            f"Remedy: --seeds {FIRST}."
        )
    own = measured_speed(trainer, task.batch_size)
    # In seconds of a machine with the speed that is reckoned with.
    planned = partial(_planned, settings, relative=own / speed, workers=workers)
    try:
        plan = planned(trainer, own=own)
    except InputError:  # what is too long for the model may fit its stand-in
        if not (task.proxy and settings.samples):
            raise
        plan = None
    if task.start and (plan is None or plan.target):
        raise InputError(
            "--samples should fit into the budget where Task.start is given, as growth with the "
            f"length is known from the initial weights alone. Found {settings.samples:,} that do "
            "not. Remedy: a longer --budget, or fewer --samples."
        )
    if plan is None or (plan.target and task.proxy):
        plan = _by_stand_in(settings, trainer, planned)
    if plan.target:
        plan = replace(plan, cost=workers * settings.budget * speed / plan.target)
    if task.warmup_samples > (plan.target or plan.samples):
        raise InputError(
            f"The warm-up should end within {plan.target or plan.samples:,} samples. Found "
            f"Task.warmup_samples = {task.warmup_samples:,}. Remedy: more --samples or a longer "
            "--budget, or a shorter warm-up."
        )
    return plan


def _by_stand_in(settings: schema.Settings, trainer: Trainer, planned: Callable[..., Plan]) -> Plan:
    """The plan in which a stand-in trains the rungs."""
    try:
        other = _stand_in(trainer, settings)
        other.check_task()
    except InputError as error:
        error.args = (f"Task.proxy: {error}",)
        raise
    parameters = sum(p.numel() for p in other.model.parameters())
    own = measured_speed(other, trainer.task.batch_size)
    return planned(other, own=own, stand_in=parameters)


def _planned(
    settings: schema.Settings,
    trainer: Trainer,
    *,
    own: float,
    relative: float,
    workers: int,
    stand_in: int = 0,
) -> Plan:
    """The plan of a trainer, whose speed at the smallest batch is its ``own``."""
    task, context, seconds = trainer.task, trainer.context, {1: relative / own}
    for multiple in planning.RUNS:
        size = multiple * task.batch_size
        # A slow task is not kept waiting for what a few steps would tell.
        if multiple > 1 and 4 * size <= min(len(task.train), SHARE * settings.budget * own):
            seconds[multiple] = relative / measured_speed(trainer, size, few=True)
    clock = clock_of(trainer)
    began = clock()
    trainer.evaluate()
    evaluation = context.gather((clock() - began) * relative)[0]
    common = {"workers": workers, "world": context.size, "stand_in": stand_in}
    return planning.make_plan(settings, task, seconds, evaluation, **common)


def _stand_in(trainer: Trainer, settings: schema.Settings) -> Trainer:
    """A trainer of the smaller model that trains the rungs."""
    make_model = trainer.task.proxy or trainer.task.make_model
    task = dataclasses.replace(trainer.task, make_model=make_model, proxy=None)
    found = make_trainer("advise", task, settings, trainer.context)
    found.dependent = trainer.dependent
    return found


def training(
    plan: Plan, place: Workplace, arm: int, samples: int, step: float, seed: int
) -> Training:
    """Trains from the initial weights with one batch size."""
    task, settings = place.trainer.task, place.header.settings
    real, own = divmod(arm, len(plan.sizes))
    if plan.stand_in and not real:
        if "stand-in" not in place.tools:
            place.tools["stand-in"] = _stand_in(place.trainer, settings)
        place.tools["stand-in"].micro_batch_size = place.trainer.micro_batch_size
        place = dataclasses.replace(place, trainer=place.tools["stand-in"])
    size, decays = plan.arms[own], task.lr_decay != "none"
    warmup = planning.warmup_samples(task, samples, size)
    factor = 2.0**step
    rate = Rate(size, factor, warmup, samples, start=factor, stands_for=plan.target)
    # On the way, the smallest batch's losses at shorter lengths, where no rate decays.
    lengths = [samples] if own or decays else planning.lengths_of(samples, settings.tolerance)
    windows = [planning.end_marks(length, decays=decays) for length in lengths]
    marks = [mark for window in windows for mark in window]
    found = place.train(size, samples, seed, rate, marks=marks)
    ends, lost = zip(lengths, windows, strict=True), math.isinf(found[-1][1])
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
    rate = Rate(factor=2.0**step, total=samples, stands_for=plan.target)
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
