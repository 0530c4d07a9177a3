"""What the lines of records must hold, in one table for each schema and study.

Who reads a checked record need not ask at every field whether it is there.
"""

from collections.abc import Mapping
from typing import Any

from steadygrad.record._fields_inspect import INSPECT, INSPECT_TO_RESUME
from steadygrad.record._kinds import (
    ABOVE_ZERO,
    COUNT,
    COUNTS,
    CURVE,
    FLAG,
    NUMBER,
    NUMBERS_BY_NAME,
    OBJECT,
    POSITIVE,
    SEED,
    TEXT,
    TEXTS,
    TOLERANCE,
    Fields,
    Kind,
    list_of,
    object_of,
    one_of,
    or_null,
)

__all__ = ["COLUMNS", "Fields", "fields_of"]

INTERVAL = {"value": NUMBER, "low": NUMBER, "high": NUMBER}
POINTS = Kind(
    "a list of points",
    lambda value: (
        isinstance(value, list)
        and all(
            object_of(
                {
                    "samples": COUNT,
                    "valid_loss": NUMBER,
                    "noise": or_null(object_of({**INTERVAL, "resolved": FLAG})),
                    "critical": or_null(object_of({**INTERVAL, "at_edge": TEXT})),
                }
            ).holds(point)
            for point in value
        )
    ),
)

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
        "settings.device": one_of("auto", "cpu", "cuda"),
        "settings.dtype": one_of("float32", "bfloat16", "float16", "float64"),
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
        "plan.multiples_by_point": list_of(COUNTS, "lists of integers of at least 1"),
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
        "recommendation.words": TEXTS,
        "points": POINTS,
    },
}

# By schema and study: a record of an older schema is checked by its own table.
TABLES: Mapping[tuple[int, str], tuple[Mapping[str, Fields], Mapping[str, Fields]]] = {
    (1, "advise"): (ADVISE, ADVISE_TO_RESUME),
    (1, "inspect"): (INSPECT, INSPECT_TO_RESUME),
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
