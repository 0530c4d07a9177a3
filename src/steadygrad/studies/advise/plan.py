"""From a time budget to amounts of work, by arithmetic alone.

Work is counted in samples: one sample is one forward and backward pass of it. The same budget,
speed, task and number of workers always give the same plan.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from steadygrad._checks import InputError
from steadygrad.studies.advise.schema import Plan
from steadygrad.studies.trials import Trial, makespan

__all__ = [
    "END_STEP",
    "MICRO_BATCHES",
    "end_unit",
    "make_plan",
    "plan_of_length",
]

# The machine is never quite free, and the report also takes time.
SHARE_OF_BUDGET = 0.85
# Loading torch and the data, and drawing the report, in seconds; and starting workers.
START_UP, START_UP_WORKERS = 4.0, 12.0
MICRO_BATCHES = 8
MAX_MULTIPLE = 512
MAX_POINTS = 4
# Adam's second moment (beta2 = 0.95) needs about that many steps to adapt to another batch size.
MIN_STEPS = 16
# Most samples between two evaluations at the end of a run, as a part of the run.
END_STEP = 0.02
# Levels of a plan, best first: least number of points, repeats of each branch, seeds, and batch
# sizes to train from scratch. A check needs two points to predict a candidate from.
LEVELS = (
    (3, (3, 4, 3)),
    (3, (3, 4, 2)),
    (3, (3, 3, 2)),
    (2, (3, 4, 2)),
    (2, (3, 3, 2)),
    (2, (3, 3, 1)),
    (2, (3, 0, 0)),
    (1, (2, 0, 0)),
)

Level = tuple[int, int, int]
TrialsOf = Callable[[Plan], Sequence[Trial]]


def make_plan(
    budget: float,
    speed: float,
    *,
    batch_size: int,
    train_size: int,
    workers: int,
    trials_of: TrialsOf,
) -> Plan:
    """Chooses the longest training whose measurements fit a budget.

    Each point of training is at a quarter of the next; a branch is half as long as the training
    before it. The advice is checked from scratch where that leaves time for two points.

    Args:
        budget: Seconds for the whole study.
        speed: Training speed of one trial, in samples a second.
        batch_size: The task's batch size.
        train_size: Training samples; no batch is larger.
        workers: Trials at a time.
        trials_of: The trials of a plan.

    Raises:
        InputError: If not even one point with three batch sizes and two repeats fits.
    """
    start_up = START_UP_WORKERS if workers > 1 else START_UP
    span = SHARE_OF_BUDGET * max(0.0, budget - start_up) * speed

    def priced(horizon: int, level: Level) -> Plan:
        plan = plan_of_length(horizon, level, batch_size, train_size, speed=speed)
        trials = trials_of(plan)
        work = sum(trial.cost for trial in trials)
        return msgspec.structs.replace(plan, work=work, span=makespan(trials, workers))

    # Lengths of training are tried in steps of about a fifth.
    horizons = [batch_size * part << doubling for doubling in range(4, 40) for part in (4, 5, 6, 7)]
    for points, level in LEVELS:
        plan = _longest(horizons, partial(priced, level=level), span)
        if plan is not None and len(plan.points) >= points:
            return plan
    least = priced(horizons[0], LEVELS[-1][1])
    if len(least.multiples[-1]) < 3:
        raise InputError(
            f"Expected at least {4 * batch_size} training samples, for branches at 4 times the "
            f"batch size {batch_size}. Found {train_size}. Remedy: a smaller Task.batch_size or "
            "more data."
        )
    seconds = _rounded_up(least.span / (SHARE_OF_BUDGET * speed) + start_up)
    rate = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
    raise InputError(
        f"The budget is too small to measure anything: found {budget:g}s, expected at least "
        f"{seconds}s for this task at {rate} samples a second. Remedy: --budget {seconds}s or "
        "more; where other programs keep the cores busy, --threads 1."
    )


def _rounded_up(seconds: float) -> int:
    """Seconds, rounded up to two significant digits and to whole ones."""
    unit = int(10 ** max(0, len(str(math.ceil(seconds))) - 2))
    return math.ceil(seconds / unit) * unit


def _longest(horizons: Sequence[int], priced: Callable[[int], Plan], span: float) -> Plan | None:
    """The longest plan that fits, by bisection: cost grows with length but for small steps."""
    low, high, found = 0, len(horizons) - 1, None
    while low <= high:
        middle = (low + high) // 2
        plan = priced(horizons[middle])
        if plan.span <= span and len(plan.multiples[-1]) >= 3:
            found, low = plan, middle + 1
        else:
            high = middle - 1
    return found


def plan_of_length(horizon: int, level: Level, size: int, train_size: int, *, speed: float) -> Plan:
    """The plan whose last point is at a number of samples; it is not priced yet.

    Args:
        horizon: Samples of the main trajectory.
        level: Repeats, seeds, and candidates to train from scratch.
        size: The task's batch size.
        train_size: Training samples.
        speed: Samples a second of one trial.
    """
    seen: list[int] = []
    while horizon >= 64 * size and len(seen) < MAX_POINTS:
        unit = end_unit(horizon, size)
        seen.insert(0, math.ceil(horizon / unit) * unit)
        horizon = horizon // 4 // size * size
    # A single point has no room for 8 multiples in the smallest plans.
    floor = 128 * size if len(seen) > 1 else 64 * size
    rows = [_branches(max(samples // 2, floor), size, train_size) for samples in seen]
    ladders, branches, noise_steps = zip(*rows, strict=True)
    repeats, seeds, candidates = level if len(seen) > 1 else (level[0], 0, 0)
    return Plan(
        batch_size=size,
        points=tuple(seen),
        branch_samples=branches,
        multiples=ladders,
        noise_steps=noise_steps,
        repeats=repeats,
        rates=len(seen) > 1,
        seeds=seeds,
        candidates=candidates,
        samples_per_second=speed,
        work=1,
        span=1,
    )


def end_unit(samples: int, size: int) -> int:
    """Samples between two evaluations at the end of a run; every point is a multiple of it.

    It is a multiple of as many batch sizes as possible: two runs with the same seed have then seen
    the same data, whose noise cancels in the difference of their losses.
    """
    unit = size
    while (longer := 3 * size if unit == size else 2 * unit) <= END_STEP * samples:
        unit = longer
    return unit


def _branches(length: int, size: int, train_size: int) -> tuple[tuple[int, ...], int, int]:
    """Multiples of the branches from a point, their samples, and noise measurements there."""
    top = min(length // (MIN_STEPS * size), train_size // size, MAX_MULTIPLE)
    ladder = tuple(1 << power for power in range(max(1, top).bit_length()))
    # Every batch size, also one between two of the ladder, divides the branch's length.
    largest = ladder[-1] * size
    unit = 3 * largest if length >= 3 * largest else largest
    samples, measured = max(1, length // unit) * unit, MICRO_BATCHES * size
    # Samples seen twice in one measurement would pass for independent ones.
    most = min(64, train_size // measured)
    return ladder, samples, max(2, min(most, max(8, samples // measured)))
