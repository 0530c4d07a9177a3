"""Moving averages that are exact from the first value on, kept as buffers."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from steadygrad._checks import check_number

__all__ = ["DoubleBuffers", "MovingAverage", "WideBuffers"]

M = TypeVar("M", bound="WideBuffers")


class WideBuffers(nn.Module):
    """A module whose own floating-point buffers are cast to nothing below float32.

    ``model.half()`` reaches every module inside the model. Sums of squares overflow float16, and
    an average over a thousand values needs more digits than bfloat16 has; so these buffers only
    move to the model's device.
    """

    # Bytes of the narrowest type that a cast may give.
    narrowest = 4

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        def wide(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            narrowed = applied.is_floating_point() and applied.dtype.itemsize < self.narrowest
            # The original, moved: casting back would not bring the digits back.
            return tensor.to(applied.device) if narrowed else applied

        super()._apply(wide, recurse)  # type: ignore[no-untyped-call]
        return self


class DoubleBuffers(WideBuffers):
    """A module whose own floating-point buffers stay float64, also under ``model.float()``."""

    narrowest = 8


class MovingAverage(WideBuffers):
    r"""Exponential moving average with exact bias correction.

    .. math:: x_t = (1-\alpha)\,x_{t-1} + \alpha v_t, \qquad
              m_t = (1-\alpha)\,m_{t-1} + \alpha, \qquad \bar v_t = x_t / m_t

    The mass :math:`m_t` is the sum of the weights given so far, so :math:`\bar v_1 = v_1`
    exactly and no warm-up bias remains; this also holds when :math:`\alpha` changes.

    Both numbers are float64 buffers: they follow ``.to(device)``, are saved by ``state_dict`` and
    are updated without a host sync. A model's ``.half()`` leaves them as they are.

    Args:
        update_rate: Weight :math:`\alpha` of a new value, in (0, 1].

    References:
        | Adam: A Method for Stochastic Optimization (Kingma and Ba, 2015), section 3
        | https://arxiv.org/abs/1412.6980
    """

    total: Tensor
    mass: Tensor

    def __init__(self, update_rate: float) -> None:
        super().__init__()
        self.update_rate = check_number("update_rate", update_rate, low=0, high=1, low_open=True)
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mass", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, value: Tensor, where: Tensor | None = None) -> None:
        """Takes in one value.

        Args:
            value: The new value, with shape ``()``; of any type.
            where: A boolean tensor with shape ``()``; where false nothing changes.
        """
        rate = torch.full_like(self.mass, self.update_rate)
        if where is not None:
            # A chosen rate of zero, not an `if`: reading `where` would wait for the device.
            rate = torch.where(where, rate, torch.zeros_like(rate))
            value = torch.where(where, value, torch.zeros_like(value))
        self.total.lerp_(value.to(self.total), rate)
        self.mass.lerp_(torch.ones_like(self.mass), rate)

    def value(self) -> Tensor:
        """The average so far, with shape ``()``; NaN before the first value."""
        return self.total / self.mass
