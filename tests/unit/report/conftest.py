"""A made-up but realistic `advise` run, whole or cut short, and a way to look at its page."""

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadygrad.record import Run, RunWriter, dumps, read_run

POINTS = [2_000, 6_000, 12_000, 24_000]
MULTIPLES = [1, 2, 4, 8, 16, 32]
BATCH, RATE, TOLERANCE = 8, 1e-3, 0.2
TRUTH = [110.0, 260.0, 480.0, 700.0]  # of the fitted critical batch size

HEADER: dict[str, Any] = {
    "study": "advise",
    "time": {"created": "2026-11-21T01:23:45+00:00"},
    "environment": {
        "python": "3.11.7",
        "steadygrad": "0.1.0",
        "torch": "2.13.0+cpu",
        "platform": "Linux-6.1-x86_64",
        "cpu": "AMD EPYC 7763",
        "cores": 2,
    },
    "seed": 0,
    "command": "steadygrad advise --budget 5m",
    "task": {
        "name": "char-lm",
        "sample": "sequence",
        "parameters": 254_720,
        "train_size": 180_000,
        "valid_size": 256,
        "provenance": {
            "corpus": "Python 3.11.7 standard library, 740 files",
            "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        },
    },
    "settings": {
        "batch_size": BATCH,
        "lr": RATE,
        "lr_rule": "sqrt",
        "tolerance": TOLERANCE,
        "budget_seconds": 300,
        "device": "cpu",
        "dtype": "float32",
        "world_size": 1,
    },
    "plan": {
        "points": POINTS,
        "branch_samples": [2048, 2048, 4096, 8192],
        "multiples": MULTIPLES,
        "repeats": 2,
    },
}


WORDS = [
    "Over a whole run, batches of 64 sequences cost at most 20% more sequences than those of 8.",
    "The critical batch size grew from 32 to 150 sequences, so a later part of the run bears 128.",
    "It was measured by branches; the gradient noise scale is a diagnostic here, and lies below.",
]


def loss_at(samples: float) -> float:
    return 1.2 + 14.0 * (samples + 300) ** -0.33


def critical_of(truth: float) -> float:
    """Batch size that needs `TOLERANCE` more samples than the smallest."""
    return TOLERANCE * (truth + BATCH) + BATCH


def branch_events(index: int, noise: random.Random) -> list[dict[str, Any]]:
    start, length = POINTS[index], HEADER["plan"]["branch_samples"][index]
    events = []
    for k in MULTIPLES:
        size = k * BATCH
        slower = (1 + size / TRUTH[index]) / (1 + BATCH / TRUTH[index])
        for repeat in range(2):
            shift = noise.gauss(0, 0.003)
            shares = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0) if k == 1 else (1.0,)
            curve = [[s * length, loss_at(start + s * length / slower) + shift] for s in shares]
            events.append(
                {
                    "point": index,
                    "multiple": k,
                    "repeat": repeat,
                    "batch_size": size,
                    "lr": RATE * math.sqrt(k),
                    "steps": length // size,
                    "samples": length,
                    "loss": curve[-1][1],
                    "curve": curve,
                }
            )
    return events


def noise_event(index: int) -> dict[str, Any]:
    value = [21.0, 35.0, math.nan, 96.0][index]
    low, high = [(15.0, 29.0), (22.0, 71.0), (41.0, math.inf), (52.0, 410.0)][index]
    return {
        "point": index,
        "value": value,
        "low": low,
        "high": high,
        "grad_sq_norm": [0.061, 0.021, -0.0004, 0.0041][index],
        "noise_trace": [1.28, 0.74, 0.55, 0.39][index],
        "resolved": math.isfinite(value),
        "measurements": 24,
        "samples": 24 * 64,
    }


def critical_event(index: int) -> dict[str, Any]:
    truth, value = TRUTH[index], critical_of(TRUTH[index])
    excess = {
        str(k * BATCH): (k * BATCH - BATCH) / (truth + BATCH) * (1.0 + 0.07 * (-1) ** k)
        for k in MULTIPLES
    }
    return {
        "point": index,
        "value": value,
        "low": value * 0.75,
        "high": value * 1.4,
        "at_edge": "",
        "fitted": truth,
        "fitted_low": truth * 0.8,
        "fitted_high": truth * 1.3,
        "excess": excess,
    }


def events(points: int = len(POINTS)) -> list[tuple[str, dict[str, Any]]]:
    """The events up to and including a point of training."""
    noise, found, seen = random.Random(0), [], 0
    for index in range(points):
        while seen < POINTS[index]:
            seen += 40
            fields = {"point": index, "samples": seen, "steps": seen // BATCH}
            found.append(("train", fields | {"loss": loss_at(seen) + noise.gauss(0, 0.09)}))
        at = {"point": index, "samples": seen, "steps": seen // BATCH}
        found.append(("point", at | {"valid_loss": loss_at(seen)}))
        found.append(("noise", noise_event(index)))
        found += [("branch", branch) for branch in branch_events(index, noise)]
        found.append(("critical", critical_event(index)))
    return found


def summary() -> dict[str, Any]:
    critical = TRUTH[-1]
    rows = [
        {"batch_size": k * BATCH, "steps_ratio": 1 + critical / (k * BATCH)}
        | {"samples_ratio": 1 + k * BATCH / critical}
        for k in MULTIPLES
    ]
    return {
        "schema": 1,
        "study": "advise",
        "status": "complete",
        "task": "char-lm",
        "sample": "sequence",
        "recommendation": {
            "batch_size": 64,
            "samples": 32_192,
            "low": 48,
            "high": 128,
            "lr": RATE * math.sqrt(8),
            "words": WORDS,
            "trust": "critical",
            "schedule": [
                {"from_samples": 0, "batch_size": 16, "lr": RATE * math.sqrt(2)},
                {"from_samples": 6_000, "batch_size": 64, "lr": RATE * math.sqrt(8)},
                {"from_samples": 24_000, "batch_size": 128, "lr": RATE * 4},
            ],
            "megatron": "0:16 6K:64 24K:128",
        },
        "points": [],
        "tradeoff": {"critical_batch": critical, "rows": rows},
    }


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Writes a run and reads it back.

    `points` cuts it short, `status=None` leaves out its end and its summary, and `edit` changes
    `(header, events, summary)` before they are written.
    """

    def make(points: int = len(POINTS), status: str | None = "complete", edit: Any = None) -> Run:
        header, found, total = _copy(HEADER), _copy(events(points)), summary()
        if edit is not None:
            edit(header, found, total)
        folder = tmp_path / "run"
        if folder.exists():
            shutil.rmtree(folder)
        with RunWriter.create(folder, header) as writer:
            if status is not None:
                found.append(("end", {"status": status}))
                writer.write_summary(total | {"status": status})
        # One write: `append` syncs each line, which takes seconds for a thousand.
        with open(folder / "record.jsonl", "a") as file:
            file.writelines(dumps({"event": name} | fields) + "\n" for name, fields in found)
        return read_run(folder)

    return make


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return value
