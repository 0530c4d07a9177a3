"""The loss scale that gradients carry, as a gradient scaler knows it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["LossScale", "Scaler"]


class Scaler(Protocol):
    """The one method that is asked of a gradient scaler: multiply a tensor by its scale.

    One whose scales differ by layer has ``parameter_scales(parameters)`` too, which returns a
    function: the scale that each parameter's gradient carries when it is called.
    """

    def scale(self, outputs: Tensor) -> Tensor:
        """Multiplies by the loss scale, without waiting for the device."""


class LossScale:
    """Asks a gradient scaler for the scales of parameters' gradients; nothing waits.

    Args:
        scaler: The scaler; None: there is no loss scale.
        parameters: The measured parameters.
        device: Where the scales are used.
    """

    def __init__(
        self, scaler: Scaler | None, parameters: Sequence[nn.Parameter], device: torch.device
    ) -> None:
        self._scaler, self._device = scaler, device
        by_layer = getattr(scaler, "parameter_scales", None)
        self._carried: Callable[[], Tensor] | None = by_layer and by_layer(parameters)
        self.begin()

    def begin(self) -> None:
        """Starts a new step."""
        self._last: Tensor | float = 1.0
        self._told = False

    def of_part(self, told: Tensor | float | None) -> Tensor | float:
        """The scale of a part whose backward pass is over: as given, or the scaler's."""
        self._told = told is not None
        self._last = self._ask() if told is None else told
        return self._last

    def of_gradients(self, told: Tensor | float | None) -> Tensor | float:
        """The scale that is still in ``.grad``: as given, or the scaler's, or the last part's."""
        if told is not None:
            return told
        if self._carried is not None and not self._told:
            return self._ask()
        return self._last

    def _ask(self) -> Tensor | float:
        if self._scaler is None:
            return 1.0
        if self._carried is not None:
            return self._carried().to(self._device)
        # Through the public method: it hands out the scale without waiting for the device.
        return self._scaler.scale(torch.ones((), device=self._device))
