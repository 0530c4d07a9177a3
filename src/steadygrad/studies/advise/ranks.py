"""The processes of one study: what they must agree on.

Every rank runs the same units on its slice of every batch. Only rank 0 reads the clock, writes
and prints; the others learn from it what they cannot know.
"""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad.studies.advise.stop import REASONS, Halt, Stop

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

    @classmethod
    def join(cls, stop: Stop, device: torch.device) -> "Ranks":
        """Joins the processes that ``torchrun`` started; alone without it."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(stop, device=device)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            # A rank that died without closing its sockets must not hold the others for long.
            dist.init_process_group(backend, timeout=timedelta(minutes=5))
        return cls(stop, rank=dist.get_rank(), size=size, device=device)

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def leave(self) -> None:
        """Ends the process group. No barrier: a rank that failed is not waited for."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

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
            dist.all_reduce(packed)
            total, *flags = packed.tolist()
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
        if self.size == 1:
            return [value]
        # JSON, not torch's object collectives: those unpickle what a peer sends.
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self._all_gather(torch.tensor([len(text)], device=self.device))
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(text)] = text.to(self.device)
        texts = self._all_gather(padded)
        pairs = zip(texts, lengths, strict=True)
        return [json.loads(bytes(text[: int(length)].tolist())) for text, length in pairs]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts
