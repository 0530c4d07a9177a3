"""Random records of any kind that a study may leave, with the runs that it would have chosen."""

import math
import random
from functools import cache

from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import (
    branches,
    law,
    make_header,
    noise,
    point,
    studied,
)

STATUSES = ("complete", "interrupted", "budget", "failed")


def random_header(seed, draw):
    """A header with any plan and task."""
    count = draw.randint(1, 4)
    return make_header(
        tuple(1024 * 4**i for i in range(count)),
        task={
            "lr_rule": draw.choice(["sqrt", "linear", "constant"]),
            "beta2": draw.choice([None, 0.95, 0.999]),
            "optimizer": draw.choice(["AdamW", "SGD"]),
            "weight_decay": draw.choice([None, 0.0, 0.1]),
            "tokens_per_sample": draw.choice([None, 64]),
            "train_size": draw.choice([1000, 100_000]),
            "lr_decay": "linear" if seed % 9 == 4 else "none",
        },
        candidates=draw.choice([0, 2, 3]) if count > 1 else 0,
        rates=draw.random() < 0.5,
        runtime={"world_size": draw.choice([1, 4])},
    )


def random_points(header, seed, draw):
    """Points, noise scales and branches; now and then no branch tells anything."""
    events, loud = [], draw.random() < 0.1
    for i, samples in enumerate(header.plan.points):
        losses = law if draw.random() < 0.8 else (lambda s: law(min(s, 400)))
        losses = (lambda s: 1 + s / 1e5) if seed % 25 == 3 else losses
        events.append(point(i, samples, losses=losses))
        if draw.random() < 0.8:
            events.append(noise(i, draw.choice([math.nan, 30.0])))
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
    return events


@cache
def random_record(seed):
    """A header, the results, whole or cut short, and the summary."""
    draw = random.Random(seed)
    header = random_header(seed, draw)
    sigma = 10 ** draw.uniform(-4, -1)

    rates = {rate: 10 ** draw.uniform(-0.4, 0.4) for rate in (0.5, 2.0)}
    # An optimizer that leaves its rate aside.
    rates = dict.fromkeys(rates, 1.0) if seed % 11 == 5 else rates
    events, _ = studied(
        header,
        10 ** draw.uniform(0.5, 4),
        events=random_points(header, seed, draw),
        grown=1e5 if draw.random() < 0.6 else None,
        rates=rates,
        # Some diverge, and some are not there.
        noise=lambda: math.inf if draw.random() < 0.05 else draw.gauss(0, sigma),
    )
    events = [e for e in events if e.key[0] != "scratch" or draw.random() < 0.97]
    if draw.random() < 0.3:
        events = events[: draw.randint(0, len(events))]
    found = Results(events)
    return header, found, summarize(header, found, draw.choice(STATUSES))
