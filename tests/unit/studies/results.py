"""Typed runs for tests: one header and one result of each kind, with fields to change."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steadygrad.studies.advise import schema as advise
from steadygrad.studies.advise.schema import Noise, NoiseAt, Plan, Settings
from steadygrad.studies.folder import (
    HEADER,
    Run,
    create,
    identity,
    read_run,
    write_result,
    write_summary,
)
from steadygrad.studies.schema import SCHEMA, Header, Result, Runtime, TaskInfo, Training, Trial

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
PLAN = Plan(arms=(4, 6, 8, 16), samples=256, seeds=4, work=10_628)


def changed(value: Any, **fields: Any) -> Any:
    """A copy of a typed value with other fields."""
    return msgspec.structs.replace(value, **fields)


SMALL = changed(PLAN, arms=(4, 8), samples=128)


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


def make_noise(value: float = 40.0, samples: int = 256) -> Noise:
    numbers = {"low": 30.0, "high": 60.0, "grad_sq_norm": 0.5, "noise_trace": 20.0}
    at = NoiseAt(samples=samples, value=value, resolved=True, measurements=8, **numbers)
    return Noise(samples=samples, points=(at,))


def make_training(loss: float = 0.9, *, arm: int = 0, seed: int = 0, **fields: Any) -> Training:
    known = {"samples": 256, "step": 0.0, "lr": 0.001, "curve": ((256.0, loss),)}
    return Training(**{"loss": loss, "arm": arm, "seed": seed, **known, **fields})


def trial(number: int, cost: int = 10) -> Trial:
    """One that gives a training of an arm, over as many samples as it costs."""
    return Trial(("training", number, cost, 0.0, 0), cost, f"trial {number}")


def write(folder: Path, *results: Result, summary: dict[str, Any] | None = None) -> Run:
    """Writes a run, and reads it back."""
    with pytest.MonkeyPatch.context() as patch:
        # Waiting for the disk takes seconds.
        patch.setattr(os, "fsync", lambda handle: None)
        create(folder, make_header())
        for result in results:
            write_result(folder, result, identity(folder))
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
