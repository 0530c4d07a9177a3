"""Typed events and headers with known truth."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from steadygrad.studies.advise.plan import (
    FRACTIONS,
    course_of,
    end_marks,
    lengths_of,
    stages_of,
    stretches,
)
from steadygrad.studies.advise.schema import (
    Branch,
    Header,
    Point,
    Scratch,
    Settings,
    Stage,
)
from steadygrad.studies.advise.search import trials_of
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Result
from steadygrad.studies.trials import Job
from tests.unit.studies import results

LENGTH = 4096
SIZES = [8 * 2**i for i in range(7)]


def law(samples: float) -> float:
    return 3 - 0.3 * math.log(1 + samples / 1000)


def slowness(size: float, critical: float) -> float:
    """Samples that a batch size needs, over those of the smallest: the trade-off."""
    return (1 + size / critical) / (1 + SIZES[0] / critical)


def within_tolerance(critical: float, tolerance: float = 0.2) -> float:
    """The batch size that needs just the tolerated extra samples."""
    return (1 + tolerance) * (critical + SIZES[0]) - critical


def make_header(points=(1024, 4096), *, task=None, runtime=None, settings=None, **plan) -> Header:
    fields = {
        "batch_size": 8,
        "samples": points[-1],
        "points": tuple(points),
        "branch_samples": (LENGTH,) * len(points),
        "multiples": (tuple(size // 8 for size in SIZES),) * len(points),
        "noise_steps": (8,) * len(points),
        "repeats": 3,
        "seeds": 16,
        "samples_per_second": 1000.0,
    }
    own = {"batch_size": 8, "train_size": 100_000, "beta2": None, "weight_decay": None}
    return results.make_header(
        plan=replace(results.PLAN, **{**fields, **plan}),
        task=replace(results.TASK, **{**own, **(task or {})}),
        runtime=replace(results.RUNTIME, micro_batch_size=512, **(runtime or {})),
        settings=Settings(**{"task": "tiny", **(settings or {})}),
    )


def branch(
    size, repeat, critical, *, point=0, losses=law, error=lambda: 0.0, common=0.0, end=None
) -> Branch:
    """A branch that obeys the trade-off with a critical batch size, or diverges to an ``end``.

    ``error`` gives that of one evaluation. What the last batches of an order do to the loss,
    ``common``, they do to all batch sizes.
    """
    slower = slowness(size, critical)
    places = [LENGTH * part for part in (*(FRACTIONS if size == SIZES[0] else ()), 1.0)]
    curve = [(round(place), losses(place / slower) + error()) for place in places]
    curve[-1] = (LENGTH, curve[-1][1] + common)
    if end is not None:
        curve = [(LENGTH, end)]
    known = {"batch_size": size, "steps": LENGTH // size, "samples": LENGTH, "curve": tuple(curve)}
    return results.make_branch(curve[-1][1], point=point, repeat=repeat, **known)


def branches(critical, *, sigma=0.0, shared=0.0, seed=0, point=0, diverged=()) -> list[Branch]:
    """Branches with noise of two kinds: ``sigma`` is each one's own, ``shared`` that of a repeat.

    Those of the sizes in ``diverged`` end at the losses there.
    """
    noise, ends, made = random.Random(seed), dict(diverged), []
    for repeat in range(3):
        common = noise.gauss(0, shared) if shared else 0.0
        errors = {"error": lambda: noise.gauss(0, sigma), "common": common, "point": point}
        made += [branch(s, repeat, critical, end=ends.get(s), **errors) for s in SIZES]
    return made


def relabelled(result, losses):
    """The same branch or run with losses by a law of the samples."""
    curve = tuple((samples, losses(samples)) for samples, _ in result.curve)
    return replace(result, curve=curve, loss=curve[-1][1])


def point(number: int, samples: int, *, losses=law) -> Point:
    return Point(point=number, samples=samples, steps=samples // 8, valid_loss=losses(samples))


def scratch(
    size: int | str,
    repeat: int,
    samples: int = LENGTH,
    *,
    slower=1.0,
    noise=0.0,
    rate=1.0,
    decays=False,
    losses=law,
) -> Scratch:
    """A training that needs ``slower`` times the samples of the smallest batch."""
    stages = stages_of(str(size))
    base = stages == ((0, SIZES[0]),)
    curve = []
    for length in lengths_of(samples, 0.2) if base and not decays else [samples]:
        ends = end_marks(length, decays=decays)
        curve.append((fmean(ends), fmean(losses(place / slower) for place in ends) + noise))
    return Scratch(
        course=course_of(stages),
        repeat=repeat,
        batch_size=stages[-1][1],
        rate=rate,
        stages=tuple(Stage(from_samples=s, batch_size=b, lr=0.001 * rate) for s, b in stages),
        warmup_samples=0 if base else samples // 128 * 8,
        samples=samples,
        steps=sum((end - start) // b for start, end, b in stretches(stages, samples)),
        place=curve[-1][0],
        loss=curve[-1][1],
        curve=tuple(curve),
    )


def seeds(size: int | str, count: int = 3, *, spread: float = 0.0, **more: Any) -> list[Scratch]:
    """Trainings of so many seeds, whose losses are ``spread`` apart."""
    return [scratch(size, i, **{"noise": spread * (i - 1), **more}) for i in range(count)]


def measured(header, criticals=(120.0, 400.0)) -> list[Result]:
    """Points, noise scales and the branches of the ladder."""
    found: list[Result] = []
    for i, samples in enumerate(header.plan.points):
        found += [point(i, samples), results.make_noise(i)]
        found += branches(criticals[i % len(criticals)], sigma=0.0005, seed=i, point=i)
    return found


def studied(
    header: Header,
    critical: float = 100.0,
    *,
    lengths: float = 100,
    at_once: int = 8,
    grown: float = 1e5,
    at: Sequence[float] = (120.0, 400.0),
    rates: Mapping[float, float] = MappingProxyType({0.5: 1.5, 2.0: 1.5}),
    best: Mapping[int, float] = MappingProxyType({}),
    sigma: float = 0.001,
    diverging: float = math.inf,
    losses: Callable[[float], float] = law,
) -> list[Result]:
    """Results, in order, of a study that trains on about so many lengths, some trials at once.

    Each hangs on nothing but its job: ``critical`` is the critical batch size of whole trainings,
    ``grown`` that of growing batches, and ``at`` has those of the branches. Trainings need
    ``rates`` times the samples at other rates; or ``best`` has the octaves to the best rate, by
    batch size. Losses deviate by ``sigma``, and all with a seed by another 0.05.
    """

    def result(job: Job) -> Result:
        error = random.Random(repr(sorted(job.items()))).gauss(0, sigma)
        if job["kind"] == "point":
            return point(job["point"], header.plan.points[job["point"]], losses=losses)
        if job["kind"] == "noise":
            return results.make_noise(job["point"])
        if job["kind"] == "branch":
            size, number = job["batch_size"], job["point"]
            end = math.inf if size >= diverging else None
            known = {"point": number, "losses": losses, "error": lambda: error, "end": end}
            return branch(size, job["repeat"], at[number % len(at)], **known)
        stages = stages_of(job["course"])
        size = stages[-1][1]
        slower = slowness(size, critical if len(stages) == 1 else grown)
        if best:
            slower *= 1 + 0.3 * (math.log2(job["rate"]) - best.get(size, 0.0)) ** 2
        error += random.Random(job["repeat"]).gauss(0, 0.05)
        return scratch(
            job["course"],
            job["repeat"],
            job["samples"],
            slower=slower * rates.get(job["rate"], 1.0),
            noise=math.inf if size >= diverging else error,
            rate=job["rate"],
            decays=header.task.lr_decay != "none",
            losses=losses,
        )

    found, work = Results(), lengths * header.plan.samples
    made: list[Result] = []
    while work > 0 and (trials := trials_of(header, found)[:at_once]):
        made += [result(trial.job(found)) for trial in trials]
        for each in made[-len(trials) :]:
            found.add(each)
        work -= sum(trial.cost for trial in trials)
    return made
