"""What has changed between a record and the run that goes on with it."""

from collections.abc import Mapping
from typing import Any

import torch

from steadygrad._checks import InputError
from steadygrad.record import environment
from steadygrad.studies.engine import Engine
from steadygrad.tasks import describe

__all__ = ["changes"]


def changes(header: Mapping[str, Any], engine: Engine) -> list[str]:
    """What is not as it was, as warnings.

    Raises:
        InputError: If the study cannot go on to the same numbers at all.
    """
    task, settings = engine.task, header["settings"]
    then, now = header["task"]["provenance"], dict(task.provenance)
    if then != now:
        name = next(name for name in {**then, **now} if then.get(name) != now.get(name))
        raise InputError(
            f"The task's data should be those of the record, with {name} = {then.get(name)!r}. "
            f"Found {now.get(name)!r}. Remedy: the same data, or a new run with --out."
        )
    fixed = {"batch_size": task.batch_size, "lr": task.lr, "lr_rule": task.lr_rule}
    for name, value in {**fixed, "world_size": engine.ranks.size}.items():
        if settings[name] != value:
            remedy = "the task as it was" if name in fixed else "torchrun --nproc-per-node"
            raise InputError(
                f"Expected {name} = {settings[name]} as in the record. Found {value}. "
                f"Remedy: {remedy}, or a new run with --out."
            )
    recorded = header["task"]["parameters"]
    found = describe(task, engine.model)["parameters"]
    if recorded != found:
        raise InputError(
            f"Expected a model of {recorded} parameters as in the record. Found {found}. "
            "Remedy: the model as it was, or a new run with --out."
        )
    versions = header["environment"].get("torch"), environment().get("torch")
    threads = settings["threads"], torch.get_num_threads()
    return [
        f"{what} was {before} and is {after}: the numbers may differ in the last digits."
        for what, (before, after) in {"torch": versions, "the number of threads": threads}.items()
        if before != after
    ]
