"""From a time budget to the length of training, and the batch sizes that can be tried over it.

The same settings and measured times always give the same plan. With the length given, no time
matters.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from steadygrad._checks import InputError
from steadygrad.noise.schedule import learning_rate
from steadygrad.studies.advise.schema import Plan, Settings
from steadygrad.studies.paired import MOST
from steadygrad.studies.schema import start_up
from steadygrad.studies.text import show

MAX_MULTIPLE = 512
# Fewest steps of the largest batch in a training, and of the smallest.
FEWEST_STEPS, LEAST = 32, 64
# Trainings that a study should have time for, by multiple of the smallest batch.
RUNS = {1: 28, 4: 24, 16: 12}
# Pairs of the sizes between passing and failing for which that is reckoned.
PAIRS = 12
# Steps of training below which a study rather has fewer pairs, and the part of them that do.
FEW, FEWER = 256, 0.4
# Evaluations at the end of a training, and the parts of it between them: the loss after a single
# optimizer step depends too much on that step's samples.
END_MARKS, END_STEP = 4, 0.02
# Lengths at which sizes are compared on the way to a longer training, as parts of the longest: the
# farther they are apart, the better is the growth known.
SHORTER = (16, 4)
# What searches for rates cost, beside the trainings over the longest.
SEARCHES = 0.8
# The smallest batch's losses are known for the length over one plus these, in tolerances.
LENGTHS = (3, 1, 0)


def make_plan(
    settings: Settings,
    task: Any,
    seconds: Mapping[int, float],
    evaluation: float,
    *,
    workers: int,
    world: int = 1,
    stand_in: int = 0,
) -> Plan:
    """Chooses the length of training so that its batch sizes can be told apart in the budget.

    ``seconds`` are those of a sample in training, by multiple of the smallest batch, and those of
    an ``evaluation``; ``workers`` trials go at a time, and ``world`` processes share a batch.
    ``stand_in``: parameters of a smaller model that trains the rungs; the times are its own.
    """
    batch_size, train_size, samples = task.batch_size, len(task.train), settings.samples
    # A stand-in is checked over the shortest length, as the real model costs more.
    least = batch_size * (FEW * max(SHORTER) if stand_in else LEAST)
    decays = task.lr_decay != "none"
    if train_size < 4 * batch_size:
        raise InputError(
            f"Expected at least {4 * batch_size} training samples, 4 batches of {batch_size}. "
            f"Found {train_size}. Remedy: a smaller Task.batch_size or more data."
        )
    _check_sizes(settings, task, world)
    if samples and samples < least:
        raise InputError(
            f"--samples should be at least {least}, {least // batch_size} steps of {batch_size}. "
            f"Found {samples}. Remedy: --samples {least}, or a smaller Task.batch_size."
        )
    # Each length of the smallest batch is a training if the rate decays, and else a mark.
    lengths = sum(1 / (1 + times * settings.tolerance) for times in LENGTHS) if decays else 1.0
    own, largest = seconds[1], seconds[max(seconds)]
    runs = {**RUNS, 1: RUNS[1] + PAIRS * (lengths - 1)}
    one = sum(n * seconds.get(times, largest) for times, n in runs.items())
    marks = 1 if decays else END_MARKS
    rest = evaluation * marks * (sum(RUNS.values()) + PAIRS * (len(LENGTHS) - 1))
    time = workers * max(0.0, settings.budget - start_up(workers))
    # In too little time for all trainings rather fewer of them than shorter ones.
    fitting = [(time - part * rest) / (part * one) for part in (1.0, FEWER)]
    fewest = FEW * batch_size
    # What does not fit is predicted from shorter trainings.
    target = samples if samples > max(fitting) or stand_in else 0
    dearer = 1 + SEARCHES + sum(1 / times for times in SHORTER)
    longest = int(max(fitting[0], min(fewest, fitting[1])))
    top = min(samples, int(fitting[1] / dearer)) if target else samples or longest
    length = top // batch_size * batch_size
    if length < least:
        need = FEWER * (dearer if target else 1.0) * (least * one + rest) / workers
        raise _too_small(settings, need + start_up(workers), own)
    shorter = [length // times // batch_size * batch_size for times in SHORTER]
    most = min(length // FEWEST_STEPS, train_size, MAX_MULTIPLE * batch_size)
    arms, seeds = _arms(settings, batch_size, most, world), settings.seeds or MOST
    work = workers * settings.budget / own
    return Plan(
        arms=arms * (2 if stand_in else 1),
        samples=length,
        seeds=seeds,
        work=max(1, int(work if target else min(work, len(arms) * seeds * length))),
        shorter=tuple(n for n in shorter if target and n >= fewest),
        target=target,
        stand_in=stand_in,
    )


def _too_small(settings: Settings, need: float, own: float) -> InputError:
    """The budget is, where ``need`` seconds would do, and a sample takes ``own``."""
    # Rounded up to two significant digits, and to whole ones.
    unit = 10 ** max(0, len(str(math.ceil(need))) - 2)
    rounded = math.ceil(need / unit) * unit
    fewer = ", or fewer --samples" if settings.samples else ""
    fewer = ", in place of --share" if settings.share else fewer
    return InputError(
        f"The budget is too small to measure anything: found {settings.budget:g}s, expected at "
        f"least {rounded}s for this task at {show(1 / own)} samples a second. Remedy: --budget "
        f"{rounded}s or more{fewer}."
    )


def named_sizes(settings: Settings) -> list[int]:
    """The batch sizes that the settings name, ascending; of a largest one, that one."""
    texts = settings.batch_sizes.split(",") if settings.batch_sizes else []
    # What is no number, or none of a batch, is smaller than every size.
    named = {int(text) if re.fullmatch(r"\s*[0-9]{1,9}\s*", text) else 0 for text in texts}
    return sorted(named or {settings.max_batch} - {0})


def _check_sizes(settings: Settings, task: Any, world: int) -> None:
    named, base, samples = named_sizes(settings), task.batch_size, len(task.train)
    fits = not named or (base <= named[0] and base < named[-1] <= samples)
    if not fits or any(n % world for n in named):
        shares = f", as a multiple of {world} processes" * (world > 1)
        raise InputError(
            "--batch-sizes (with commas between them) and --max-batch should be whole numbers, at "
            f"least Task.batch_size = {base}{shares}, one of them larger, and none larger than the "
            f"{samples:,} samples of Task.train. Found "
            f"{settings.batch_sizes or named[0]!r}. "
            f"Remedy: --batch-sizes {2 * base},{4 * base}, or a smaller Task.batch_size."
        )


def _arms(settings: Settings, base: int, most: int, world: int) -> tuple[int, ...]:
    """The task's own batch size, and larger ones that can be used and tried."""
    named = named_sizes(settings)
    if settings.batch_sizes and (fitting := [size for size in named if base < size <= most]):
        return base, *fitting
    # Named ones that are all too large for these lengths are predicted from smaller ones.
    return sizes_of(base, min(most, max(named, default=most)), world)


