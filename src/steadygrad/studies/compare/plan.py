"""From a time budget to amounts of work and the list of trials, by arithmetic alone."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from steadygrad._checks import InputError
from steadygrad.studies.compare.schema import Plan, Settings
from steadygrad.studies.compare.search import LADDER, NEAR, WIDENINGS, Search
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Key
from steadygrad.studies.trials import SHARE, Job, Trial, evaluation_cost, makespan, start_up

# Seeds, whether the search has a third rung, and the least steps of the longest runs; best first.
LEVELS = ((10, True, 6400), (8, True, 3200), (5, True, 1600), (5, False, 200), (3, False, 40))
# Least steps of a short run with the largest batch.
LEAST_STEPS = 8
# Evaluations of a verdict's run; measurements of a step's time.
MARKS, TURNS = 4, 28


def make_plan(
    settings: Settings,
    optimizers: Sequence[str],
    *,
    batch_size: int,
    train_size: int,
    speed: float,
    workers: int,
    valid_size: int,
) -> Plan:
    """Chooses the longest runs that fit a budget, with as many seeds as their length is worth.

    Where the settings say how long the runs are, it chooses as many seeds as fit, unless they say
    those too. One of ``workers`` trials at a time has ``speed`` samples a second; an evaluation has
    ``valid_size`` samples, and no batch more than ``train_size``.

    Raises:
        InputError: If batch sizes or length cannot be used, or the budget gives no answer.
    """
    if settings.seeds == 1:
        raise InputError(
            "--seeds should be at least 2, as one difference has no interval. Found 1. Remedy: "
            "--seeds 5."
        )
    multiples = _multiples(settings.batches, train_size // batch_size)
    span = SHARE * max(0.0, settings.budget - start_up(workers)) * speed
    # Every horizon is a whole number of steps at every batch size.
    unit = 4 * math.lcm(*multiples) * batch_size
    least = math.ceil(4 * LEAST_STEPS * multiples[-1] * batch_size / unit)
    given = _given(settings.samples, unit, least)

    def priced(seeds: int, full: bool, parts: int) -> Plan:
        plan = Plan(
            batch_size=batch_size,
            optimizers=tuple(optimizers),
            multiples=multiples,
            horizons=(parts * unit // 4, parts * unit // 2, parts * unit),
            full=full,
            seeds=seeds,
            samples_per_second=speed,
            work=1,
            span=1,
        )
        trials = make_trials(plan, valid_size)
        work = sum(trial.cost for trial in trials)
        return msgspec.structs.replace(plan, work=work, span=makespan(trials, workers))

    for seeds, full, steps in LEVELS:
        prices = partial(priced, settings.seeds or seeds, full)
        fewest = max(least, math.ceil(steps * batch_size / unit))
        plan = prices(given) if given else _longest(prices, fewest, span)
        if plan.span <= span:
            return plan
    seconds = math.ceil(plan.span / (SHARE * speed) + start_up(workers))
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


def make_trials(plan: Plan, valid_size: int) -> list[Trial]:
    """All trials, in the order in which they are run; one evaluates ``valid_size`` samples.

    At each batch size the search, then the verdicts.
    """
    first, evaluation = ("speed",), evaluation_cost(valid_size)
    cost = TURNS * plan.batch_size * (1 + len(plan.optimizers))
    found = [Trial(first, cost, lambda results: {"kind": "speed"}, "time of a step")]

    def add(rung: int, what: str, needs: tuple[Key, ...], *keys: Key) -> tuple[Key, ...]:
        """Adds a trial of each optimizer, and returns their keys."""
        own = tuple((*key, name) for key in keys for name in plan.optimizers)
        for key in own:
            cost = plan.horizons[rung] + (MARKS if key[0] == "verdict" else 1) * evaluation
            called = f"{key[-1]}: {what} over {plan.horizons[rung]:,}"
            found.append(Trial(key, cost, partial(_job, plan, key, rung), called, needs))
        return own

    for multiple in plan.multiples:
        needs: tuple[Key, ...] = (first,)
        for rung in range(2 + plan.full):
            for number in range(1 + WIDENINGS[rung]):
                places = range(1 if number else len(NEAR if rung else LADDER))
                keys = [("search", multiple, rung, number, place) for place in places]
                needs = add(rung, "learning rate", needs, *keys)
        # The longer horizon first: a study that is cut short has said the more important. Seed by
        # seed, so that pairs are whole.
        for rung in (2, 1):
            for seed in range(1, plan.seeds + 1):
                add(rung, f"seed {seed}", needs, ("verdict", multiple, rung, seed))
    return found


def _job(plan: Plan, key: Any, rung: int, results: Results) -> Job | None:
    """The training that a trial asks for; None where there is nothing to ask."""
    kind, multiple, *where, name = key
    search, repeat = Search(plan, results, multiple), 0
    if kind == "verdict":
        step, repeat = search.tuned(name, rung), where[-1]
    else:
        _, number, place = where
        before = search.ladders(rung, number - 1)[name] if number else ()
        steps = [step for step in search.ladders(rung, number)[name] if step not in before]
        if place >= len(steps):
            return None
        step = steps[place]
    # A step of one type: it is a part of the result's name.
    at = {"multiple": multiple, "samples": plan.horizons[rung]}
    return {"kind": "training", "optimizer": name, **at, "step": float(step), "repeat": repeat}
