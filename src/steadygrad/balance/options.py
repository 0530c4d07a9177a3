"""Options of a balancer, the losses' weights, and the loss scale that losses carry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_choice, check_count, check_number, check_type
from steadygrad.balance.equations import norms_from_sums

__all__ = ["GradScale", "LossScale", "Options", "check_weights"]

# None, a number, a tensor of one, or a gradient scaler with a `scale` that waits for no device.
GradScale = Any


class LossScale(NamedTuple):
    """The loss scale and the accumulation divisor of one call's losses."""

    unscaling: Tensor | float  # removes loss scale and accumulation divisor from a gradient
    micro_batches: int  # in a step: the divisor
    # What a gradient scaler scaled, without which a pass is not the scaler's; None without one,
    # which would skip the step of an overflow.
    scaled: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """The options that :class:`LossBalancer` documents; its copies share them and the scaler."""

    balance_grads: bool
    total_norm: float
    ema_decay: float
    per_batch_item: bool
    eps: float
    batch_independent: bool
    lag: bool
    monitor: bool
    accumulation_steps: int
    grad_scale: GradScale = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("balance_grads", "per_batch_item", "batch_independent", "lag", "monitor"):
            check_type(name, getattr(self, name), bool, "True or False")
        check_number("total_norm", self.total_norm, low=0, low_open=True)
        check_number("ema_decay", self.ema_decay, low=0, high=1)
        check_number("eps", self.eps, low=0)
        check_count("accumulation_steps", self.accumulation_steps)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Options":
        return self

    def norms(self, sums: Tensor, items: Tensor, ranks: int) -> Tensor:
        """Computes the chosen norms, with shape ``(K,)``, from sums of ``ranks`` processes."""
        kind = {"per_item": self.per_batch_item, "batch_independent": self.batch_independent}
        return norms_from_sums(sums, items, ranks=ranks, **kind)

    def loss_scale(
        self, grad_scale: GradScale, accumulation_steps: int | None, device: torch.device
    ) -> LossScale:
        """Reads both, or the options in place of None. A tensor's value is not checked."""
        source = self.grad_scale if grad_scale is None else grad_scale
        steps = self.accumulation_steps if accumulation_steps is None else accumulation_steps
        check_count("accumulation_steps", steps)
        if isinstance(source, (int, float)):
            check_number("grad_scale", source, low=0, low_open=True)
            return LossScale(steps / source, steps)
        if isinstance(source, Tensor):
            return LossScale(steps / source.detach().to(device, torch.float64).reshape(()), steps)
        if source is None or not getattr(source, "is_enabled", lambda: True)():
            return LossScale(float(steps), steps)
        # The public method gives the scale without waiting for the device.
        scaled = source.scale(torch.ones((), device=device, requires_grad=True))
        return LossScale(steps / scaled.detach().double(), steps, scaled)


def check_weights(
    weights: Mapping[str, float], current: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Merges weights into the ``current`` ones, if any, whose names they must have."""
    merged = dict(current or {})
    check_type("weights", weights, Mapping, '{"l1": 1.0}')  # type: ignore[type-abstract]
    for name, weight in weights.items():
        if current is not None:
            check_choice("weights", name, current)
        elif "." in check_type("weights", name, str, "names of losses as keys"):
            raise InputError(
                "Parameter `weights` should have names without dots, which are keys of the saved "
                f"state. Found {name!r}. Remedy: {name.replace('.', '/')!r}."
            )
        merged[name] = float(check_number(f"weights[{name!r}]", weight, low=0))
    if not any(merged.values()):
        raise InputError(
            "Parameter `weights` should hold at least one positive weight. "
            f"Found {merged}. Remedy: give a loss a weight."
        )
    return merged
