"""Plain numbers of the tools, by names that loggers sort into one group.

A number that is not finite is left out: the upper end of an open interval has no point on a chart.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.balance import LossBalancer
from steadygrad.noise import NoiseScale

__all__ = ["balancer_metrics", "noise_metrics", "optimizer_metrics"]


def finite(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Reads tensors with shape ``()``, waiting for their device once; keeps the finite ones."""
    numbers = _read(prefix, tensors)
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _read(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    if not tensors:
        return {}
    rows = torch.stack([t.detach().to(torch.float64) for t in tensors.values()]).tolist()
    return {f"{prefix}/{name}": row for name, row in zip(tensors, rows, strict=True)}


def noise_metrics(noise: NoiseScale, *, all_numbers: bool = False) -> dict[str, float]:
    """The noise scale with its interval, of the whole and by group; waits for the device.

    Args:
        noise: The estimator.
        all_numbers: Whether to keep numbers that are not finite, for a logger that would show a
            key's last number in their place.

    Returns:
        ``steadygrad/noise_scale/value``, ``low``, ``high``, ``grad_sq_norm``, ``noise_trace``,
        ``resolved``, ``drifting``, ``skipped``, ``altered``, and the values of several groups
        under ``by_group/``.
    """
    estimate = noise.estimate()
    names = ("value", "low", "high", "grad_sq_norm", "noise_trace", "resolved", "drifting")
    found = {name: getattr(estimate, name) for name in names}
    found |= {"skipped": noise.skipped, "altered": noise.altered}
    if len(estimate.by_group) > 1:
        found |= {f"by_group/{name}": group.value for name, group in estimate.by_group.items()}
    return (_read if all_numbers else finite)("steadygrad/noise_scale", found)


def balancer_metrics(balancer: LossBalancer) -> dict[str, float]:
    """:attr:`LossBalancer.metrics` under ``steadygrad/balancer/``; waits for the device."""
    return finite("steadygrad/balancer", balancer.metrics)


def optimizer_metrics(optimizers: Iterable[Any]) -> dict[str, float]:
    """``steadygrad/optimizer/skipped``: steps skipped by steadygrad's optimizers among these."""
    counts = [getattr(optimizer, "skipped", None) for optimizer in optimizers]
    skipped = [count for count in counts if isinstance(count, Tensor)]
    return finite(
        "steadygrad/optimizer", {"skipped": torch.stack(skipped).sum()} if skipped else {}
    )
