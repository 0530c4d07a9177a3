"""Tasks that a study trains: the :class:`Task` protocol and built-in tasks on real data."""

from steadygrad.tasks.guard import TaskError, guarded, is_out_of_memory
from steadygrad.tasks.loading import batches
from steadygrad.tasks.losses import check_losses, evaluating, mean_loss
from steadygrad.tasks.made import check_model
from steadygrad.tasks.registry import BUILT_IN, load_function, load_task, sources
from steadygrad.tasks.samples import Samples, TensorSamples, to_device
from steadygrad.tasks.task import Task

__all__ = [
    "BUILT_IN",
    "Samples",
    "Task",
    "TaskError",
    "TensorSamples",
    "batches",
    "check_losses",
    "check_model",
    "evaluating",
    "guarded",
    "is_out_of_memory",
    "load_function",
    "load_task",
    "mean_loss",
    "sources",
    "to_device",
]
