"""Float32 masters of 16-bit parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from steadygrad.sharding import local

__all__ = ["MASTER", "Masters"]

MASTER = "master_weight"


class Masters:
    """Keeps masters in step with parameters that somebody else may write to.

    A master holds the digits that a 16-bit weight cannot. When weights are loaded into the model
    later, or swapped for their average and back, the master must follow. Every write raises a
    tensor's version, which the host knows without asking the device; where it is not the one this
    class has left, elements that no longer are their master's rounding take the parameter's value.
    """

    def __init__(self) -> None:
        self._versions = WeakTensorKeyDictionary()

    @staticmethod
    def wanted(parameter: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether a parameter has a master."""
        narrow = parameter.dtype in (torch.float16, torch.bfloat16)
        return narrow and group["master_weights"] is not False

    def forget(self) -> None:
        """Looks at every element next time, as after a load."""
        self._versions = WeakTensorKeyDictionary()

    def weight(self, parameter: Tensor, state: Mapping[str, Any]) -> Tensor:
        """What a step works on: this process's part of the master, or of the parameter."""
        own = local(parameter.detach())
        if MASTER not in state:
            return own
        master = local(state[MASTER])
        version = self._version(own)
        if version is None or self._versions.get(parameter) != version:
            self.follow(own, master)
        return master

    @staticmethod
    def follow(own: Tensor, master: Tensor) -> None:
        """Elements that are no longer their master's rounding become their master."""
        master.copy_(torch.where(master.to(own.dtype) == own, master, own.to(master.dtype)))

    def write_back(self, parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Rounds masters to their parameters."""
        for parameter, weight in zip(parameters, weights, strict=True):
            own = local(parameter.detach())
            if own.dtype != weight.dtype:
                own.copy_(weight)
                self._versions[parameter] = self._version(own)

    @staticmethod
    def _version(own: Tensor) -> int | None:
        # A compiled step cannot know it, and looks every time.
        return None if torch.compiler.is_compiling() else own._version
