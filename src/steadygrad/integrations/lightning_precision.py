"""float16 with a loss scale for each layer, as a precision plugin for Lightning."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadygrad._checks import InputError
from steadygrad.integrations.extras import MissingExtraError
from steadygrad.scale import LayerwiseGradScaler

try:
    from lightning.pytorch.plugins.precision import MixedPrecision
except ImportError as error:
    raise MissingExtraError("lightning", "lightning") from error

__all__ = ["LayerwisePrecision"]


class LayerwisePrecision(MixedPrecision):
    """Mixed precision in float16 with a loss scale for each layer.

    .. code-block:: python

        scaler = partial(LayerwiseGradScaler, layer_scales={"model.blocks.*": 2**8})
        trainer = Trainer(plugins=[LayerwisePrecision(scaler)])     # without `precision`

    Args:
        scaler: A function from the LightningModule to a gradient scaler.
        device: Device type of autocast, and of the module.

    Raises:
        InputError: If the scaler is not a function, or the module is on another device.
    """

    scaler: Any

    def __init__(
        self, scaler: Callable[[nn.Module], Any] = LayerwiseGradScaler, device: str = "cuda"
    ) -> None:
        if not callable(scaler):
            raise InputError(
                "Parameter `scaler` should be a function from the module to a gradient scaler. "
                f"Found {scaler!r}. Remedy: LayerwiseGradScaler."
            )
        # A scaler that does nothing, until there is a model on its device.
        super().__init__("16-mixed", device, scaler=torch.amp.GradScaler(device, enabled=False))
        self._make = scaler
        self._model: nn.Module | None = None

    def connect(self, model: nn.Module, optimizers: Any, lr_schedulers: Any) -> Any:
        """Makes the scaler, another one for another model."""
        inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
        found = next((p.device.type for p in inner.parameters()), self.device)
        if found != self.device:
            raise InputError(
                f"Expected the module on {self.device!r}, where autocast is on. Found it on "
                f"{found!r}. Remedy: LayerwisePrecision(..., device={found!r})."
            )
        if inner is not self._model:
            getattr(self.scaler, "remove", lambda: None)()
            self.scaler, self._model = self._make(inner), inner
        return super().connect(model, optimizers, lr_schedulers)
