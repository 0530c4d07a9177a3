"""The trials of ``compare``: what each kind does with a trainer."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean

import msgspec
import torch

from steadygrad._checks import InputError
from steadygrad.studies.calibration import measured_speed
from steadygrad.studies.compare.findings import Optimizers
from steadygrad.studies.compare.optimizers import Entry, entries_of, traits_of
from steadygrad.studies.compare.plan import make_plan
from steadygrad.studies.compare.schema import KNOWN, Header, Plan, Settings, Traits
from steadygrad.studies.folder import Results
from steadygrad.studies.learning_rate import Rate
from steadygrad.studies.schema import Training
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.trials import Trial, evaluation_cost
from steadygrad.studies.work import Workplace
from steadygrad.tasks import guarded
from steadygrad.tasks.check import check_gradients, check_optimizer_maker, reason


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