def sizes_of(base: int, most: int, world: int) -> tuple[int, ...]:
    """1, 1.5, 2, 3, 4, 6, ... times a batch size, up to ``most``, as whole shares of all ranks."""
    octaves = range(max(0, most // base).bit_length())
    found = [(base << octave) * part // 2 for octave in octaves for part in (2, 3)]
    # An odd size has no half.
    even = base % 2 == 0
    good = [s for s in found[2 - even :] if base < s <= most and s % world == 0]
    return base, *good


def lengths_of(samples: int, tolerance: float) -> list[int]:
    """Samples at which the smallest batch's loss is known, ascending; the last are ``samples``."""
    return [round(samples / (1 + times * tolerance)) for times in LENGTHS]


def end_marks(samples: int, *, decays: bool) -> list[int]:
    """Samples at the end of a training after which it is evaluated; their mean is its loss.

    A rate that has decayed leaves no noise of single steps.
    """
    back = 0 if decays else END_MARKS - 1
    return [round(samples * (1 - END_STEP * k)) for k in reversed(range(back + 1))]


def rate_of(task: Any, size: int, step: float = 0.0) -> float:
    """The learning rate of a batch size by the task's rule, so many octaves above it."""
    return float(learning_rate(task.lr, size, task.batch_size, task.lr_rule) * 2.0**step)


def warmup_samples(task: Any, samples: int, size: int) -> int:
    """Samples of a warm-up from the smallest batch's learning rate to a larger one's."""
    if size == task.batch_size or task.lr_rule == "constant":
        return 0
    return int(samples // 16 // task.batch_size * task.batch_size)
