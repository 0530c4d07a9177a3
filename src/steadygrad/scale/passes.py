"""Which backward passes are a scaler's own: those of losses that came from its ``scale``."""

from collections.abc import Callable
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Variable

__all__ = ["OwnPasses"]


class OwnPasses:
    """Tells whether a backward pass of one of the scaler's own losses is running.

    Other passes go through the boundaries too, as an actor's loss goes through its critic. Until
    a loss is scaled in this process, as on a pipeline's earlier stages, every pass counts as own.

    Args:
        forget: Forgets what was seen; called when others' passes may have counted as own.
        device: Device of the scales.

    Attributes:
        running: Whether such a pass is running.
        gate: The same as a tensor, for compiled code.
    """

    _without_loss: ClassVar["WeakSet[OwnPasses]"] = WeakSet()

    def __init__(self, forget: Callable[[], None], device: torch.device) -> None:
        self._forget, self.running = forget, True
        self.gate = torch.ones((), dtype=torch.bool, device=device)
        self._without_loss.add(self)

    def mark(self, loss: Tensor) -> None:
        """Makes the passes of a scaled loss the scaler's own."""
        while self._without_loss:
            other = self._without_loss.pop()
            other._set(False)
            other._forget()
        loss.register_hook(self._begin)

    def end(self) -> None:
        """Ends the pass; after an error in it nothing else does."""
        if self not in self._without_loss:
            self._set(False)

    def _begin(self, gradient: Tensor) -> None:
        # The loss's own node is the first one of its pass.
        self._set(True)
        Variable._execution_engine.queue_callback(self.end)  # type: ignore[attr-defined]

    def _set(self, running: bool) -> None:
        self.running = running
        # Without a new version: compiled code saves the tensor before the pass begins.
        self.gate.data.fill_(running)
