"""Facts for a record's header that only torch knows, and their comparison with a record's."""

import math
import os
from dataclasses import fields
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch

from steadygrad._checks import InputError
from steadygrad.studies.environment import environment
from steadygrad.studies.files import digests, located
from steadygrad.studies.folder import SCHEMA
from steadygrad.studies.schema import Header, Runtime, TaskInfo
from steadygrad.studies.study import Study
from steadygrad.studies.trainer import Trainer

__all__ = ["accelerator", "changes", "describe_task", "make_header"]


def describe_task(trainer: Trainer, spec: str) -> TaskInfo:
    """Describes a trainer's task, its model and its optimizer; ``spec`` names the task."""
    task, group = trainer.task, trainer.optimizer.param_groups[0]
    common = {field.name for field in fields(task)} & {*TaskInfo.__struct_fields__}
    values = {name: getattr(task, name) for name in common}
    return TaskInfo(
        **{**values, "provenance": dict(task.provenance)},
        spec=spec,
        dependent=trainer.dependent,
        parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        train_size=len(task.train),
        valid_size=len(task.valid),
        optimizer=type(trainer.optimizer).__name__,
        beta2=float(group["betas"][1]) if trainer.second_moment and "betas" in group else None,
        weight_decay=float(group["weight_decay"]) if "weight_decay" in group else None,
    )


def accelerator(device: torch.device) -> dict[str, Any]:
    """Describes the GPU that a study runs on; empty where it runs on none.

    Returns:
        ``gpu`` (its name), ``gpu_memory_bytes``, and ``cuda``, the version that torch was built
        with, or ``hip`` in its place.
    """
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    library = {"hip": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
    return {"gpu": found.name, "gpu_memory_bytes": found.total_memory, **library}


def make_header(
    kind: type[Study], settings: Any, trainer: Trainer, workers: int, plan: Any
) -> Header:
    """The first line of a new record; ``workers`` is the number that the plan was made for."""
    context = trainer.context
    header: Header = kind.schema().header(
        schema=SCHEMA,
        study=kind.name,
        task=describe_task(trainer, settings.task),
        settings=settings,
        plan=plan,
        runtime=Runtime(
            device=context.device.type,
            dtype=kind.dtype(settings),
            world_size=context.size,
            sharding=context.sharding,
            threads=torch.get_num_threads(),
            micro_batch_size=trainer.micro_batch_size,
            workers=workers,
        ),
        environment=environment(accelerator(context.device)),
        files=digests(located(settings)),
        first_losses=_first_losses(trainer),
        time={
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "folder": os.getcwd(),
        },
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
    """Warnings about changes that may alter the last digits when a run continues.

    Raises:
        InputError: If the study cannot continue to the same numbers at all.
    """
    then, now = header.task, describe_task(trainer, header.task.spec)
    for name in then.__struct_fields__:
        _check_same(name, getattr(then, name), getattr(now, name), "the task as it was")
    world = header.runtime.world_size, trainer.context.size
    _check_same("world_size", *world, "torchrun --nproc-per-node as before")
    before, after = header.environment, environment(accelerator(trainer.context.device))
    facts = {
        "torch": (before.get("torch"), after["torch"]),
        "the number of threads": (header.runtime.threads, torch.get_num_threads()),
        "the processor": (before.get("cpu"), after["cpu"]),
        "the GPU": (before.get("gpu"), after.get("gpu")),
    }
    # On another machine the last digits differ, and no more is known.
    if header.first_losses and all(old == new for old, new in facts.values()):
        losses = header.first_losses, trainer.first_losses()
        if not all(map(partial(math.isclose, rel_tol=1e-5, abs_tol=1e-9), *losses)):
            _check_same("losses before training", *losses, "the task and its data as they were")
    return [
        f"{what} was {old} and is {new}: the numbers may differ in the last digits."
        for what, (old, new) in facts.items()
        if old != new
    ]


def _check_same(name: str, then: Any, now: Any, remedy: str) -> None:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            _check_same(key, then.get(key), now.get(key), remedy)
    elif then != now:
        raise InputError(
            f"Expected {name} = {then!r} as in the record. Found {now!r}. "
            f"Remedy: {remedy}, or a new run with --out."
        )
