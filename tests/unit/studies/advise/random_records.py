"""Random records of any kind that a study may leave."""

import math
import random
from functools import cache

from msgspec.structs import replace

from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.schema import Point
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import law, make_header, studied

STATUSES = ("complete", "interrupted", "budget", "failed")


def random_header(seed, draw):
    """A header with any plan and task."""
    points = tuple(1024 * 4**i for i in range(draw.randint(1, 3)))
    return make_header(
        points,
        task={
            "lr_rule": draw.choice(["sqrt", "linear", "constant"]),
            "beta2": draw.choice([None, 0.95, 0.999]),
            "optimizer": draw.choice(["AdamW", "SGD"]),
            "weight_decay": draw.choice([None, 0.0, 0.1]),
            "tokens_per_sample": draw.choice([None, 64]),
            "train_size": draw.choice([1000, 100_000]),
            "lr_decay": "linear" if seed % 9 == 4 else "none",
            "dependent": draw.random() < 0.2,
        },
        settings={"samples": draw.choice([0, points[-1]]), "tolerance": draw.choice([0.2, 0.5])},
        runtime={"world_size": draw.choice([1, 4])},
    )


@cache
def random_record(seed):
    """A header, the results, whole or cut short, and the summary."""
    draw = random.Random(seed)
    header = random_header(seed, draw)
    stop = draw.choice([400, 2000, 1e9, 1e9, 1e9])
    losses = (lambda s: 1 + s / 1e5) if seed % 25 == 3 else lambda s: law(min(s, stop))
    rates = {rate: 10 ** draw.uniform(-0.4, 0.4) for rate in (0.5, 2.0)}
    found = studied(
        header,
        10 ** draw.uniform(0.5, 4),
        lengths=draw.choice([2, 20, 60, 60]),
        grown=10 ** draw.uniform(1, 5),
        at=tuple(10 ** draw.uniform(0.5, 5) for _ in range(3)),
        # An optimizer that leaves its rate aside.
        rates={} if seed % 11 == 5 else rates,
        sigma=10 ** draw.uniform(-5, -1.5),
        diverging=draw.choice([math.inf, 16, 64, 256]),
        losses=losses,
    )
    # Some are not there, and some of larger batches diverge.
    found = [r for r in found if isinstance(r, Point) or draw.random() < 0.97]
    large = [getattr(r, "batch_size", 8) > 8 for r in found]
    found = [
        replace(r, loss=math.inf) if large and draw.random() < 0.01 else r
        for r, large in zip(found, large, strict=True)
    ]
    results = Results(found)
    return header, results, summarize(header, results, draw.choice(STATUSES))
