"""What the losses of one call are: their names and weights, loss scale and micro-batches."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_choice, check_count, check_number

__all__ = [
    "GradScale",
    "LossContext",
    "check_losses_present",
    "check_metric_names",
    "check_names",
    "check_scale",
    "check_weights",
    "cosine_name",
    "present_losses",
]


class Scaler(Protocol):
    """Gradient scaler, of which only the method `scale` is used."""

    def scale(self, outputs: Tensor, /) -> Tensor:
        """Multiplies by the loss scale, without waiting for the device."""


GradScale = float | Tensor | Scaler


class LossContext(NamedTuple):
    """Loss scale and accumulation divisor of one call's losses.

    Attributes:
        grad_scale: Loss scale, or None. The value of a tensor is not checked: with zero every
            loss is left out as not finite.
        accumulation_steps: Number of micro-batches that the losses were divided by.
        skips: Whether the loss scale is a scaler's, which skips a step on a non-finite gradient.
    """

    grad_scale: Tensor | float | None
    accumulation_steps: int
    skips: bool = False

    @property
    def unscaling(self) -> Tensor | float:
        """Factor that removes the loss scale and the accumulation divisor from a gradient."""
        return self.accumulation_steps / (1.0 if self.grad_scale is None else self.grad_scale)

    @classmethod
    def read(
        cls, grad_scale: GradScale | None, accumulation_steps: int, device: torch.device
    ) -> "LossContext":
        """Checks both numbers and asks a scaler for its scale.

        Raises:
            InputError: If one of the two is out of its range.
        """
        check_count("accumulation_steps", accumulation_steps)
        scale = _scale_on(check_scale("grad_scale", grad_scale), device)
        skips = scale is not None and not isinstance(grad_scale, (int, float, Tensor))
        return cls(scale, accumulation_steps, skips)


def check_scale(name: str, source: GradScale | None) -> GradScale | None:
    """Returns a loss scale or scaler.

    Raises:
        InputError: If it is neither, or a number that is not positive.
    """
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


def _scale_on(source: GradScale | None, device: torch.device) -> Tensor | float | None:
    if source is None or isinstance(source, (int, float)):
        return source
    if isinstance(source, Tensor):
        return source.detach().to(device, torch.float64).reshape(())
    if not getattr(source, "is_enabled", lambda: True)():
        return None
    # The public method gives the scale without waiting for the device.
    return source.scale(torch.ones((), device=device)).detach().double()


def check_names(weights: Mapping[str, float]) -> Mapping[str, float]:
    """Returns the weights.

    Raises:
        InputError: If they are no mapping from names.
    """
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise InputError(
            f"Parameter `weights` should map names to numbers. Found {weights!r}. "
            'Remedy: {"l1": 1.0, "adv": 4.0}.'
        )
    return weights


def check_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Copies the weights.

    Raises:
        InputError: If it is no mapping of names to numbers of zero or more, or none is positive.
    """
    checked = {
        name: float(check_number(f"weights[{name!r}]", weight, low=0))
        for name, weight in check_names(weights).items()
    }
    if not any(checked.values()):
        raise InputError(
            "Parameter `weights` should hold at least one positive weight. "
            f"Found {dict(weights)}. Remedy: give a loss a weight."
        )
    return checked


def present_losses(losses: Mapping[str, Tensor | None], names: Sequence[str]) -> dict[str, Tensor]:
    """Returns the losses that are not None.

    Raises:
        InputError: If ``losses`` is no mapping, or a name is unknown.
    """
    if not isinstance(losses, Mapping):
        raise InputError(
            f"Parameter `losses` should map names to losses. Found a {type(losses).__name__}. "
            f"Remedy: {{{names[0]!r}: loss}}, with names out of {list(names)}."
        )
    for name in losses:
        check_choice("losses", name, names)
    return {name: loss for name, loss in losses.items() if loss is not None}


def check_losses_present(names: Sequence[str], weights: Mapping[str, float]) -> None:
    """Refuses a step of a single process in which there is nothing to do.

    Raises:
        InputError: If no loss is present or none of those present has a weight.
    """
    if any(weights[name] for name in names):
        return
    found = f"only {list(names)}, of weight zero" if names else "none"
    raise InputError(
        f"Parameter `losses` should hold a loss with a positive weight. Found {found}. "
        f"Remedy: one or more of {[n for n, w in weights.items() if w]}, or skip the step."
    )


def check_metric_names(names: Sequence[str]) -> None:
    """Refuses names of losses of which two pairs would share a metric.

    Raises:
        InputError: If there are such pairs.
    """
    counts = Counter(cosine_name(a, b) for a, b in combinations(names, 2))
    for a, b in combinations(names, 2):
        if counts[cosine_name(a, b)] > 1:
            raise InputError(
                "Parameter `monitor` should be False for these names of losses. Found "
                f"{counts[cosine_name(a, b)]} pairs whose metric would be {cosine_name(a, b)!r}. "
                f"Remedy: rename {a!r} or {b!r}."
            )


def cosine_name(a: str, b: str) -> str:
    """Names the metric of the angle between two losses' gradients."""
    return f"cosine_{a}_{b}"
