"""Random records of any kind that a study may leave, with the runs that it would have chosen."""

import math
import random

from steadygrad.studies.advise.decisions import Chooser
from steadygrad.studies.advise.schema import Noise
from steadygrad.studies.advise.summary import summarize
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import (
    branches,
    law,
    make_header,
    point,
    scratch,
    slowness,
)

STATUSES = ("complete", "interrupted", "budget", "failed")


def random_journal(seed):
    """A header and events of any kind that a study may leave, whole or cut short."""
    draw = random.Random(seed)
    count, decay = draw.randint(1, 4), "linear" if seed % 9 == 4 else "none"
    points = tuple(1024 * 4**i for i in range(count))
    header = make_header(
        points,
        task={
            "lr_rule": draw.choice(["sqrt", "linear", "constant"]),
            "beta2": draw.choice([None, 0.95, 0.999]),
            "optimizer": draw.choice(["AdamW", "SGD"]),
            "weight_decay": draw.choice([None, 0.0, 0.1]),
            "tokens_per_sample": draw.choice([None, 64]),
            "train_size": draw.choice([1000, 100_000]),
            "lr_decay": decay,
        },
        candidates=draw.choice([0, 2, 3]) if count > 1 else 0,
        rates=draw.random() < 0.5,
        runtime={"world_size": draw.choice([1, 4])},
    )
    # Now and then no branch tells anything.
    events, loud = [], draw.random() < 0.1
    for i, samples in enumerate(points):
        losses = law if draw.random() < 0.8 else (lambda s: law(min(s, 400)))
        losses = (lambda s: 1 + s / 1e5) if seed % 25 == 3 else losses
        events.append(point(i, samples, losses=losses))
        if draw.random() < 0.8:
            value = draw.choice([math.nan, 30.0])
            fields = {"value": value, "low": 10.0, "high": math.inf if value != value else 50.0}
            rest = {"grad_sq_norm": 1.0, "noise_trace": 1.0, "measurements": 3, "effective": 3.0}
            events.append(Noise(point=i, samples=64, resolved=value == value, **fields, **rest))
        lost = {
            8 * 2**k: draw.choice([math.inf, 1e9, 2.99])
            for k in range(draw.randint(2, 8), 7)
            if draw.random() < 0.7
        }
        events += branches(
            10 ** draw.uniform(0.5, 5),
            sigma=loud or 10 ** draw.uniform(-5, -1),
            repeats=draw.choice([2, 3]),
            seed=draw.random(),
            point=i,
            diverged=lost,
        )
    return header, events, draw


def with_runs(header, events, draw, seed):
    """Adds the runs from scratch that the study would have chosen."""
    chooser, critical = Chooser(header), 10 ** draw.uniform(0.5, 4)
    length, decays = header.plan.length, header.task.lr_decay != "none"
    if decays:
        job = chooser(("baseline", 0), Results(events)) if header.plan.candidates else None
        length = job["samples"] if job else 0
    for rate in (0.5, 2.0) if header.plan.rates and length else ():
        slower = 10 ** draw.uniform(-0.4, 0.4)
        noise = math.inf if draw.random() < 0.1 else 0.0
        # An optimizer that leaves its rate aside.
        slower, noise = (1.0, 0.0) if seed % 11 == 5 else (slower, noise)
        events.append(scratch(8, 0, length, rate=rate, slower=slower, noise=noise))
    # The main trajectory of a task whose rate decays is none of the runs from scratch.
    seeds = (0, 1, 2) if decays else (1, 2)
    for repeat in seeds if header.plan.candidates else ():
        job = chooser(("baseline", repeat), Results(events))
        if job:
            noise = draw.gauss(0, 0.01)
            events.append(scratch(8, repeat, job["samples"], noise=noise))
    sigma = 10 ** draw.uniform(-4, -1)
    names = [("candidate", number) for number in range(header.plan.candidates)]
    lucky = [("schedule",)] if draw.random() < 0.6 else []
    for name in [*names, ("schedule",)] if names else ():
        found = Results(events)
        for job in [chooser((*name, repeat), found) for repeat in range(3)]:
            if job is not None and draw.random() < 0.97:
                lost = math.inf if draw.random() < 0.05 else draw.gauss(0, sigma)
                size = job["batch_size"]
                events.append(
                    scratch(
                        size,
                        job["repeat"],
                        job["samples"],
                        slower=slowness(size, 1e5 if name in lucky else critical),
                        noise=lost,
                        purpose=job["purpose"],
                        stages=[tuple(stage) for stage in job["stages"]],
                        warmup_samples=job["warmup_samples"],
                    )
                )
    return events


def random_record(seed):
    """A header, a journal and the summary."""
    header, events, draw = random_journal(seed)
    events = with_runs(header, events, draw, seed)
    if draw.random() < 0.3:
        events = events[: draw.randint(0, len(events))]
    status = draw.choice(STATUSES)
    journal = Results(events)
    return header, journal, {**summarize(header, journal, status), "status": status}
