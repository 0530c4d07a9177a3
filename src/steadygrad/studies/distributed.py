"""The processes that share one model: their agreement on batches, states, errors, and the end.

Every rank runs the same trials on its slice of every batch. Only rank 0 reads the clock, writes
and prints; it tells the others.
"""

import copy
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from steadygrad import shards
from steadygrad._checks import InputError
from steadygrad.distributed import World, gather_json, join_processes, leave_processes
from steadygrad.tasks import guarded

T = TypeVar("T")
StateDict = dict[str, Any]

# Seconds for the backend's threads to come to rest.
PAUSE = 0.25
BUDGET = 0
# In order of precedence: a signal is reported even when the budget is over as well.
REASONS = (signal.SIGTERM, signal.SIGINT, BUDGET)


class StudyInterrupted(Exception):
    """Ends the trial in hand; ``reason`` is ``BUDGET``, or the signal's number."""

    def __init__(self, reason: int) -> None:
        super().__init__(reason)
        self.reason = reason


class Deadline:
    """Remembers that the study should end; the training loop asks between optimizer steps.

    The budget counts from ``began``, a reading of ``time.monotonic()``. Default: now. A worker's is
    over when the file ``stop`` is there.
    """

    def __init__(self, began: float | None = None, stop: Path | None = None) -> None:
        self._began = time.monotonic() if began is None else began
        self._deadline = math.inf
        self._stop, self._signal = stop, 0

    def limit(self, seconds: float) -> None:
        """Sets the budget. Before that there is none."""
        self._deadline = self._began + seconds

    def left(self) -> float:
        """Seconds of the budget that are left; infinite before there is one."""
        return self._deadline - time.monotonic()

    @property
    def flags(self) -> list[float]:
        """1.0 for each of ``REASONS`` that holds."""
        late = self.left() <= 0 or (self._stop is not None and self._stop.exists())
        return [float(self._signal == reason if reason else late) for reason in REASONS]

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM meanwhile; the second one of a kind ends the process."""
        # Python lets only the main thread handle signals.
        in_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if in_main else ()
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)


def on_host(state: StateDict) -> StateDict:
    """A copy of a state in the host's memory: a step changes the original in place."""

    def copied(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, Tensor)
        return leaf.detach().to("cpu", copy=True) if is_tensor else copy.deepcopy(leaf)

    return {name: tree_map(copied, value) for name, value in state.items()}


class DistributedContext:
    """This process, of number ``rank``, in the group that shares one model.

    By ``"ddp"`` every rank keeps the whole model, by ``"fsdp2"`` a shard of it.
    """

    def __init__(
        self,
        deadline: Deadline,
        *,
        rank: int = 0,
        size: int = 1,
        device: str | torch.device = "cpu",
        sharding: str = "ddp",
    ) -> None:
        self.deadline = deadline
        self.rank, self.size = rank, size
        self.is_main = rank == 0  # writes and prints
        self.device = torch.device(device)
        self.sharding = sharding if size > 1 else "none"
        self._world = World(size=size)

    @classmethod
    @contextmanager
    def joined(
        cls, deadline: Deadline, device: torch.device, sharding: str = "ddp"
    ) -> Iterator["DistributedContext"]:
        """Among the processes that ``torchrun`` started, and alone without it.

        There is no barrier at the end: a rank that failed is not waited for.
        """
        rank, size, device = join_processes(device)
        try:
            yield cls(deadline, rank=rank, size=size, device=device, sharding=sharding)
        finally:
            if size > 1:
                # Ending the group waits, with Python's lock held, for the backend's threads; those
                # may need the lock to let go of the last exchange's tensors.
                time.sleep(PAUSE)
                leave_processes()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Makes the backward pass average gradients over all ranks, and shards the model."""
        if self.sharding == "ddp":
            devices = [self.device.index] if self.device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(model, device_ids=devices)
        if self.sharding == "fsdp2":
            shards.shard_model(model)
        return model

    def averaging(self, wrapped: Any, enabled: bool) -> AbstractContextManager[None]:
        """Whether a backward pass of a wrapped model exchanges gradients."""
        if self.sharding == "fsdp2":
            wrapped.set_requires_gradient_sync(enabled)
        alone: AbstractContextManager[None] = nullcontext()
        return wrapped.no_sync() if self.sharding == "ddp" and not enabled else alone

    @guarded("The state_dict of model and optimizer")
    def states(self, model: nn.Module, optimizer: Optimizer) -> tuple[StateDict, StateDict]:
        """State dicts with whole tensors on every rank."""
        if self.sharding == "fsdp2":
            return shards.whole_states(model, optimizer)
        return model.state_dict(), optimizer.state_dict()

    @guarded("The load_state_dict of the model")
    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Loads a state dict with whole tensors."""
        if self.sharding == "fsdp2":
            shards.load_model_state(model, state)
        else:
            model.load_state_dict(state)

    @guarded("The load_state_dict of the optimizer")
    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Loads a state dict with whole tensors; the state is not changed, now or later."""
        if self.sharding == "fsdp2":
            shards.load_optimizer_state(model, optimizer, state)
        else:
            optimizer.load_state_dict(copy.deepcopy(state))

    def share(self, indices: Tensor) -> Tensor:
        """This rank's equal slice of a global batch."""
        return indices.view(self.size, len(indices) // self.size)[self.rank]

    def poll(self, values: Sequence[float] = ()) -> list[float]:
        """Averages numbers over the ranks; ends all by rank 0's clock, or a signal to one."""
        flags = self.deadline.flags
        if not self.is_main:
            flags[-1] = 0.0
        found = self.sum([*flags, *values])
        for reason, flag in zip(REASONS, found, strict=False):
            if flag:
                raise StudyInterrupted(int(reason))
        return [value / self.size for value in found[len(flags) :]]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Adds up numbers over the ranks."""
        if self.size == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        found: list[float] = self._world.sum(packed).tolist()
        return found

    def together(self, work: Callable[[], T]) -> T:
        """Does something on every rank; fails on all of them if it fails on one."""
        result, error = None, None
        try:
            result = work()
        except InputError as found:
            error = found
        for text in self.gather(str(error) if error else None):
            if text:
                raise error or InputError(text)
        return result  # type: ignore[return-value]

    def on_main(self, work: Callable[[], T]) -> T | None:
        """Does something on rank 0 only; None on the others, and an error is everybody's."""
        return self.together(lambda: work() if self.is_main else None)

    def gather(self, value: T) -> list[T]:
        """One JSON-like value from each rank, in order."""
        return gather_json(value, self._world, self.device)
