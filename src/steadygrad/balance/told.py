"""What a loss carries besides itself: a loss scale, and a number of micro-batches."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_count, check_number

__all__ = ["GradScale", "Scaler", "Told", "check_scale"]


class Scaler(Protocol):
    """What is asked of a gradient scaler: to multiply a tensor by its scale."""

    def scale(self, outputs: Tensor, /) -> Tensor:
        """Multiplies by the loss scale, without waiting for the device."""


GradScale = float | Tensor | Scaler


class Told(NamedTuple):
    """What the losses carry.

    Attributes:
        grad_scale: Loss scale in them, or None if there is none. Of a tensor's value nothing is
            known here: with zero every loss is left out as not finite.
        accumulation_steps: The number they were divided by.
        skips: Whether a scaler watches, which skips a step with gradients that are not finite.
    """

    grad_scale: Tensor | float | None
    accumulation_steps: int
    skips: bool = False

    @property
    def factor(self) -> Tensor | float:
        """What a gradient is multiplied by to be one of losses that carry nothing."""
        return self.accumulation_steps / (1.0 if self.grad_scale is None else self.grad_scale)

    @classmethod
    def read(
        cls, grad_scale: GradScale | None, accumulation_steps: int, device: torch.device
    ) -> "Told":
        """Asks a scaler for its scale and checks numbers.

        Raises:
            InputError: If one of the two is out of its range.
        """
        check_count("accumulation_steps", accumulation_steps)
        scale = _scale_of(grad_scale, device)
        watched = scale is not None and not isinstance(grad_scale, (int, float, Tensor))
        return cls(scale, accumulation_steps, watched)


def check_scale(source: GradScale | None) -> GradScale | None:
    """Returns what tells a loss scale, if it can.

    Raises:
        InputError: If it cannot.
    """
    if isinstance(source, Tensor):
        if source.numel() != 1:
            raise InputError(
                "Parameter `grad_scale` should be one number. Found a tensor of shape "
                f"{tuple(source.shape)}. Remedy: `scaler`, or the factor on the loss."
            )
    elif isinstance(source, (int, float)):
        check_number("grad_scale", source, low=0, low_open=True)
    elif source is not None and not callable(getattr(source, "scale", None)):
        raise InputError(
            "Parameter `grad_scale` should be a number, a tensor or a gradient scaler. Found "
            f"a {type(source).__name__}. Remedy: a scaler has a method `scale`."
        )
    return source


def _scale_of(source: GradScale | None, device: torch.device) -> Tensor | float | None:
    source = check_scale(source)
    if source is None or isinstance(source, (int, float)):
        return source
    if isinstance(source, Tensor):
        return source.detach().to(device, torch.float64).reshape(())
    if not getattr(source, "is_enabled", lambda: True)():
        return None
    # Through the public method: it hands out the scale without waiting for the device.
    return source.scale(torch.ones((), device=device)).detach().double()
