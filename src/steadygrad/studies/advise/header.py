"""The first line of a record: what a study is made with."""

from typing import Any

import torch

from steadygrad.record import environment
from steadygrad.studies.advise.plan import Plan
from steadygrad.studies.advise.settings import Settings
from steadygrad.studies.engine import Engine
from steadygrad.studies.hardware import accelerator
from steadygrad.tasks import describe

__all__ = ["make_header"]


def make_header(settings: Settings, engine: Engine, plan: Plan) -> dict[str, Any]:
    """The header of a new record."""
    task, ranks = engine.task, engine.ranks
    return {
        "study": "advise",
        "seed": settings.seed,
        "task": {**describe(task, engine.model), "spec": settings.task},
        "settings": {
            "batch_size": task.batch_size,
            "lr": task.lr,
            "lr_rule": task.lr_rule,
            "tolerance": settings.tolerance,
            "budget_seconds": settings.budget_seconds,
            "device": ranks.device.type,
            "dtype": settings.dtype,
            "world_size": ranks.size,
            "threads": torch.get_num_threads(),
        },
        "plan": plan.as_dict(),
        "environment": environment(accelerator(ranks.device)),
    }
