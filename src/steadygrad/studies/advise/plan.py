"""From a time budget to the length of training, and to the branches along it.

The same settings and measured times always give the same plan. With the length given, no time
matters.
"""

import math
from collections.abc import Mapping

from steadygrad._checks import InputError
from steadygrad.studies.advise.schema import Plan
from steadygrad.studies.sequential import LOOKS
from steadygrad.studies.text import show
from steadygrad.studies.trials import start_up

MICRO_BATCHES = 8
MAX_MULTIPLE = 512
# Parts of the training at which it branches off, and the repeats of each branch.
POINTS, REPEATS = (1 / 16, 1 / 4, 1), 3
# Adam's second moment (beta2 = 0.95) needs about that many steps to adapt to another batch size.
MIN_STEPS = 16
# Fewest steps of the smallest batch in a training.
LEAST = 64
# Trainings that a study should have time for, by multiple of the smallest batch.
RUNS = {1: 28, 4: 24, 16: 12}
# Octaves around the rule's learning rate that are searched first.
NEAR = (-1, 0, 1)
# Pairs of the sizes between passing and failing for which that is reckoned.
PAIRS = 12
# The part of the work that branches may take, and another rates.
BRANCHES, OTHER_RATES = 0.2, 0.15
# Steps of training below which a study rather has fewer pairs.
FEW = 256
# Parts of a branch after which the smallest batch is evaluated.
FRACTIONS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Evaluations at the end of a branch, one step of the largest batch apart, and at the end of a
# training: the loss after a single optimizer step depends too much on that step's samples.
END_MARKS, END_STEP = 4, 0.02
# The smallest batch's losses are known for the length over one plus these, in tolerances.
LENGTHS = (3, 1, 0)

Stages = tuple[tuple[int, int], ...]
"""Stages of a schedule: pairs of samples seen at the beginning and batch size."""


def make_plan(
    budget: float,
    seconds: Mapping[int, float],
    evaluation: float,
    *,
    batch_size: int,
    train_size: int,
    workers: int,
    samples: int = 0,
    seeds: int = 0,
    tolerance: float = 0.2,
    decays: bool = False,
    tune: bool = False,
) -> Plan:
    """Chooses the length of training so that its batch sizes can be told apart in the budget.

    Args:
        budget: Seconds.
        seconds: Of one sample in training, by multiple of the smallest batch.
        evaluation: Seconds of one evaluation.
        batch_size: The smallest batch.
        train_size: Samples of the training set; no batch is larger.
        workers: Trials at a time.
        samples: The length, where it is given.
        seeds: Most seeds of a batch size. Default: as many as there is time for.
        tolerance: Extra samples that are acceptable, as a fraction.
        decays: Whether the learning rate falls, so that each length takes a training of its own.
        tune: Whether the learning rates are searched, which takes three times the trainings.

    Raises:
        InputError: If the budget gives no answer, or there are too few samples.
    """
    if train_size < 4 * batch_size:
        raise InputError(
            f"Expected at least {4 * batch_size} training samples, for 4 times the "
            f"batch size {batch_size}. Found {train_size}. Remedy: a smaller Task.batch_size or "
            "more data."
        )
    least = LEAST * batch_size
    if samples and samples < least:
        raise InputError(
            f"--samples should be at least {least}, {LEAST} steps of batch {batch_size}. Found "
            f"{samples}. Remedy: --samples {least}, or a smaller Task.batch_size."
        )
    # Each length of the smallest batch is a training if the rate decays, and else a mark.
    lengths = sum(1 / (1 + times * tolerance) for times in LENGTHS) if decays else 1.0
    runs = {**RUNS, 1: RUNS[1] + PAIRS * (lengths - 1)}
    own, largest = seconds[1], seconds[max(seconds)]
    times = 1 + 2 * tune
    one = times * sum(n * seconds.get(multiple, largest) for multiple, n in runs.items())
    marks = 1 if decays else END_MARKS
    rest = times * evaluation * marks * (sum(RUNS.values()) + PAIRS * (len(LENGTHS) - 1))
    time = workers * max(0.0, budget - start_up(workers)) * (1 - BRANCHES)
    found = (time - rest) / one
    if found < FEW * batch_size:
        found = min(FEW * batch_size, 2.5 * max(0.0, time - rest / 2.5) / one)
    # Three seeds at two sizes.
    first = 3 * (lengths + 1) * own * (1 + len(NEAR) * tune)
    short = found < least if not samples else samples * first > time
    if short:
        need = samples * first if samples else (least * one + rest) / 2.5
        need = math.ceil(need / workers / (1 - BRANCHES) + start_up(workers))
        # Rounded up to two significant digits, and to whole ones.
        unit = int(10 ** max(0, len(str(need)) - 2))
        need = math.ceil(need / unit) * unit
        fewer = ", or fewer --samples" if samples else ""
        raise InputError(
            f"The budget is too small to measure anything: found {budget:g}s, expected at least "
            f"{need}s for this task at {show(1 / own)} samples a second. Remedy: --budget {need}s "
            f"or more{fewer}."
        )
    length = samples or int(found) // batch_size * batch_size
    return plan_of_length(
        length,
        batch_size,
        train_size,
        seeds=seeds or LOOKS[-1],
        speed=1 / own,
        work=max(1, int(workers * budget / own)),
    )


