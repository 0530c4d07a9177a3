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
from steadygrad.numerics import exact


def noise_metrics(noise: NoiseScale, *, all_numbers: bool = False) -> dict[str, float]:
    """The noise scale with its interval, of the whole and by group; waits for the device.

    The names begin with ``steadygrad/noise_scale/``; values of several groups are under
    ``by_group/``. ``all_numbers``: also those that are not finite, for a logger that would show a
    key's last number in their place.
    """
    estimate = noise.estimate()
    names = ("value", "low", "high", "grad_sq_norm", "noise_trace", "resolved", "drifting")
    tensors = {name: getattr(estimate, name) for name in names}
    tensors |= {"skipped": noise.skipped, "altered": noise.altered}
    if len(estimate.by_group) > 1:
        tensors |= {f"by_group/{name}": group.value for name, group in estimate.by_group.items()}
    return _numbers("steadygrad/noise_scale", tensors, all_numbers)


def balancer_metrics(balancer: LossBalancer) -> dict[str, float]:
    """:attr:`LossBalancer.metrics` under ``steadygrad/balancer/``; waits for the device."""
    return _numbers("steadygrad/balancer", balancer.metrics)


def optimizer_metrics(optimizers: Iterable[Any]) -> dict[str, float]:
    """``steadygrad/optimizer/skipped``: steps skipped by steadygrad's optimizers among these."""
    counts = [getattr(optimizer, "skipped", None) for optimizer in optimizers]
    skipped = [count for count in counts if isinstance(count, Tensor)]
    total = {"skipped": torch.stack(skipped).sum()} if skipped else {}
    return _numbers("steadygrad/optimizer", total)


def _numbers(
    prefix: str, tensors: Mapping[str, Tensor], all_numbers: bool = False
) -> dict[str, float]:
    """Reads tensors with shape ``()``, waiting for their device once."""
    if not tensors:
        return {}
    rows = torch.stack([t.detach().to(exact(t.device)) for t in tensors.values()]).tolist()
    named = zip(tensors, rows, strict=True)
    return {f"{prefix}/{name}": x for name, x in named if all_numbers or math.isfinite(x)}
