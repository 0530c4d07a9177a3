"""Typed runs for tests: one header and one result of each kind, with fields to change."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steadygrad.studies.advise import schema as advise
from steadygrad.studies.advise.schema import Branch, Noise, Plan, Settings
from steadygrad.studies.folder import (
    HEADER,
    Run,
    create,
    identity,
    read_run,
    write_result,
    write_summary,
)
from steadygrad.studies.schema import SCHEMA, Header, Result, Runtime, TaskInfo
from steadygrad.studies.trials import Trial

TASK = TaskInfo(
    spec="tiny_task.py:make_task",
    name="tiny",
    sample="row",
    batch_size=4,
    lr=0.001,
    lr_rule="sqrt",
    parameters=161,
    train_size=4096,
    valid_size=64,
    optimizer="AdamW",
    beta2=0.999,
    weight_decay=0.01,
    provenance={"corpus": "made up"},
)
RUNTIME = Runtime(
    device="cpu",
    dtype="float32",
    world_size=1,
    sharding="none",
    threads=1,
    micro_batch_size=64,
    workers=1,
)
PLAN = Plan(
    batch_size=4,
    samples=256,
    points=(64, 256),
    branch_samples=(96, 192),
    multiples=((1, 2, 4), (1, 2, 4)),
    noise_steps=(2, 2),
    repeats=2,
    seeds=3,
    samples_per_second=200.0,
    work=10_628,
)


def changed(value: Any, **fields: Any) -> Any:
    """A copy of a typed value with other fields."""
    return msgspec.structs.replace(value, **fields)


SMALL = changed(
    PLAN, samples=128, points=(64, 128), branch_samples=(64, 64), multiples=((1, 2), (1, 2))
)


def make_header(
    *,
    settings: Any = None,
    plan: Any = PLAN,
    task: TaskInfo = TASK,
    runtime: Runtime = RUNTIME,
    kind: type[Header] = advise.Header,
    study: str = "advise",
    **fields: Any,
) -> Header:
    """The header of a run; of an advise run unless ``kind`` and ``study`` say another."""
    common = {"schema": SCHEMA, "environment": {"torch": "2.13.0"}, "time": {"created": "then"}}
    parts = {"settings": settings or Settings(task=TASK.spec), "plan": plan}
    described = {"study": study, "task": task, "runtime": runtime}
    return kind(**{**common, **parts, **described, **fields})


def make_noise(point: int = 0, **fields: Any) -> Noise:
    numbers = {"value": 40.0, "low": 30.0, "high": 60.0, "grad_sq_norm": 0.5, "noise_trace": 20.0}
    counts = {"measurements": 8, "effective": 8.0, "samples": 256}
    return Noise(**{"point": point, "resolved": True, **numbers, **counts, **fields})


def make_branch(loss: float = 0.9, *, batch_size: int = 4, **fields: Any) -> Branch:
    known = {"point": 0, "repeat": 0, "lr": 0.001, "samples": 64, "curve": ()}
    steps = 64 // batch_size
    return Branch(**{"loss": loss, "batch_size": batch_size, "steps": steps, **known, **fields})


def job(number: int, loss: float | None = None) -> dict[str, Any]:
    return {"kind": "point", "point": number, "loss": loss}


def trial(number: int, *needs: int, cost: int = 10) -> Trial:
    keys = tuple(("point", need) for need in needs)
    return Trial(("point", number), cost, lambda results: job(number), f"trial {number}", keys)


def write(folder: Path, *results: Result, summary: dict[str, Any] | None = None) -> Run:
    """Writes a run, and reads it back."""
    with pytest.MonkeyPatch.context() as patch:
        # Waiting for the disk takes seconds.
        patch.setattr(os, "fsync", lambda handle: None)
        create(folder, make_header())
        for result in results:
            write_result(folder, result)
        if summary is not None:
            write_summary(folder, summary)
    return read_run(folder)


def rewrite(path: Path, change: Any) -> None:
    """Changes the content of a run's file."""
    fields = json.loads(path.read_bytes())
    change(fields)
    path.write_text(json.dumps(fields))


def rewrite_header(folder: Path, change: Any) -> None:
    """Changes the header of a run, whose results remain its own."""
    rewrite(folder / HEADER, change)
    for path in (folder / "results").glob("*.json"):
        rewrite(path, lambda fields: fields.update(run=identity(folder)))


def no_space(*_):
    raise OSError(28, "No space left on device")
