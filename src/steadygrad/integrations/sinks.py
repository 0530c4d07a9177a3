"""Sinks for numbers: TensorBoard, Weights & Biases, or any logger of a dictionary at a step."""

from collections.abc import Mapping
from typing import Any

from steadygrad._checks import InputError

__all__ = ["log_to"]


def log_to(sink: Any, metrics: Mapping[str, float], step: int) -> None:
    """Writes numbers of one step.

    .. code-block:: python

        log_to(SummaryWriter("runs/1"), noise_metrics(noise), step)
        log_to(wandb.run, noise_metrics(noise), step)

    Args:
        sink: A ``SummaryWriter`` of TensorBoard; or an object or module with
            ``log(metrics, step=...)``, as W&B, Trackio and Accelerate have it, or with
            ``log_metrics(metrics, step=...)``, as MLflow and Lightning's loggers.
        metrics: Numbers by names, whose slashes sort charts into groups.
        step: Optimizer steps so far.

    Raises:
        InputError: If it has none of these methods.
    """
    if hasattr(sink, "add_scalar"):
        for name, value in metrics.items():
            sink.add_scalar(name, value, step)
        return
    write = getattr(sink, "log_metrics", None) or getattr(sink, "log", None)
    if not callable(write):
        raise InputError(
            "Parameter `sink` should have add_scalar, log or log_metrics. Found "
            f"{type(sink).__name__}. Remedy: a SummaryWriter, wandb.run, or a logger."
        )
    write(dict(metrics), step=step)
