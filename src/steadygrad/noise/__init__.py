"""The gradient noise scale: how large a batch is worth its samples.

:class:`NoiseScale` reuses the gradients that training computes anyway.
:class:`SplitBatchNoiseScale` takes a tensor of per-sample losses and splits one batch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steadygrad.noise.estimate import NoiseEstimate as NoiseEstimate
    from steadygrad.noise.noise_scale import NoiseScale as NoiseScale
    from steadygrad.noise.schedule import BatchSizeSchedule as BatchSizeSchedule
    from steadygrad.noise.split_batch import SplitBatchNoiseScale as SplitBatchNoiseScale

# Loaded when first touched: pages and tasks read schedules and need no torch.
_HOMES = {
    "BatchSizeSchedule": "schedule",
    "NoiseEstimate": "estimate",
    "NoiseScale": "noise_scale",
    "SplitBatchNoiseScale": "split_batch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
