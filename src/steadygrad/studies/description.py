"""Facts for a record's header that only torch knows."""

from typing import TYPE_CHECKING, Any

import torch

from steadygrad.record import TaskInfo

if TYPE_CHECKING:
    from steadygrad.studies.trainer import Trainer

__all__ = ["accelerator", "describe_task"]


def describe_task(trainer: "Trainer", spec: str) -> TaskInfo:
    """Describes a trainer's task, its model and its optimizer.

    Args:
        trainer: The trainer.
        spec: The text that names the task.
    """
    task, group = trainer.task, trainer.optimizer.param_groups[0]
    betas = group.get("betas")
    return TaskInfo(
        spec=spec,
        name=task.name,
        sample=task.sample,
        batch_size=task.batch_size,
        lr=task.lr,
        lr_rule=task.lr_rule,
        parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        train_size=len(task.train),
        valid_size=len(task.valid),
        optimizer=type(trainer.optimizer).__name__,
        beta2=float(betas[1]) if isinstance(betas, (tuple, list)) and len(betas) > 1 else None,
        weight_decay=float(group["weight_decay"]) if "weight_decay" in group else None,
        tokens_per_sample=task.tokens_per_sample,
        warmup_samples=task.warmup_samples,
        lr_decay=task.lr_decay,
        provenance=dict(task.provenance),
    )


def accelerator(device: torch.device) -> dict[str, Any]:
    """Describes the GPU that a study runs on; empty where it runs on none.

    Args:
        device: This process's device.

    Returns:
        ``gpu`` (its name), ``gpu_memory_bytes``, and ``cuda``, the version that torch was built
        with, or ``hip`` in its place.
    """
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    library = {"hip": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
    return {"gpu": found.name, "gpu_memory_bytes": found.total_memory, **library}
