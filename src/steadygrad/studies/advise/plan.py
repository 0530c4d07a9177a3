"""From a time budget to amounts of work and the list of trials, by arithmetic alone.

Work is counted in samples: one sample is one forward and backward pass of it. The same budget,
speed, task and number of workers always give the same plan.

At each point of training: the main trajectory, the noise scale, the branches and what refines
them. Then, from the initial weights: the smallest batch at other learning rates and with other
seeds, the candidates for the recommendation, and the schedule.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import msgspec

from steadygrad._checks import InputError
from steadygrad.studies.advise.schema import Curve, Plan
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Key
from steadygrad.studies.trials import SHARE, Job, Trial, evaluation_cost, makespan, start_up

MICRO_BATCHES = 8
MAX_MULTIPLE = 512
MAX_POINTS = 4
# Adam's second moment (beta2 = 0.95) needs about that many steps to adapt to another batch size.
MIN_STEPS = 16
# Most samples between two evaluations at the end of a run, as a part of the run.
END_STEP = 0.02
# Levels of a plan, best first: least number of points; repeats of each branch, seeds, and batch
# sizes to train as a check, which needs two points to predict a candidate from.
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
# Other learning rates at which the smallest batch is tried, relative to the task's.
RATES = (0.5, 2.0)
# Parts of a branch after which the smallest batch is evaluated.
FRACTIONS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Evaluations at the end of every branch, one step of the largest batch apart: the loss after a
# single optimizer step depends too much on that step's samples.
END_MARKS = 3
# Parts of a run from the initial weights after which the smallest batch is evaluated, and the
# evaluations at the end of every such run.
RUN_FRACTIONS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RUN_ENDS = 5

Level = tuple[int, int, int]
Keys = tuple[Key, ...]
Stages = tuple[tuple[int, int], ...]
"""Stages of a schedule: pairs of samples seen at the beginning and batch size."""


def make_plan(
    budget: float,
    speed: float,
    *,
    batch_size: int,
    train_size: int,
    workers: int,
    trials_of: Callable[[Plan], Sequence[Trial]],
) -> Plan:
    """Chooses the longest training whose measurements fit a budget.

    Each point of training is at a quarter of the next; a branch is half as long as the training
    before it. The advice is checked where that leaves time for two points. No batch is larger than
    the training set. ``budget`` is in seconds, ``speed`` that of one trial, in samples a second.

    Raises:
        InputError: If not even one point with three batch sizes and two repeats fits.
    """
    if train_size < 4 * batch_size:
        raise InputError(
            f"Expected at least {4 * batch_size} training samples, for branches at 4 times the "
            f"batch size {batch_size}. Found {train_size}. Remedy: a smaller Task.batch_size or "
            "more data."
        )
    span = SHARE * max(0.0, budget - start_up(workers)) * speed

    def priced(horizon: int, level: Level) -> Plan:
        plan = plan_of_length(horizon, level, batch_size, train_size, speed=speed)
        trials = trials_of(plan)
        work = sum(trial.cost for trial in trials)
        return msgspec.structs.replace(plan, work=work, span=makespan(trials, workers))

    # Lengths of training are tried in steps of about a fifth; cost grows but for small steps.
    horizons = [batch_size * part << doubling for doubling in range(4, 40) for part in (4, 5, 6, 7)]
    for points, level in LEVELS:
        cost = lambda horizon, level=level: priced(horizon, level).span  # noqa: E731
        fitting = bisect_right(horizons, span, key=cost)
        plan = priced(horizons[max(0, fitting - 1)], level)
        if fitting and len(plan.points) >= points:
            return plan
    seconds = plan.span / (SHARE * speed) + start_up(workers)
    # Rounded up to two significant digits, and to whole ones.
    unit = int(10 ** max(0, len(str(math.ceil(seconds))) - 2))
    seconds = math.ceil(seconds / unit) * unit
    rate = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
    raise InputError(
        f"The budget is too small to measure anything: found {budget:g}s, expected at least "
        f"{seconds}s for this task at {rate} samples a second. Remedy: --budget {seconds}s or "
        "more; where other programs keep the cores busy, --threads 1."
    )


def plan_of_length(horizon: int, level: Level, size: int, train_size: int, *, speed: float) -> Plan:
    """The plan whose last point is at ``horizon`` samples; it is not priced yet."""
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


def make_trials(
    plan: Plan,
    valid_size: int,
    decide: Callable[[Key, Results], Job | None],
    *,
    decays: bool = False,
    noise: bool = True,
) -> list[Trial]:
    """All trials of a plan, with jobs that ``decide`` makes from results; each evaluates so much.

    If the learning rate ``decays``, the main trajectory and the branches leave that out, so that it
    is none of the runs from the initial weights, and other rates are compared with a run of the
    length that the branches suggest.
    """
    found, evaluation = list[Trial](), evaluation_cost(valid_size)

    def add(keys: list[Key], samples: int, marks: int, what: str, needs: Keys) -> Keys:
        cost = samples + marks * evaluation
        found.extend(Trial(key, cost, partial(decide, key), what, needs) for key in keys)
        return tuple(keys)

    measured = _measurements(plan, add, noise)
    marks, end = len(RUN_FRACTIONS) + RUN_ENDS, "from the initial weights"

    def rates(needs: Keys) -> None:
        for rate in RATES if plan.rates else ():
            what = f"learning rate times {rate:g} {end}"
            add([("rate", f"{rate:g}", 0)], plan.length, marks, what, needs)

    if not decays:
        rates(())
    if not plan.candidates:
        return found
    # A prediction rests on what was measured.
    keys: list[Key] = [("baseline", seed) for seed in range(0 if decays else 1, plan.seeds)]
    baselines = add(keys, plan.length, marks, f"{plan.batch_size:,} {end}", measured)
    needs = measured + baselines
    for number in range(plan.candidates):
        keys = [("candidate", number, repeat) for repeat in range(plan.seeds)]
        needs += add(keys, plan.length, RUN_ENDS, f"a candidate {end}", needs)
    if decays:
        rates(baselines)
    keys = [("schedule", repeat) for repeat in range(plan.seeds)]
    add(keys, plan.length, RUN_ENDS, f"the schedule {end}", needs)
    return found


def _measurements(plan: Plan, add: Callable[..., Keys], noise: bool) -> Keys:
    """Adds the trials at every point; the keys of all but the noise scales."""
    measured, start, size = Keys(), 0, plan.batch_size
    for i, (samples, length) in enumerate(zip(plan.points, plan.branch_samples, strict=True)):
        marks, before = len(run_marks(samples, size, first=start)), measured and (("point", i - 1),)
        what = f"training to {samples:,} samples"
        here = keys = add([("point", i)], samples - start, marks, what, before)
        if noise:
            used = plan.noise_steps[i] * MICRO_BATCHES * size
            add([("noise", i)], used, 0, f"noise scale at {samples:,}", here)
        # Repeat by repeat: a study that is cut short has whole repeats, not half of the sizes.
        for repeat, multiple in product(range(plan.repeats), plan.multiples[i]):
            key = ("branch", i, repeat, multiple * size)
            marks = END_MARKS + (len(FRACTIONS) if multiple == 1 else 0)
            keys += add([key], length, marks, f"branch of {key[-1]:,} at {samples:,}", here)
        middle = [("middle", i, repeat) for repeat in range(plan.repeats)]
        what = f"branch between two sizes at {samples:,}"
        measured += keys + add(middle, length, END_MARKS, what, keys)
        start = samples
    return measured


def scratch_job(stages: Stages, samples: int, *, rate: float = 1.0, warmup_samples: int = 0) -> Job:
    """A run from the initial weights with the first seed; several stages are a schedule."""
    return {
        "kind": "scratch",
        "purpose": "schedule" if len(stages) > 1 else "constant",
        "repeat": 0,
        "batch_size": stages[-1][1],
        "rate": rate,
        "samples": samples,
        "warmup_samples": warmup_samples,
        "stages": [list(stage) for stage in stages],
    }


def stretches(stages: Sequence[Sequence[int]], samples: int) -> list[tuple[int, int, int]]:
    """Beginning, end and batch size of each stage of a run with ``samples``."""
    ends = [*(start for start, _ in stages[1:]), samples]
    return [(start, end, size) for (start, size), end in zip(stages, ends, strict=True)]


def run_marks(samples: int, size: int, first: int = 0) -> list[int]:
    """Samples of a run of the smallest batch after which it is evaluated, beyond ``first``."""
    way = (math.ceil(samples * part / size) * size for part in RUN_FRACTIONS)
    return [mark for mark in sorted({*way, *end_marks(samples, size)}) if mark > first]


def end_marks(samples: int, size: int) -> list[int]:
    """Samples at the end of a run after which every batch size is evaluated."""
    unit = end_unit(samples, size)
    return [samples // unit * unit - back * unit for back in reversed(range(RUN_ENDS))]


def averaged_end(curve: Sequence[tuple[int, float]], count: int = RUN_ENDS) -> Curve:
    """The curve with its last ``count`` points replaced by one point, their mean."""
    places, losses = zip(*curve[-count:], strict=True)
    return (*curve[:-count], (round(sum(places) / count), math.fsum(losses) / count))
