"""Typed records for tests: one header and one event of each kind, with fields to change."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steadygrad._checks import InputError
from steadygrad.studies.advise import schema as advise
from steadygrad.studies.advise.schema import Branch, Noise, Plan, Point, Scratch, Settings, Stage
from steadygrad.studies.folder import SCHEMA, RunWriter
from steadygrad.studies.schema import Header, Runtime, TaskInfo

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
    points=(128, 512),
    branch_samples=(64, 256),
    multiples=((1, 2, 4), (1, 2, 4, 8)),
    noise_steps=(8, 8),
    repeats=2,
    rates=True,
    seeds=2,
    candidates=1,
    samples_per_second=100.0,
    work=4096,
    span=4096,
)


def changed(value: Any, **fields: Any) -> Any:
    """A copy of a typed value with other fields."""
    return msgspec.structs.replace(value, **fields)


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
    """The first line of a record; of an advise record unless ``kind`` and ``study`` say another."""
    common = {"schema": SCHEMA, "environment": {"torch": "2.13.0"}, "time": {"created": "then"}}
    parts = {"settings": settings or Settings(task=TASK.spec), "plan": plan}
    described = {"study": study, "task": task, "runtime": runtime}
    return kind(**{**common, **parts, **described, **fields})


def make_point(point: int = 0, **fields: Any) -> Point:
    samples = PLAN.points[point]
    rest = {"curve": ((samples, 1.0),), "training": ((samples, 1.2),), "valid_loss": 1.0}
    return Point(**{"point": point, "samples": samples, "steps": samples // 4, **rest, **fields})


def make_noise(point: int = 0, **fields: Any) -> Noise:
    numbers = {"value": 40.0, "low": 30.0, "high": 60.0, "grad_sq_norm": 0.5, "noise_trace": 20.0}
    counts = {"measurements": 8, "effective": 8.0, "samples": 256}
    return Noise(**{"point": point, "resolved": True, **numbers, **counts, **fields})


def make_branch(loss: float = 0.9, *, batch_size: int = 4, **fields: Any) -> Branch:
    known = {"point": 0, "repeat": 0, "lr": 0.001, "samples": 64, "curve": ()}
    steps = 64 // batch_size
    return Branch(**{"loss": loss, "batch_size": batch_size, "steps": steps, **known, **fields})


def make_scratch(loss: float = 0.8, *, batch_size: int = 8, **fields: Any) -> Scratch:
    stages = (Stage(from_samples=0, batch_size=batch_size, lr=0.001),)
    known = {"purpose": "constant", "repeat": 0, "rate": 1.0, "warmup_samples": 0}
    run = {"steps": 512 // batch_size, "samples": 512, "curve": ((512, loss),), "stages": stages}
    return Scratch(**{"loss": loss, "batch_size": batch_size, **known, **run, **fields})


def write(folder: Path, *losses: float) -> bytes:
    """A record with one branch for each loss."""
    with RunWriter.create(folder, make_header()) as writer:
        for repeat, loss in enumerate(losses):
            writer.append(make_branch(loss, repeat=repeat))
    return (folder / "record.jsonl").read_bytes()


def with_checksums(lines: list[dict[str, Any]]) -> Iterator[bytes]:
    """Lines of a record as the format has them, written down here a second time on purpose."""
    crc = 0
    for fields in lines:
        text = json.dumps({k: v for k, v in fields.items() if k != "crc"})[:-1].encode()
        crc = zlib.crc32(text, crc)
        yield text + b', "crc": "%08x"}\n' % crc


def rewrite(folder: Path, number: int, change: Any) -> None:
    """Changes a line of a record, from 0, and the checksums from there on."""
    path = folder / "record.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    change(lines[number])
    path.write_bytes(b"".join(with_checksums(lines)))


def assert_one_line(error: pytest.ExceptionInfo[InputError], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


def strip_times(event: dict[str, Any]) -> dict[str, Any]:
    """Drops ``time``, in which all that may differ between equal runs lies."""
    return {name: value for name, value in event.items() if name != "time"}


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")