def plan_of_length(
    length: int, size: int, train_size: int, *, seeds: int, speed: float, work: int = 1
) -> Plan:
    """The plan for a training over ``length`` samples."""
    seen = [int(length * part) // size * size for part in POINTS]
    seen = [samples for samples in seen if samples >= LEAST * size] or [seen[-1]]
    floor = 128 * size if len(seen) > 1 else 64 * size
    rows = [_branches(max(samples // 2, floor), size, train_size) for samples in seen]
    ladders, branches, noise_steps = zip(*rows, strict=True)
    return Plan(
        batch_size=size,
        samples=length,
        points=tuple(seen),
        branch_samples=branches,
        multiples=ladders,
        noise_steps=noise_steps,
        repeats=REPEATS,
        seeds=seeds,
        samples_per_second=speed,
        work=work,
    )


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


def rungs(base: int, most: float, world: int = 1) -> list[int]:
    """1, 1.5, 2, 3, 4, 6, ... times a batch size, up to ``most``, as whole shares of all ranks."""
    found, size = [base], 2 * base
    if base % 2 == 0:
        found.append(base + base // 2)
    while size <= most:
        found += [size, size + size // 2]
        size *= 2
    return [base, *(size for size in found[1:] if size <= most and size % world == 0)]


def lengths_of(samples: int, tolerance: float) -> list[int]:
    """Samples at which the smallest batch's loss is known, ascending; the last are ``samples``."""
    return [round(samples / (1 + times * tolerance)) for times in LENGTHS]


def end_marks(samples: int, *, decays: bool) -> list[int]:
    """Samples at the end of a training after which it is evaluated; their mean is its loss.

    A rate that has decayed leaves no noise of single steps.
    """
    back = 0 if decays else END_MARKS - 1
    return [round(samples * (1 - END_STEP * k)) for k in reversed(range(back + 1))]


def course_of(stages: Stages) -> str:
    """The name of a batch size, or of a schedule: ``16``, or ``16-64@4096``."""
    rest = (f"{size}@{start}" for start, size in stages[1:])
    return "-".join([str(stages[0][1]), *rest])


def stages_of(course: str) -> Stages:
    """The stages that a name stands for."""
    first, *rest = course.split("-")
    pairs = (text.split("@") for text in rest)
    return ((0, int(first)), *((int(start), int(size)) for size, start in pairs))


def stretches(stages: Stages, samples: int) -> list[tuple[int, int, int]]:
    """Beginning, end and batch size of each stage of a training over ``samples``."""
    ends = [*(start for start, _ in stages[1:]), samples]
    return [(start, end, size) for (start, size), end in zip(stages, ends, strict=True)]
