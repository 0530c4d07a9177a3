"""From a time budget to amounts of work, by arithmetic alone."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from steadygrad._checks import InputError
from steadygrad.studies.compare.schema import Plan, Settings
from steadygrad.studies.trials import Trial, makespan
from steadygrad.tasks import Task

__all__ = ["make_plan"]

# The machine is never quite free, and the report also takes time.
SHARE_OF_BUDGET = 0.85
# Loading torch and the data, and drawing the report, in seconds; and starting workers.
START_UP, START_UP_WORKERS = 4.0, 12.0
# Seeds, whether the search has a third rung, and the least steps of the longest runs; best first.
LEVELS = ((10, True, 6400), (8, True, 3200), (5, True, 1600), (5, False, 200), (3, False, 40))
# Least steps of a short run with the largest batch.
LEAST_STEPS = 8


def make_plan(
    settings: Settings,
    task: Task,
    optimizers: Sequence[str],
    *,
    speed: float,
    workers: int,
    trials_of: Callable[[Plan], Sequence[Trial]],
) -> Plan:
    """Chooses the longest runs that fit a budget, with as many seeds as their length is worth.

    Where the settings say how long the runs are, it chooses as many seeds as fit, unless they say
    those too.

    Args:
        settings: The study's settings.
        task: The task.
        optimizers: Names of the optimizers.
        speed: Samples a second of one trial.
        workers: Trials at a time.
        trials_of: The trials of a plan.

    Raises:
        InputError: If batch sizes or length cannot be used, or the budget is too small for any
            answer.
    """
    if settings.seeds == 1:
        raise InputError(
            "--seeds should be at least 2, as one difference has no interval. Found 1. Remedy: "
            "--seeds 5."
        )
    multiples, size = _multiples(settings.batches, task), task.batch_size
    start_up = START_UP_WORKERS if workers > 1 else START_UP
    span = SHARE_OF_BUDGET * max(0.0, settings.budget - start_up) * speed
    # Every horizon is a whole number of steps at every batch size.
    unit = 4 * math.lcm(*multiples) * size
    least = math.ceil(4 * LEAST_STEPS * multiples[-1] * size / unit)
    given = _given(settings.samples, unit, least)

    def priced(seeds: int, full: bool, parts: int) -> Plan:
        plan = Plan(
            batch_size=size,
            optimizers=tuple(optimizers),
            multiples=multiples,
            horizons=(parts * unit // 4, parts * unit // 2, parts * unit),
            points=settings.points,
            full=full,
            seeds=seeds,
            samples_per_second=speed,
            work=1,
            span=1,
        )
        trials = trials_of(plan)
        work = sum(trial.cost for trial in trials)
        return msgspec.structs.replace(plan, work=work, span=makespan(trials, workers))

    for seeds, full, steps in LEVELS:
        prices = partial(priced, settings.seeds or seeds, full)
        fewest = max(least, math.ceil(steps * size / unit))
        plan = prices(given) if given else _longest(prices, fewest, span)
        if plan.span <= span:
            return plan
    seconds = math.ceil(plan.span / (SHARE_OF_BUDGET * speed) + start_up)
    raise InputError(
        f"The budget is too small for any answer: found {settings.budget:g}s, expected at least "
        f"{seconds}s for {len(optimizers)} optimizers at {speed:,.3g} samples a second. Remedy: "
        f"--budget {seconds}s or more, {'fewer --samples, ' if given else ''}"
        f"{'fewer --seeds, ' if settings.seeds else ''}or fewer --optimizers."
    )


def _given(samples: int, unit: int, least: int) -> int:
    """Length of the longest runs in units, as the settings say it; 0 where they leave it open."""
    given = round(samples / unit)
    if samples and given < least:
        raise InputError(
            f"--samples should be at least {least * unit}, so that the shortest runs have "
            f"{LEAST_STEPS} steps of the largest batch. Found {samples}. Remedy: --samples "
            f"{least * unit}, or smaller --batches."
        )
    return given


def _multiples(text: str, task: Task) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    most = len(task.train) // task.batch_size
    if not found or found[0] != 1 or list(found) != sorted({*found}) or found[-1] > most:
        raise InputError(
            "--batches should be growing whole multiples of the task's batch size that begin with "
            f"1, such as 1,4,16, and at most {most} here. Found {text!r}. Remedy: --batches 1."
        )
    return found


def _longest(priced: Callable[[int], Plan], fewest: int, span: float) -> Plan:
    """The longest plan that fits, by doubling and then by bisection; else the shortest."""
    low, high = fewest, fewest
    while priced(high).span <= span:
        low, high = high, 2 * high
    # To about 3 %: a slightly busier machine then makes the same plan more often.
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if priced(middle).span <= span else (low, middle)
    return priced(low)
