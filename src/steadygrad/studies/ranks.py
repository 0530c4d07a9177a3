"""The processes of one study: what they must agree on.

Every rank runs the same units on its slice of every batch. Only rank 0 reads the clock, writes
and prints; the others learn from it what they cannot know.
"""

import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad.sharding import World, gather_json, join_processes, leave_processes
from steadygrad.studies.stop import REASONS, Halt, Stop

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """This process among those that run one study.

    Args:
        stop: Asked at every poll.
        rank: Number of this process.
        size: Number of processes.
        device: Where collectives run.
    """

    def __init__(
        self, stop: Stop, *, rank: int = 0, size: int = 1, device: str | torch.device = "cpu"
    ) -> None:
        self.stop = stop
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._world = World("ddp" if size > 1 else "single", size=size)

    @classmethod
    def join(cls, stop: Stop, device: torch.device) -> "Ranks":
        """Joins the processes that ``torchrun`` started; alone without it."""
        rank, size, device = join_processes(device)
        return cls(stop, rank=rank, size=size, device=device)

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @staticmethod
    def first() -> bool:
        """Whether this is rank 0, or alone, for who has not joined the others."""
        return os.environ.get("RANK", "0") == "0"

    def leave(self) -> None:
        """Ends the process group. No barrier: a rank that failed is not waited for."""
        if self.size > 1:
            leave_processes()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Makes the backward pass average gradients over all ranks."""
        if self.size == 1:
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=devices)

    def share(self, indices: Tensor) -> Tensor:
        """This rank's equal slice of a global batch."""
        return indices.view(self.size, -1)[self.rank]

    def poll(self, value: float = 0.0) -> float:
        """Averages a number over the ranks, and ends them all when one has to stop.

        Raises:
            Halt: On every rank, if the budget is over (by rank 0's clock) or a signal came.
        """
        flags = self.stop.flags
        if self.size > 1:
            if not self.is_main:
                flags[-1] = 0.0
            packed = torch.tensor([value, *flags], dtype=torch.float64, device=self.device)
            total, *flags = self._world.sum(packed).tolist()
            value = total / self.size
        for reason, flag in zip(REASONS, flags, strict=True):
            if flag:
                raise Halt(int(reason))
        return value

    def together(self, work: Callable[[], T]) -> T:
        """Does something on every rank; fails on all of them if it fails on one.

        Raises:
            InputError: The first rank's that had one.
        """
        result, error = None, None
        try:
            result = work()
        except InputError as found:
            error = found
        failed = next((text for text in self.gather(str(error) if error else None) if text), None)
        if failed is not None:
            raise error or InputError(failed)
        return result  # type: ignore[return-value]

    def on_main(self, work: Callable[[], T]) -> T | None:
        """Does something on rank 0 only; None on the others, and an error is everybody's."""
        return self.together(lambda: work() if self.is_main else None)

    def gather(self, value: T) -> list[T]:
        """One JSON-like value from each rank, in order."""
        return gather_json(value, self._world, self.device)
