"""What a study trains: the :class:`Task` protocol and built-in tasks on real data."""

from steadygrad.tasks.guard import TaskError, guarded
from steadygrad.tasks.losses import check_losses, mean_loss
from steadygrad.tasks.registry import BUILT_IN, TaskFactoryError, load_task
from steadygrad.tasks.samples import Samples, TensorSamples, place
from steadygrad.tasks.task import Task, describe

__all__ = [
    "BUILT_IN",
    "Samples",
    "Task",
    "TaskError",
    "TaskFactoryError",
    "TensorSamples",
    "check_losses",
    "describe",
    "guarded",
    "load_task",
    "mean_loss",
    "place",
]
