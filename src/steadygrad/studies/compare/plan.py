"""From a time budget to a length of trainings, by arithmetic alone."""

import math
from collections.abc import Sequence
from typing import Any

from steadygrad._checks import InputError
from steadygrad.studies.compare.schema import Arm, Plan, Settings
from steadygrad.studies.ladder import SEEDS, USUAL
from steadygrad.studies.trials import SHARE, evaluation_cost, start_up

# Least steps of a training with the largest batch.
LEAST_STEPS = 40
# Pairs that the length of the trainings reckons with.
PAIRS = 10


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
