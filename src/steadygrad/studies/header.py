"""The header of a run: what it says of the task and the machine, and whether that has changed."""

import math
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from steadygrad import __version__
from steadygrad._checks import InputError
from steadygrad._studies import module_of
from steadygrad.studies.files import digests
from steadygrad.studies.schema import SCHEMA, Header, Runtime, TaskInfo
from steadygrad.studies.trainer import Trainer


def cores() -> int:
    """Number of the machine's cores that this process may use."""
    with suppress(AttributeError):  # absent on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """The machine's memory; None where it is not known, as on Windows."""
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def environment(device: torch.device) -> dict[str, Any]:
    """Machine and versions that a run is measured with."""
    found = {
        "python": platform.python_version(),
        "steadygrad": __version__,
        "torch": str(torch.__version__),  # with the build, such as +cu130
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory}
    return found


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def describe_task(trainer: Trainer, spec: str) -> TaskInfo:
    """Describes a trainer's task, its model and its optimizer; ``spec`` names the task."""
    task, group = trainer.task, trainer.optimizer.param_groups[0]
    common = {field.name for field in fields(task)} & {*TaskInfo.__struct_fields__}
    values = {name: getattr(task, name) for name in common}
    start = {"Task.start": trainer.start_digest} if trainer.start_digest else {}
    return TaskInfo(
        **{**values, "provenance": {**task.provenance, **start}},
        spec=spec,
        dependent=trainer.dependent,
        parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        train_size=len(task.train),
        valid_size=len(task.valid),
        optimizer=type(trainer.optimizer).__name__,
        beta2=float(group["betas"][1]) if trainer.second_moment and "betas" in group else None,
        weight_decay=float(group["weight_decay"]) if "weight_decay" in group else None,
    )


def make_header(
    study: str,
    settings: Any,
    trainer: Trainer,
    *,
    plan: Any,
    workers: int,
    files: Mapping[str, str],
) -> Header:
    """The header of a new run; ``workers`` is the number that the plan was made for."""
    context = trainer.context
    runtime = Runtime(
        device=context.device.type,
        dtype=str(trainer.dtype).removeprefix("torch."),
        world_size=context.size,
        sharding=context.sharding,
        threads=torch.get_num_threads(),
        micro_batch_size=trainer.micro_batch_size,
        workers=workers,
    )
    created = datetime.now(timezone.utc).isoformat(timespec="microseconds")
    header: Header = module_of(study, "schema").Header(
        schema=SCHEMA,
        study=study,
        task=describe_task(trainer, settings.task),
        settings=settings,
        plan=plan,
        runtime=runtime,
        environment=environment(context.device),
        files=digests(files),
        first_losses=_first_losses(trainer),
        first_value=trainer.evaluate() if trainer.task.evaluate else None,
        time={"created": created, "folder": os.getcwd()},
    )
    return header


def _first_losses(trainer: Trainer) -> tuple[float, ...]:
    """The losses before training, if a model that is made anew has them again."""
    found = []
    for _ in range(2):
        found.append(trainer.first_losses())
        trainer.restart()
    return found[0] if found[0] == found[1] else ()


def changes(header: Header, trainer: Trainer) -> list[str]:
    """Warnings about changes that may alter the last digits; refuses those that alter more."""
    then, now = header.task, describe_task(trainer, header.task.spec)
    for name in then.__struct_fields__:
        _check_same(name, getattr(then, name), getattr(now, name), "the task as it was")
    world = header.runtime.world_size, trainer.context.size
    _check_same("world_size", *world, "torchrun --nproc-per-node as before")
    before, after = header.environment, environment(trainer.context.device)
    names = {"torch": "torch", "cpu": "the processor", "gpu": "the GPU"}
    changed = [
        f"{text} was {before.get(name)} and is {after.get(name)}: the numbers may differ in the "
        "last digits."
        for name, text in names.items()
        if before.get(name) != after.get(name)
    ]
    # On another machine the last digits differ, and no more is known.
    if header.first_losses and not changed:
        losses = header.first_losses, trainer.first_losses()
        if not all(map(partial(math.isclose, rel_tol=1e-5, abs_tol=1e-9), *losses)):
            _check_same("losses before training", *losses, "the task and its data as they were")
    return changed


def _check_same(name: str, then: Any, now: Any, remedy: str) -> None:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            _check_same(key, then.get(key), now.get(key), remedy)
    elif then != now:
        raise InputError(
            f"Expected {name} = {then!r} as in the record. Found {now!r}. "
            f"Remedy: {remedy}, or a new run with --out."
        )
