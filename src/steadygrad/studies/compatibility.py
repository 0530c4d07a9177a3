"""Comparison of a record with the task and the machine that go on with it."""

from typing import Any

import torch

from steadygrad._checks import InputError
from steadygrad.record import Header, environment
from steadygrad.studies.description import describe_task
from steadygrad.studies.trainer import Trainer

__all__ = ["changes"]

# Remedies for what must be as it was.
WORLD = "torchrun --nproc-per-node as before"
TASK = "the task as it was"


def changes(header: Header, trainer: Trainer) -> list[str]:
    """Warnings about what may change the last digits.

    Raises:
        InputError: If the study cannot go on to the same numbers at all.
    """
    then, now = header.task, describe_task(trainer, header.task.spec)
    for name in then.__struct_fields__:
        _check_same(name, getattr(then, name), getattr(now, name), TASK)
    _check_same("world_size", header.runtime.world_size, trainer.context.size, WORLD)
    versions = header.environment.get("torch"), environment().get("torch")
    threads = header.runtime.threads, torch.get_num_threads()
    cores = header.environment.get("cpu"), environment().get("cpu")
    facts = {"torch": versions, "the number of threads": threads, "the processor": cores}
    return [
        f"{what} was {before} and is {after}: the numbers may differ in the last digits."
        for what, (before, after) in facts.items()
        if before != after
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
