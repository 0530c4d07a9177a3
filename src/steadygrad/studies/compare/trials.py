"""The trials of ``compare``: how long they are, which there are, what they do with a trainer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import msgspec
import torch

from steadygrad._checks import InputError
from steadygrad.studies.calibration import measured_speed
from steadygrad.studies.compare.findings import Optimizers
from steadygrad.studies.compare.optimizers import Entry, entries_of, traits_of
from steadygrad.studies.compare.schema import KNOWN, Arm, Header, Plan, Settings, Traits
from steadygrad.studies.course import Rate
from steadygrad.studies.folder import Results
from steadygrad.studies.paired import SEEDS, USUAL
from steadygrad.studies.schema import SHARE, Training, Trial, evaluation_cost, start_up
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.work import Workplace
from steadygrad.tasks import guarded
from steadygrad.tasks.check import check_gradients, check_optimizer_maker, reason

# Least steps of a training with the largest batch.
LEAST_STEPS = 40
# Pairs that the length of the trainings reckons with.
PAIRS = 10


def plan_for(settings: Settings, trainer: Trainer, *, speed: float, workers: int) -> Plan:
    """As long trainings as the budget allows, once all optimizers have taken steps."""
    task = trainer.task
    entries = trainer.context.together(lambda: entries_of(settings, task))
    shown = {name: tried(trainer, name, entry) for name, entry in entries.items()}
    traits = {name: own for name, (own, _) in shown.items() if name not in KNOWN}
    own = measured_speed(trainer, task.batch_size, few=True)
    # All have as many trials; in quarter octaves, so that a busier machine makes the same plan.
    slower = max(0, round(4 * math.log2(fmean(own / each for _, each in shown.values()))))
    speed /= 2.0 ** (slower / 4)
    world, names = trainer.context.size, tuple(entries)
    plan = make_plan(settings, names, task, speed=speed, workers=workers, world=world)
    return msgspec.structs.replace(plan, traits=traits)


def make_plan(
    settings: Settings,
    optimizers: Sequence[str],
    task: Any,
    *,
    speed: float,
    workers: int,
    world: int = 1,
) -> Plan:
    """Chooses trainings so long that about ten pairs of each arm fit the budget.

    One of ``workers`` trials at a time has ``speed`` samples a second, by ``world`` processes.
    """
    batch_size, train_size = task.batch_size, len(task.train)
    # A task's own evaluation is done whole on every rank.
    valid_size = len(task.valid) * (world if task.evaluate else 1)
    multiples = _multiples(settings.batches, train_size // batch_size)
    arms = tuple(Arm(name, batch_size * multiple) for multiple in multiples for name in optimizers)
    # Whole trainings, and halves of baselines.
    pairs = min(PAIRS, settings.seeds)
    whole, halves = len(arms) * (USUAL + pairs), len(multiples) * pairs
    fixed = (whole + halves) * evaluation_cost(valid_size)
    # A training and its half are whole numbers of steps at every batch size.
    unit = 2 * math.lcm(*multiples) * batch_size
    least = math.ceil(LEAST_STEPS * arms[-1].batch_size / unit) * unit
    rate = SHARE * speed * workers
    fitting = (rate * (settings.budget - start_up(workers)) - fixed) / (whole + halves / 2)
    samples = unit * (round(settings.samples / unit) if settings.samples else int(fitting // unit))
    if samples < least:
        seconds = (least * (whole + halves / 2) + fixed) / rate + start_up(workers)
        raise _too_short(settings, least, math.ceil(seconds))
    # Three rates of each arm come before any pair.
    begun = math.ceil(samples * len(arms) * 3 * len(SEEDS) / rate + start_up(workers))
    if begun > settings.budget:
        raise InputError(
            f"The budget is too small for trainings of {samples:,} samples: found "
            f"{settings.budget:g}s, expected at least {begun}s for their learning rates. Remedy: "
            f"--budget {2 * begun}s or more, or fewer --samples."
        )
    work = math.ceil(samples * (whole + halves / 2) + fixed)
    plan = Plan(arms=arms, samples=samples, seeds=settings.seeds, work=work)
    if plan.seeds < plan.first:
        raise InputError(
            f"--seeds should be at least {plan.first}, the fewest pairs that can give a verdict. "
            f"Found {plan.seeds}. Remedy: --seeds 10."
        )
    return plan


def _too_short(settings: Settings, least: int, seconds: int) -> InputError:
    steps = f"{LEAST_STEPS} steps of the largest batch"
    if settings.samples:
        return InputError(
            f"--samples should be at least {least}, {steps}. Found {settings.samples}. Remedy: "
            f"--samples {least}, or smaller --batches."
        )
    return InputError(
        f"The budget is too small for any answer: found {settings.budget:g}s, expected at least "
        f"{seconds}s for trainings of {steps}. Remedy: --budget {seconds}s or more, or fewer "
        "--optimizers."
    )


def _multiples(text: str, most: int) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or found[0] != 1 or list(found) != sorted({*found}) or found[-1] > most:
        raise InputError(
            "--batches should be growing whole multiples of the task's batch size that begin with "
            f"1, such as 1,4,16, and at most {most} here. Found {text!r}. Remedy: --batches 1."
        )
    return found


def trials_of(header: Header, results: Results) -> list[Trial]:
    """The trials that are needed and can run now: searches, then pairs, seed by seed."""
    plan, evidence, found = header.plan, Optimizers(header, results), list[Trial]()

    def add(arm: int, samples: int, step: float, seed: int, what: str) -> None:
        key = ("training", arm, samples, float(step), seed)
        cost = samples + evaluation_cost(header.task.valid_size)
        found.append(Trial(key, cost, f"{plan.arms[arm].optimizer}: {what} over {samples:,}"))

    for arm, ladder in enumerate(evidence.ladders):
        if not plan.has_own_rate(arm):
            for octave, seed in ladder.missing:
                add(arm, plan.samples, octave, seed, "learning rate")
    ready = {arm: step for arm in range(len(plan.arms)) if (step := evidence.step(arm)) is not None}
    # The arms with the fewest pairs first, so that pairs are whole, and baselines before the rest.
    wanted = {arm: evidence.wanted(arm) for arm in ready}
    for seed in range(max(wanted.values(), default=0)):
        for arm, step in ready.items():
            if seed < wanted[arm]:
                add(arm, plan.samples, step, seed, f"seed {seed}")
                if plan.baseline(arm) == arm:
                    add(arm, plan.samples // 2, step, seed, f"seed {seed}")
    return found


def training(
    plan: Plan, place: Workplace, arm: int, samples: int, step: float, seed: int
) -> Training:
    """Trains from the initial weights; all optimizers see the same data and random numbers."""
    trainer, task, own = place.trainer, place.trainer.task, plan.arms[arm]
    entry = _entries(place)[own.optimizer]
    # A larger batch has its square root's multiple, but for an optimizer with a rate of its own.
    multiple = 1.0 if entry.traits.own_rate else math.sqrt(own.batch_size / task.batch_size)
    lr = entry.lr * multiple * 2.0**step
    trainer.task = entry.task(task, lr, samples)
    try:
        curve = place.train(own.batch_size, samples, seed, Rate(total=samples))
    finally:
        trainer.task = task
    loss = curve[-1][1]
    return Training(arm=arm, samples=samples, step=step, seed=seed, lr=lr, loss=loss, curve=curve)


TRIALS = {"training": training}


def _entries(place: Workplace) -> Mapping[str, Entry]:
    """Made once: a user's file runs when its functions are loaded."""
    if not place.tools:
        settings, traits = place.header.settings, place.header.plan.traits
        found = entries_of(settings, place.trainer.task, place.files)
        place.tools = {n: replace(e, traits=traits.get(n, Traits())) for n, e in found.items()}
    return place.tools


