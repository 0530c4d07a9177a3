"""Tasks that a study trains: the :class:`Task`, and built-in tasks on real data."""

from steadygrad.tasks.check import TaskError, guarded, is_out_of_memory
from steadygrad.tasks.load import BUILT_IN, load_function, load_task, sources
from steadygrad.tasks.samples import Samples, TensorSamples, batches, to_device
from steadygrad.tasks.task import Task, mean_loss

__all__ = [
    "BUILT_IN",
    "Samples",
    "Task",
    "TaskError",
    "TensorSamples",
    "batches",
    "guarded",
    "is_out_of_memory",
    "load_function",
    "load_task",
    "mean_loss",
    "sources",
    "to_device",
]
