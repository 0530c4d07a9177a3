"""Moving averages that are exact from the first value on, as buffers; checks of saved states."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError, check_number, check_type, shown

M = TypeVar("M", bound="WideBuffers")
# Whole numbers up to here are exact in every type that counts are kept in.
_LARGEST_COUNT, _LARGEST = 2.0**53, sys.float_info.max


def check_state(
    name: str,
    given: Any,
    like: Any,
    *,
    low: float = -_LARGEST,
    high: float = _LARGEST,
    finite: bool = True,
    place: str = "",
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """Raises InputError unless a saved value has the form of ``like``, as the tool itself saves it.

    ``name`` is the argument's, ``place`` the value's within it, ``bounds`` are those of keys. A
    mapping has its keys, a list its length, a tensor its shape and kind. Numbers are finite (those
    in tensors need not be where ``finite`` is false) and within the bounds, whole ones not
    negative; texts are equal. A tool checks a whole state before it writes any of it.
    """
    parts, wanted, found = [], f"a {type(like).__name__}", given
    if isinstance(like, int) or (isinstance(like, Tensor) and not like.is_floating_point()):
        low, high = max(low, 0.0), min(high, _LARGEST_COUNT)
    if isinstance(like, Mapping):
        wanted, found = (
            f"a dict with the keys {[*like]}",
            [*given] if isinstance(given, Mapping) else given,
        )
        if fits := isinstance(given, Mapping) and {*given} == {*like}:
            parts = [(key, given[key], like[key]) for key in like]
    elif isinstance(like, (list, tuple)):
        wanted = f"a list of {len(like)}"
        if fits := isinstance(given, (list, tuple)) and len(given) == len(like):
            parts = [(i, *pair) for i, pair in enumerate(zip(given, like, strict=True))]
    elif isinstance(like, Tensor):
        wanted = f"a {like.dtype} tensor of shape {tuple(like.shape)}, in [{low:g}, {high:g}]"
        fits = isinstance(given, Tensor) and _is_like(given, like, low, high, finite)
    elif isinstance(like, (int, float)) and not isinstance(like, bool):
        wanted = f"a number like {like}, in [{low:g}, {high:g}]"
        fits = isinstance(given, int if isinstance(like, int) else (int, float))
        fits = fits and not isinstance(given, bool) and low <= given <= high
    else:
        wanted = repr(like) if isinstance(like, str) else wanted
        fits = type(given) is type(like) and (isinstance(like, bool) or given == like)
    if not fits:
        raise InputError(
            f"Expected `{name}`{' at ' * bool(place)}{place} to be {wanted}. Found {shown(found)}. "
            "Remedy: load an undamaged state_dict() of one that was made in the same way."
        )
    for key, part, own in parts:
        least, largest = (bounds or {}).get(key, (low, high))
        rest: dict[str, Any] = {"low": least, "high": largest, "finite": finite, "bounds": bounds}
        check_state(name, part, own, place=f"{place}[{key!r}]", **rest)


def _is_like(given: Tensor, like: Tensor, low: float, high: float, finite: bool) -> bool:
    """Whether a tensor has another's shape and kind, and values that can be saved ones."""
    if given.is_nested or given.is_quantized or given.layout is not torch.strided:
        return False
    kinds = [(x.is_floating_point(), x.is_complex(), x.dtype is torch.bool) for x in (given, like)]
    if given.shape != like.shape or kinds[0] != kinds[1]:
        return False
    if (
        given.is_meta
        or not given.numel()
        or like.dtype is torch.bool
        or (kinds[0][0] and not finite)
    ):
        return like.is_meta or not given.is_meta
    # In the type that it is kept in, where a larger number is infinite. NaN is within no bounds.
    least, largest = (float(x) for x in torch.aminmax(given.detach().to(like.dtype)))
    return low <= least <= largest <= high


class WideBuffers(nn.Module):
    """A module whose own floating-point buffers are cast to nothing below float32.

    ``model.half()`` reaches every module inside the model. Sums of squares overflow float16, and
    an average over a thousand values needs more digits than bfloat16 has; so these buffers only
    move to the model's device.
    """

    # Bytes of the narrowest type that a cast may give.
    narrowest = 4
    # Least and largest value of a buffer that has bounds.
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        def wide(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            narrowed = applied.is_floating_point() and applied.dtype.itemsize < self.narrowest
            # The original, moved: casting back would not bring the digits back.
            return tensor.to(applied.device) if narrowed else applied

        super()._apply(wide, recurse)  # type: ignore[no-untyped-call]
        return self

    def check_buffers(self, state: Mapping[str, Any], prefix: str) -> None:
        """Raises InputError if a saved state has buffers that cannot be this module's own."""
        for name, own in self._buffers.items():
            if own is not None and prefix + name in state:
                low, high = self.bounds.get(name, (-_LARGEST, _LARGEST))
                key = prefix + name
                check_state("state", state[key], own, low=low, high=high, place=f"[{key!r}]")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.check_buffers(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads buffers as torch does, and none of them unless all can be.

        Raises:
            InputError: If the state is of another module, or damaged.
        """
        check_type("state", state_dict, Mapping, "what state_dict() returned")  # type: ignore[type-abstract]
        if strict:
            own = self.state_dict()
            check_state("state", dict.fromkeys(state_dict), dict.fromkeys(own))
        for name, module in self.named_modules():
            if isinstance(module, WideBuffers):
                module.check_buffers(state_dict, f"{name}." if name else "")
        return super().load_state_dict(state_dict, strict, assign)


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

    bounds: ClassVar = {"mass": (0.0, 1.0)}
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
