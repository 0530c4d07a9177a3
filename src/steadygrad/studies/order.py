"""Seeds, random generators and data orders: pure functions of the study's seed and of names."""

import random
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from steadygrad.studies.trials import seed_for


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
    """An endless sequence of sample numbers: epochs, each a permutation of all samples.

    Args:
        size: Number of samples.
        seed: The study's seed.
        stream: Name of the sequence; sequences with different names are independent.
        head: Sample numbers that come before the first epoch, int64 with shape ``(h,)``.
    """

    def __init__(self, size: int, seed: int, stream: str, head: Tensor | None = None) -> None:
        self.size, self._seed, self._stream = size, seed, stream
        self._head = torch.empty(0, dtype=torch.int64) if head is None else head
        self._epoch: tuple[int, Tensor] | None = None

    def take(self, start: int, count: int) -> Tensor:
        """The sample numbers at positions ``start`` to ``start + count``, shape ``(count,)``."""
        parts = [self._head[start : start + count]]
        while (left := count - sum(map(len, parts))) > 0:
            number, offset = divmod(start + count - left - len(self._head), self.size)
            parts.append(self.epoch(number)[offset : offset + left])
        return torch.cat(parts)

    def epoch(self, number: int) -> Tensor:
        """The permutation of one epoch, with shape ``(size,)``."""
        if self._epoch is None or self._epoch[0] != number:
            generator = torch.Generator().manual_seed(seed_for(self._seed, self._stream, number))
            self._epoch = number, torch.randperm(self.size, generator=generator)
        return self._epoch[1]


def main_order(size: int, seed: int, repeat: int = 0) -> Order:
    """The order of a run from scratch; repeat 0 is the main trajectory."""
    return Order(size, seed, f"main-{repeat}" if repeat else "main")


def branch_order(size: int, seed: int, *, seen: int, stream: str) -> Order:
    """An order that starts with the samples the main trajectory has not yet seen in its epoch.

    Training on samples already seen would lower the loss by memory, and measuring the gradient on
    them would find less noise than there is. ``seen`` is how many samples it has seen.
    """
    number, offset = divmod(seen, size)
    rest = main_order(size, seed).epoch(number)[offset:]
    generator = torch.Generator().manual_seed(seed_for(seed, stream, "head"))
    return Order(size, seed, stream, rest[torch.randperm(len(rest), generator=generator)])
