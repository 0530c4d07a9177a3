"""What the lines of a record must hold, in one table for each schema and study.

Who reads a checked record need not ask at every field whether it is there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["COLUMNS", "Fields", "Kind", "fields_of"]


@dataclass(frozen=True)
class Kind:
    """A kind of value: how to name it in a message, and how to tell it."""

    words: str
    holds: Callable[[Any], bool]


def _number(value: Any) -> bool:
    # Beyond that an integer is no float: arithmetic on it would fail.
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 62)


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < 1 << 62


def _list_of(kind: Kind, words: str) -> Kind:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and len(value) > 0 and all(map(kind.holds, value))

    return Kind(f"a list of {words}", holds)


def _object_of(fields: Mapping[str, Kind]) -> Kind:
    def holds(value: Any) -> bool:
        return isinstance(value, dict) and all(
            name in value and kind.holds(value[name]) for name, kind in fields.items()
        )

    return Kind(f"an object with {', '.join(fields)}", holds)


def _or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.holds(value))


def _one_of(*choices: str) -> Kind:
    return Kind(f"one of {', '.join(choices)}", lambda value: value in choices)


TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
NUMBER = Kind("a number", _number)
ABOVE_ZERO = Kind(
    "a finite number above 0", lambda value: _number(value) and value > 0 and math.isfinite(value)
)
TOLERANCE = Kind("a number from 0.01 to 1", lambda value: _number(value) and 0.01 <= value <= 1)
SEED = Kind("an integer of at least 0", lambda value: type(value) is int and value >= 0)
COUNT = Kind("an integer of at least 0", _whole(0))
POSITIVE = Kind("an integer of at least 1", _whole(1))
COUNTS = _list_of(POSITIVE, "integers of at least 1")
PAIR = Kind("a pair", lambda value: isinstance(value, list) and len(value) == 2)
CURVE = Kind(
    "a list of pairs of numbers",
    lambda value: (
        isinstance(value, list)
        and all(PAIR.holds(pair) and all(map(_number, pair)) for pair in value)
    ),
)
NUMBERS_BY_NAME = Kind(
    "an object of numbers",
    lambda value: isinstance(value, dict) and all(map(_number, value.values())),
)
INTERVAL = {"value": NUMBER, "low": NUMBER, "high": NUMBER}
POINTS = Kind(
    "a list of points",
    lambda value: (
        isinstance(value, list)
        and all(
            _object_of(
                {
                    "samples": COUNT,
                    "valid_loss": NUMBER,
                    "noise": _or_null(_object_of({**INTERVAL, "resolved": FLAG})),
                    "critical": _or_null(_object_of({**INTERVAL, "at_edge": TEXT})),
                }
            ).holds(point)
            for point in value
        )
    ),
)

Fields = Mapping[str, Kind]
"""Paths, such as ``"task.name"``, and what is there; an object comes before its fields."""

_AT = {"point": COUNT, "samples": COUNT, "steps": COUNT}

ADVISE: Mapping[str, Fields] = {
    "run": {
        "seed": SEED,
        "task": OBJECT,
        "task.name": TEXT,
        "task.sample": TEXT,
        "settings": OBJECT,
        "settings.batch_size": POSITIVE,
        "settings.lr": ABOVE_ZERO,
        "settings.lr_rule": TEXT,
        "settings.tolerance": TOLERANCE,
        "settings.budget_seconds": ABOVE_ZERO,
        "settings.device": _one_of("auto", "cpu", "cuda"),
        "settings.dtype": _one_of("float32", "bfloat16", "float16", "float64"),
        "settings.world_size": POSITIVE,
        "plan": OBJECT,
        "plan.points": COUNTS,
        "plan.branch_samples": COUNTS,
        "plan.repeats": POSITIVE,
    },
    "train": {**_AT, "loss": NUMBER},
    "point": {**_AT, "valid_loss": NUMBER},
    "noise": {
        "point": COUNT,
        **INTERVAL,
        "grad_sq_norm": NUMBER,
        "noise_trace": NUMBER,
        "resolved": FLAG,
        "measurements": COUNT,
        "samples": COUNT,
    },
    "branch": {
        "point": COUNT,
        "multiple": POSITIVE,
        "repeat": COUNT,
        "batch_size": POSITIVE,
        "lr": NUMBER,
        "steps": COUNT,
        "samples": POSITIVE,
        "loss": NUMBER,
        "curve": CURVE,
    },
    "critical": {
        "point": COUNT,
        **INTERVAL,
        "at_edge": TEXT,
        "fitted": NUMBER,
        "fitted_low": NUMBER,
        "fitted_high": NUMBER,
        "excess": NUMBERS_BY_NAME,
    },
    "end": {"status": TEXT},
}

# A page is drawn without these; going on is not possible.
ADVISE_TO_RESUME: Mapping[str, Fields] = {
    "run": {
        "environment": OBJECT,
        "task.spec": TEXT,
        "task.provenance": OBJECT,
        "settings.threads": POSITIVE,
        "plan.multiples_by_point": _list_of(COUNTS, "lists of integers of at least 1"),
        "plan.noise_steps": COUNTS,
        "plan.batch_size": POSITIVE,
        "plan.samples_per_second": ABOVE_ZERO,
        "plan.work": POSITIVE,
    },
    "summary": {
        "status": TEXT,
        "task": TEXT,
        "sample": TEXT,
        "recommendation": OBJECT,
        "recommendation.words": Kind(
            "a list of texts",
            lambda value: isinstance(value, list) and all(map(TEXT.holds, value)),
        ),
        "points": POINTS,
    },
}

# By schema and study: a record of an older schema is checked by its own table.
TABLES: Mapping[tuple[int, str], tuple[Mapping[str, Fields], Mapping[str, Fields]]] = {
    (1, "advise"): (ADVISE, ADVISE_TO_RESUME),
}
# One entry for each point of training.
COLUMNS = ("plan.points", "plan.branch_samples", "plan.multiples_by_point", "plan.noise_steps")


def fields_of(header: Mapping[str, Any], event: str, *, to_resume: bool = False) -> Fields:
    """What an event must hold, by the schema and the study that a header names.

    Args:
        header: A record's first line.
        event: ``"run"`` is the header itself, ``"summary"`` the content of ``summary.json``.
        to_resume: Also what only going on with the run needs.

    Returns:
        The fields; none for an event or a study that is not known.
    """
    study = header.get("study")
    key = (header["schema"], study if isinstance(study, str) else "")
    always, more = TABLES.get(key, ({}, {}))
    return {**always.get(event, {}), **(more.get(event, {}) if to_resume else {})}
