"""Typed events and headers with known truth."""

import math
import random

from msgspec.structs import replace

from steadygrad.studies.advise.analysis import Chooser
from steadygrad.studies.advise.plan import FRACTIONS, end_marks, make_trials, run_marks
from steadygrad.studies.advise.schema import (
    Branch,
    Header,
    Noise,
    Point,
    Scratch,
    Settings,
    Stage,
)
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Result
from tests.unit.studies import results

LENGTH = 4096
SIZES = [8 * 2**i for i in range(7)]


def law(samples: float) -> float:
    return 3 - 0.3 * math.log(1 + samples / 1000)


def slowness(size: float, critical: float, base: int = 8) -> float:
    """Samples that a batch size needs, over those of the smallest: the trade-off."""
    return (1 + size / critical) / (1 + base / critical)


def within_tolerance(critical: float, tolerance: float = 0.2) -> float:
    """The batch size that needs just the tolerated extra samples."""
    return (1 + tolerance) * (critical + SIZES[0]) - critical


def make_header(points=(1024, 4096), *, task=None, runtime=None, settings=None, **plan) -> Header:
    fields = {
        "batch_size": 8,
        "points": tuple(points),
        "branch_samples": (LENGTH,) * len(points),
        "multiples": (tuple(size // 8 for size in SIZES),) * len(points),
        "noise_steps": (8,) * len(points),
        "repeats": 3,
        "seeds": 3,
        "candidates": 3,
        "samples_per_second": 1000.0,
    }
    own = {"batch_size": 8, "train_size": 100_000, "beta2": None, "weight_decay": None}
    return results.make_header(
        plan=replace(results.PLAN, **{**fields, **plan}),
        task=replace(results.TASK, **{**own, **(task or {})}),
        runtime=replace(results.RUNTIME, micro_batch_size=512, **(runtime or {})),
        settings=Settings(**{"task": "tiny", **(settings or {})}),
    )


def branch(size, repeat, loss, *, curve=None, point=0, samples=LENGTH) -> Branch:
    where = {"point": point, "repeat": repeat, "steps": samples // size, "samples": samples}
    curve = tuple(curve or [(samples, loss)])
    return results.make_branch(loss, batch_size=size, curve=curve, **where)


def branches(
    critical: float, *, sigma=0.0, shared=0.0, repeats=3, seed=0, sizes=SIZES, point=0, diverged=()
) -> list[Branch]:
    """Branches that obey the trade-off with a critical batch size, and noise of two kinds.

    ``sigma`` is every branch's own; ``shared`` is that of a repeat's data order.
    """
    noise, made = random.Random(seed), []
    for repeat in range(repeats):
        common = noise.gauss(0, shared) if shared else 0.0
        for size in sizes:
            marks = (*FRACTIONS, 1.0) if size == sizes[0] else (1.0,)
            slower = slowness(size, critical, sizes[0])
            curve = [
                (round(part * LENGTH), law(part * LENGTH / slower) + noise.gauss(0, sigma))
                for part in marks
            ]
            # What the last batches of an order do to the loss, they do to all batch sizes.
            curve[-1] = (LENGTH, curve[-1][1] + common)
            if size in diverged:
                curve = [(LENGTH, diverged[size] if isinstance(diverged, dict) else math.inf)]
            made.append(branch(size, repeat, curve[-1][1], curve=curve, point=point))
    return made


def relabelled(result, losses):
    """The same branch or run with losses by a law of the samples."""
    curve = tuple((samples, losses(samples)) for samples, _ in result.curve)
    return replace(result, curve=curve, loss=curve[-1][1])


def point(number: int, samples: int, *, losses=law) -> Point:
    curve = tuple((place, losses(place)) for place in run_marks(samples, SIZES[0]))
    return Point(
        point=number,
        samples=samples,
        steps=samples // 8,
        valid_loss=curve[-1][1],
        curve=curve,
        training=((samples, curve[-1][1]),),
    )


def scratch(
    size: int,
    repeat: int,
    samples: int,
    *,
    slower=1.0,
    noise=0.0,
    rate=1.0,
    purpose="constant",
    stages=None,
    warmup_samples=None,
) -> Scratch:
    """A run from scratch that needs ``slower`` times the samples of the smallest batch."""
    ends = end_marks(samples, SIZES[0])
    mean = round(sum(ends) / len(ends))
    loss = sum(law(place / slower) for place in ends) / len(ends) + noise
    base = size == SIZES[0] and purpose == "constant"
    way = [mark for mark in run_marks(samples, SIZES[0]) if mark < ends[0]] if base else []
    rows = stages or ((0, size),)
    return Scratch(
        purpose=purpose,
        repeat=repeat,
        batch_size=size,
        rate=rate,
        stages=tuple(Stage(from_samples=s, batch_size=b, lr=0.001) for s, b in rows),
        warmup_samples=(0 if base else 1024) if warmup_samples is None else warmup_samples,
        steps=samples // size,
        samples=mean,
        loss=loss,
        curve=(*((place, law(place / slower)) for place in way), (mean, loss)),
    )


def noise(number: int, value=30.0) -> Noise:
    """A noise scale; NaN where it could not be determined."""
    known = not math.isnan(value)
    low, high = (value / 2, 2 * value) if known else (10.0, math.inf)
    return results.make_noise(number, value=value, low=low, high=high, resolved=known)


def measured(header, criticals=(120.0, 400.0), **more) -> list[Result]:
    """Points, noise scales and the branches of the ladder."""
    found: list[Result] = []
    for i, samples in enumerate(header.plan.points):
        found += [point(i, samples), noise(i)]
        found += branches(criticals[i % 2], sigma=0.0005, seed=i, point=i, **more)
    return found


def done(job, critical, error) -> Result:
    """The result of a job, with an error of its loss."""
    size = job["batch_size"]
    if job["kind"] == "branch":
        loss = law(LENGTH / slowness(size, critical)) + error
        return branch(size, job["repeat"], loss, point=job["point"])
    return scratch(
        size,
        job["repeat"],
        job["samples"],
        slower=slowness(size, critical),
        noise=error,
        rate=job["rate"],
        purpose=job["purpose"],
        stages=job["stages"],
        warmup_samples=job["warmup_samples"],
    )


def studied(header, critical, *, events=None, grown=None, rates=None, noise=None):
    """Results of a whole study, and the jobs of its trials.

    Args:
        header: Its header.
        critical: Critical batch size of whole runs.
        events: Points, noise scales and branches; by default :func:`measured`.
        grown: Critical batch size of growing batches.
        rates: Samples that other learning rates need, by rate; the others are not trained.
        noise: Makes the error of one loss.
    """
    draw, jobs, chooser, rates = random.Random(0), {}, Chooser(header), rates or {}
    noise = noise or (lambda: draw.gauss(0, 0.001))
    events = measured(header) if events is None else list(events)
    for trial in make_trials(header.plan, 64, chooser, decays=header.task.lr_decay != "none"):
        job = jobs[trial.key] = trial.job(Results(events))
        kind = trial.key[0]
        if job is None or kind in ("point", "noise", "branch"):
            continue
        if kind == "rate":
            rate = job["rate"]
            if rate in rates:
                events.append(scratch(8, 0, job["samples"], rate=rate, slower=rates[rate]))
        else:
            events.append(done(job, grown if grown and kind == "schedule" else critical, noise()))
    return events, jobs