def tried(trainer: Trainer, name: str, entry: Entry) -> tuple[Traits, float]:
    """The traits that steps of an optimizer show, and the samples a second that they train on.

    One that cannot take a step is refused by name.
    """
    model, task, what = trainer.model, trainer.task, f"The optimizer {name}"
    try:
        make = partial(entry.ready, model)
        checked = partial(check_optimizer_maker, make, model, entry.lr, what, varied=True)
        optimizer = trainer.context.together(checked)
        trainer.backward(torch.arange(task.batch_size))
        check_gradients(optimizer, model, what)
        with guarded(f"A step of the optimizer {name}"):
            optimizer.step()
        trainer.task = replace(entry.task(task, entry.lr, 0), name=name)
        trainer.check_rate()
        trainer.restart()
        speed = measured_speed(trainer, task.batch_size, few=True)
    except InputError as error:
        # The error of a maker, such as one that leaves the rate aside, and not of a library.
        if ":" not in name or error.__cause__ is None:
            raise
        raise InputError(
            f"Expected an optimizer that takes steps on gradients alone. Found {name}: "
            f"{reason(error.__cause__)}. Remedy: --optimizers without it, or --add with a function "
            "of your own."
        ) from error
    finally:
        trainer.task = task
        trainer.restart()
    return traits_of(name, optimizer), speed
