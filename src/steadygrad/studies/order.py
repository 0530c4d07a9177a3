"""Seeds, random generators and data orders: pure functions of the study's seed and of names."""

import random
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from steadygrad.studies.schema import seed_for


def generators_kept(device: torch.device) -> ExitStack:
    """Puts Python's, numpy's and torch's generators back into their states when it is closed."""
    kept = ExitStack()
    kept.callback(random.setstate, random.getstate())
    kept.callback(np.random.set_state, np.random.get_state())
    own = [] if device.type == "cpu" else [torch.get_device_module(device)]
    for module in (torch, *own):
        kept.callback(module.set_rng_state, module.get_rng_state())
    return kept


class Order:
    """An endless sequence of sample numbers: epochs, each a permutation of all ``size`` samples.

    Sequences with different names, ``stream``, are independent.
    """

    def __init__(self, size: int, seed: int, stream: str = "main") -> None:
        self.size, self._seed, self._stream = size, seed, stream
        self._epoch: tuple[int, Tensor] | None = None

    def take(self, start: int, count: int) -> Tensor:
        """The sample numbers at positions ``start`` to ``start + count``, shape ``(count,)``."""
        first, offset = divmod(start, self.size)
        last = (start + count - 1) // self.size
        epochs = [self.epoch(number) for number in range(first, last + 1)]
        return torch.cat(epochs)[offset : offset + count]

    def epoch(self, number: int) -> Tensor:
        """The permutation of one epoch, with shape ``(size,)``."""
        if self._epoch is None or self._epoch[0] != number:
            generator = torch.Generator().manual_seed(seed_for(self._seed, self._stream, number))
            self._epoch = number, torch.randperm(self.size, generator=generator)
        return self._epoch[1]
