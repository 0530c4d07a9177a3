"""Options of layers: first scale and growth rule, or scales that follow measured exponents."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from steadygrad._checks import InputError, check_count, check_number, check_type

__all__ = ["AutoScale", "LayerScale", "check_layer_scales", "check_scale"]


@dataclass(frozen=True)
class LayerScale:
    """Sets the first scale of a layer and its growth rule; None means the scaler's value.

    Attributes:
        scale: First scale.
        growth_factor: Multiplies it after ``growth_interval`` finite steps in a row; 1: fixed.
        backoff_factor: Multiplies it after a step that was not finite in this layer; 1: fixed.
        growth_interval: Number of steps.
        min_scale: Least scale.
        max_scale: Largest scale.
    """

    scale: float
    growth_factor: float | None = None
    backoff_factor: float | None = None
    growth_interval: int | None = None
    min_scale: float | None = None
    max_scale: float | None = None

    def with_defaults(self, rule: "LayerScale") -> "LayerScale":
        """Replaces each None by the value of another rule."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(rule, **given).checked()

    def checked(self) -> "LayerScale":
        """Checks that all values are in range, and returns this rule."""
        given = asdict(self)
        check_number("growth_factor", given["growth_factor"], low=1)
        check_number("backoff_factor", given["backoff_factor"], low=0, high=1, low_open=True)
        check_count("growth_interval", given["growth_interval"])
        largest = float(torch.finfo(torch.float32).max)
        high = check_number("max_scale", given["max_scale"], low=0, high=largest, low_open=True)
        check_number("min_scale", given["min_scale"], low=0, high=high, low_open=True)
        return self

    def may_rest_at_one(self, auto: bool) -> bool:
        """Tells whether a scale of one may stay one: it is fixed, or automatic."""
        rests = auto or self.growth_factor == self.backoff_factor == 1.0
        return rests and (self.min_scale or 0.0) <= 1.0 <= (self.max_scale or math.inf)


@dataclass(frozen=True)
class AutoScale:
    """Scales that are found and followed from measured exponents; powers of two.

    A scale is lowered when the largest value comes within the headroom, and raised when too many
    values are subnormal. A layer where an infinity arose backs off at once.

    Attributes:
        layers: Patterns of the modules to choose. Default: the model's child modules; containers,
            what holds most of the model, and parts that share a parameter with another are replaced
            by their own children.
        scale: Each layer's first scale. Any will do.
        underflow: Accepted share of subnormal values among those that are not zero.
        headroom: Binades to be left free between the largest value and overflow.
        every: Number of steps of which one is measured, after the warm-up. A measured step takes
            longer: by 3 to 5 % for the built-in language model in float16 on a CPU.
        warmup: Steps at the beginning that are all measured.
        dtype: Type whose range is to be used.
    """

    layers: tuple[str, ...] | None = None
    scale: float = 1.0
    underflow: float = 0.01
    headroom: int = 4
    every: int = 25
    warmup: int = 25
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        check_scale("AutoScale.scale", self.scale)
        if not math.log2(self.scale).is_integer():
            raise InputError(
                f"Parameter `AutoScale.scale` should be a power of two. Found `{self.scale!r}`. "
                f"Remedy: {2.0 ** round(math.log2(self.scale)):g}."
            )
        check_number("AutoScale.underflow", self.underflow, low=0, high=1)
        check_count("AutoScale.headroom", self.headroom, low=0)
        check_count("AutoScale.every", self.every)
        check_count("AutoScale.warmup", self.warmup, low=0)

    def due(self, step: int) -> bool:
        """Tells whether the step of this number, from zero, is measured."""
        return step < self.warmup or step % self.every == 0


def check_scale(name: str, scale: Any) -> float:
    """Returns a scale if float32 can hold both it and its reciprocal."""
    tiny = float(torch.finfo(torch.float32).tiny)
    return check_number(name, scale, low=0, high=1 / tiny, low_open=True)


def check_layer_scales(layer_scales: Any) -> dict[str, LayerScale] | AutoScale:
    """Brings the argument ``layer_scales`` into one of two forms."""
    if isinstance(layer_scales, AutoScale):
        return layer_scales
    if layer_scales == "auto":
        return AutoScale()
    remedy = "{'blocks.*': 2**8}, 'auto' or an AutoScale"
    check_type("layer_scales", layer_scales, Mapping, remedy)  # type: ignore[type-abstract]
    checked = {}
    for pattern, value in layer_scales.items():
        layer = value if isinstance(value, LayerScale) else LayerScale(value)
        check_scale(f"layer_scales[{pattern!r}]", layer.scale)
        checked[str(pattern)] = layer
    return checked
