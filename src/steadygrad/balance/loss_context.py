"""Options of a balancer, and names, weights and loss scale of the losses."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_choice, check_count, check_number
from steadygrad.formulas.balance import norms_from_sums

__all__ = [
    "BalancerOptions",
    "GradScale",
    "LossContext",
    "check_metric_names",
    "check_scale",
    "check_weights",
    "cosine_name",
    "present_losses",
]


class Scaler(Protocol):
    """Gradient scaler, which multiplies by its loss scale without waiting for the device."""

    def scale(self, outputs: Tensor, /) -> Tensor: ...


GradScale = float | Tensor | Scaler | None


@dataclass
class BalancerOptions:
    """Record of the options that :class:`LossBalancer` documents."""

    per_batch_item: bool
    batch_independent: bool
    balance_grads: bool = True
    total_norm: float = 1.0
    ema_decay: float = 0.999
    eps: float = 1e-12
    lag: bool = False
    monitor: bool = False
    grad_scale: GradScale = None
    accumulation_steps: int = 1

    def norms(self, sums: Tensor, items: Tensor, ranks: int) -> Tensor:
        """Computes the chosen norms from sums over items of ``ranks`` processes."""
        kind = {"per_item": self.per_batch_item, "batch_independent": self.batch_independent}
        return norms_from_sums(sums, items, ranks=ranks, **kind)

    def __deepcopy__(self, memo: dict[int, object]) -> "BalancerOptions":
        """Copies the record but shares the gradient scaler, as copies of a model do."""
        return copy.copy(self)


class LossContext(NamedTuple):
    """Loss scale and accumulation divisor of one call's losses.

    Attributes:
        grad_scale: Loss scale, or None. The value of a tensor is not checked: with zero every
            loss is left out as not finite.
        accumulation_steps: Number of micro-batches that the losses were divided by.
        skips: Whether the loss scale is a scaler's, which skips a step on a non-finite gradient.
        scaled: A number that the scaler scaled: a pass that it takes part in is the scaler's.
    """

    grad_scale: Tensor | float | None
    accumulation_steps: int
    skips: bool
    scaled: Tensor | None = None

    @property
    def unscaling(self) -> Tensor | float:
        """Factor that removes the loss scale and the accumulation divisor from a gradient."""
        return self.accumulation_steps / (1.0 if self.grad_scale is None else self.grad_scale)

    @classmethod
    def read(
        cls, source: GradScale, accumulation_steps: int, device: torch.device
    ) -> "LossContext":
        """Checks both numbers and asks a scaler for its scale."""
        check_count("accumulation_steps", accumulation_steps)
        check_scale("grad_scale", source)
        if source is None or isinstance(source, (int, float)):
            return cls(source, accumulation_steps, False)
        if isinstance(source, Tensor):
            scale = source.detach().to(device, torch.float64).reshape(())
            return cls(scale, accumulation_steps, False)
        if not getattr(source, "is_enabled", lambda: True)():
            return cls(None, accumulation_steps, False)
        # The public method gives the scale without waiting for the device.
        scaled = source.scale(torch.ones((), device=device, requires_grad=True))
        return cls(scaled.detach().double(), accumulation_steps, True, scaled)


def check_scale(name: str, source: GradScale) -> GradScale:
    """Refuses a value that is neither a positive loss scale nor a gradient scaler."""
    if isinstance(source, Tensor):
        if source.numel() != 1:
            raise InputError(
                f"Parameter `{name}` should be one number. Found a tensor of shape "
                f"{tuple(source.shape)}. Remedy: `scaler`, or the factor on the loss."
            )
    elif isinstance(source, (int, float)):
        check_number(name, source, low=0, low_open=True)
    elif source is not None and not callable(getattr(source, "scale", None)):
        raise InputError(
            f"Parameter `{name}` should be a number, a tensor or a gradient scaler. Found "
            f"a {type(source).__name__}. Remedy: a scaler has a method `scale`."
        )
    return source


def check_weights(
    weights: Mapping[str, float], current: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Merges weights into the ``current`` ones, if any, whose names they must have."""
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise InputError(
            f"Parameter `weights` should map names to numbers. Found {weights!r}. "
            'Remedy: {"l1": 1.0, "adv": 4.0}.'
        )
    merged = dict(current or {})
    for name, weight in weights.items():
        if current is not None:
            check_choice("weights", name, current)
        merged[name] = float(check_number(f"weights[{name!r}]", weight, low=0))
    if not any(merged.values()):
        raise InputError(
            "Parameter `weights` should hold at least one positive weight. "
            f"Found {merged}. Remedy: give a loss a weight."
        )
    return merged


def present_losses(
    losses: Mapping[str, Tensor | None], weights: Mapping[str, float], processes: int
) -> dict[str, Tensor]:
    """Returns the losses that are not None; a single process must have one with a weight."""
    if not isinstance(losses, Mapping):
        raise InputError(
            f"Parameter `losses` should map names to losses. Found a {type(losses).__name__}. "
            f"Remedy: {{{next(iter(weights))!r}: loss}}, with names out of {list(weights)}."
        )
    for name in losses:
        check_choice("losses", name, weights)
    present = {name: loss for name, loss in losses.items() if loss is not None}
    # Another process may have losses, and waits for this one.
    if processes == 1 and not any(weights[name] for name in present):
        found = f"only {list(present)}, of weight zero" if present else "none"
        raise InputError(
            f"Parameter `losses` should hold a loss with a positive weight. Found {found}. "
            f"Remedy: one or more of {[n for n, w in weights.items() if w]}, or skip the step."
        )
    return present


def check_metric_names(names: Sequence[str]) -> None:
    """Refuses names of losses of which two pairs would share a metric."""
    counts = Counter(cosine_name(a, b) for a, b in combinations(names, 2))
    for name, count in counts.most_common(1):
        if count > 1:
            raise InputError(
                "Parameter `monitor` should be False for these names of losses. Found "
                f"{count} pairs whose metric would be {name!r}. Remedy: rename one of these losses."
            )


def cosine_name(a: str, b: str) -> str:
    """Names the metric of the angle between two losses' gradients."""
    return f"cosine_{a}_{b}"
