"""The gradient noise scale: how large a batch is worth its samples.

:class:`NoiseScale` reuses the gradients that training computes anyway.
:class:`SplitBatchNoiseScale` takes a tensor of per-sample losses and splits one batch.
:class:`BatchSizeController` turns estimates into a gradient-accumulation count.
"""

from steadygrad.formulas.schedule import BatchSizeSchedule
from steadygrad.noise.controller import BatchSizeController
from steadygrad.noise.estimate import NoiseEstimate
from steadygrad.noise.noise_scale import NoiseScale
from steadygrad.noise.split_batch import SplitBatchNoiseScale

__all__ = [
    "BatchSizeController",
    "BatchSizeSchedule",
    "NoiseEstimate",
    "NoiseScale",
    "SplitBatchNoiseScale",
]
