"""Typed results and headers with known truth."""

import math
import random
from collections.abc import Callable, Mapping
from statistics import fmean
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from steadygrad.studies.advise.plan import end_marks, lengths_of, sizes_of
from steadygrad.studies.advise.schema import Header, Settings
from steadygrad.studies.advise.search import trials_of
from steadygrad.studies.folder import Results
from steadygrad.studies.paired import NEAR, SEEDS
from steadygrad.studies.schema import Key, Result, Training
from tests.unit.studies import results

LENGTH = 4096
SIZES = sizes_of(8, 512, 1)
ARM = {size: arm for arm, size in enumerate(SIZES)}


def law(samples: float) -> float:
    return 3 - 0.3 * math.log(1 + samples / 1000)


def slowness(size: float, critical: float) -> float:
    """Samples that a batch size needs, over those of the smallest: the trade-off."""
    return (1 + size / critical) / (1 + SIZES[0] / critical)


def slowed(octaves: float, bend: float = 0.3) -> float:
    """Samples that are needed so far from the best rate, over those at that."""
    return 1 + bend * octaves**2


def within_tolerance(critical: float, tolerance: float = 0.2) -> float:
    """The batch size that needs just the tolerated extra samples."""
    return (1 + tolerance) * (critical + SIZES[0]) - critical


def make_header(
    samples: int = LENGTH, *, task=None, runtime=None, settings=None, **plan: Any
) -> Header:
    own = {"batch_size": 8, "train_size": 100_000, "beta2": None, "weight_decay": None}
    fields = {"arms": SIZES, "samples": samples, "seeds": 16}
    return results.make_header(
        plan=replace(results.PLAN, **{**fields, **plan}),
        task=replace(results.TASK, **{**own, **(task or {})}),
        runtime=replace(results.RUNTIME, micro_batch_size=512, **(runtime or {})),
        settings=Settings(**{"task": "tiny", **(settings or {})}),
    )


def training(
    size: int,
    seed: int,
    samples: int = LENGTH,
    *,
    slower: float = 1.0,
    noise: float = 0.0,
    step: float = 0.0,
    decays: bool = False,
    losses: Callable[[float], float] = law,
) -> Training:
    """A training that needs ``slower`` times the samples of the smallest batch."""
    curve = []
    for length in lengths_of(samples, 0.2) if size == SIZES[0] and not decays else [samples]:
        ends = end_marks(length, decays=decays)
        curve.append((fmean(ends), fmean(losses(place / slower) for place in ends) + noise))
    known = {"samples": samples, "step": step, "lr": 0.001 * 2**step, "curve": tuple(curve)}
    return results.make_training(curve[-1][1], arm=ARM[size], seed=seed, **known)


def seeds(size: int, count: int = 4, *, spread: float = 0.0, **more: Any) -> list[Training]:
    """Trainings of so many seeds, whose losses are ``spread`` apart."""
    return [training(size, i, **{"noise": spread * (i % 3 - 1), **more}) for i in range(count)]


def searches(*sizes: int, best: float = 0.0, **more: Any) -> list[Training]:
    """Trainings that find so many octaves above the rule's to be the best rate."""
    return [
        training(size, seed, step=float(step), slower=slowed(step - best), **more)
        for size in sizes
        for step in NEAR
        for seed in SEEDS
    ]


SEARCHED = searches(SIZES[0])


def studied(
    header: Header,
    critical: float = 100.0,
    *,
    lengths: float = 100,
    at_once: int = 8,
    best: Mapping[Any, float] = MappingProxyType({}),
    bend: float = 0.3,
    sigma: float = 0.001,
    diverging: float = math.inf,
    losses: Callable[[float], float] = law,
    growth: float = 0.0,
    real: float = 1.0,
    drift: float = 0.0,
) -> list[Result]:
    """Results, in order, of a study that trains on about so many lengths, some trials at once.

    Each hangs on nothing but its trial: ``critical`` is the critical batch size. ``best`` has the
    octaves to the best rate, by batch size, else 0; ``bend`` is what others cost. Losses deviate by
    ``sigma``, and all with a seed by another 0.05. The critical size grows by the power ``growth``
    of the length; that of the model for which another one stands in is ``real`` times as large.
    The best rates fall by ``drift`` octaves with each four times the length.
    """

    def result(key: Key) -> Result:
        if key[0] == "noise":
            return results.make_noise(samples=int(key[1]))
        _, arm, samples, step, seed = key
        others, arm = divmod(arm, len(header.plan.sizes))
        size, own = header.plan.arms[arm], critical * (samples / header.plan.samples) ** growth
        own *= real if others else 1.0
        away = step - best.get(("real", size) if others else size, best.get(size, 0.0))
        away += drift * math.log(samples / header.plan.samples, 4)
        error = random.Random(repr(key)).gauss(0, sigma) + random.Random(seed).gauss(0, 0.05)
        made = training(
            size,
            seed,
            samples,
            slower=slowness(size, own) * slowed(away, bend),
            noise=math.inf if size >= diverging else error,
            step=step,
            decays=header.task.lr_decay != "none",
            losses=losses,
        )
        return replace(made, arm=key[1])

    found, made, work = Results(), list[Result](), lengths * header.plan.samples
    while work > 0:
        trials = [trial for trial in trials_of(header, found) if trial.key not in found][:at_once]
        if not trials:
            break
        made += [result(trial.key) for trial in trials]
        for each in made[-len(trials) :]:
            found.add(each)
        work -= sum(trial.cost for trial in trials)
    return made
