"""What the lines of an ``inspect`` record must hold."""

import math
from collections.abc import Mapping
from typing import Any

from steadygrad.record._kinds import (
    ABOVE_ZERO,
    COUNT,
    NUMBER,
    NUMBERS_BY_NAME,
    OBJECT,
    POSITIVE,
    SEED,
    TEXT,
    TEXTS,
    Fields,
    Kind,
    number,
    object_of,
    one_of,
    or_null,
)

__all__ = ["INSPECT", "INSPECT_TO_RESUME"]

COUNTS_BY_NAME = Kind(
    "an object of integers of at least 0",
    lambda value: isinstance(value, dict) and all(map(COUNT.holds, value.values())),
)
HISTOGRAM = object_of(
    {
        "zero": COUNT,
        "low": Kind("an exponent of float32", lambda v: type(v) is int and -149 <= v <= 127),
        "counts": Kind(
            "counts of exponents",
            lambda v: isinstance(v, list) and len(v) <= 277 and all(map(COUNT.holds, v)),
        ),
        "over": COUNT,
    }
)
HISTOGRAMS = Kind(
    "an object of histograms",
    lambda value: (
        isinstance(value, dict)
        and all(HISTOGRAM.holds(v) and v["low"] + len(v["counts"]) <= 128 for v in value.values())
    ),
)
SCALE = Kind(
    "a power of two that float32 holds",
    lambda value: ABOVE_ZERO.holds(value) and math.frexp(value)[0] == 0.5 and value < 2.0**127,
)
SCALES_BY_NAME = Kind(
    "an object of powers of two",
    lambda value: isinstance(value, dict) and all(map(SCALE.holds, value.values())),
)
# Base-2 logarithms: two to their power is a float.
LOGARITHMS = Kind(
    "an object of numbers from -1000 to 1000",
    lambda value: (
        isinstance(value, dict) and all(number(v) and abs(v) <= 1000 for v in value.values())
    ),
)
SHARES = or_null(object_of({"zero": NUMBER, "subnormal": NUMBER, "overflow": NUMBER}))


def _in_phase(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and COUNT.holds(value.get("overflows"))
        and all(SHARES.holds(value.get(kind)) for kind in ("activations", "weights"))
    )


IN_PHASE = Kind("what was counted in a phase", _in_phase)
LAYER = object_of({"name": TEXT, "before": IN_PHASE, "after": IN_PHASE})
LAYERS = Kind(
    "a list of layers", lambda value: isinstance(value, list) and all(map(LAYER.holds, value))
)

INSPECT: Mapping[str, Fields] = {
    "run": {
        "seed": SEED,
        "task": OBJECT,
        "task.name": TEXT,
        "task.sample": TEXT,
        "settings": OBJECT,
        "settings.batch_size": POSITIVE,
        "settings.steps": POSITIVE,
        "settings.budget_seconds": ABOVE_ZERO,
        "settings.device": one_of("auto", "cpu", "cuda"),
        "plan": OBJECT,
    },
    "part": {
        "phase": one_of("before", "search", "after"),
        "part": Kind("an integer from 0 to 7", lambda v: type(v) is int and 0 <= v < 8),
        "steps": COUNT,
        "samples": COUNT,
        "loss": NUMBER,
        "scales": LOGARITHMS,
        "scales.": NUMBER,
        "skipped": COUNT,
        "overflows": COUNTS_BY_NAME,
        "at_any_scale": COUNTS_BY_NAME,
        "overflowed_at": LOGARITHMS,
        "largest": OBJECT,
        "largest.activations": NUMBERS_BY_NAME,
        "largest.weights": NUMBERS_BY_NAME,
        "activations": HISTOGRAMS,
        "weights": HISTOGRAMS,
        "plain": OBJECT,
        "plain.activations": HISTOGRAMS,
        "plain.weights": HISTOGRAMS,
    },
    "phase": {"phase": one_of("before", "after"), "valid_loss": NUMBER},
    "proposal": {"loss_scale": SCALE, "layer_scales": SCALES_BY_NAME},
    "end": {"status": TEXT},
}

INSPECT_TO_RESUME: Mapping[str, Fields] = {
    "run": {
        "environment": OBJECT,
        "task.spec": TEXT,
        "task.provenance": OBJECT,
        "settings.lr": ABOVE_ZERO,
        "settings.lr_rule": TEXT,
        "settings.world_size": POSITIVE,
        "settings.threads": POSITIVE,
        "plan.batch_size": POSITIVE,
        "plan.valid_size": POSITIVE,
        "plan.steps": object_of({"before": POSITIVE, "search": POSITIVE, "after": POSITIVE}),
    },
    "summary": {
        "status": TEXT,
        "task": TEXT,
        "words": TEXTS,
        "layers": LAYERS,
    },
}
