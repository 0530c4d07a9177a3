r"""The rule of scales, and targets from measured exponents; nothing here waits for the device.

A layer's scale multiplies the gradient that enters it. Layers may lie inside others, so the
gradients in layer :math:`l` carry the **total** scale

.. math:: S_l = \prod_{a \ni l} s_a

over the layer and all layers around it; the loss itself is the outermost one. A histogram counts
the values :math:`2^e \le |x| < 2^{e+1}` for each exponent that float32 has.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad.numerics import exact, wide

LOWEST, HIGHEST = -149, 127
# The first place counts zeros, the last one infinities and NaN.
BINS = HIGHEST - LOWEST + 3
NONFINITE_BIN = BINS - 1
# How far a scale is raised at a time while nothing but zeros is seen.
BLIND_STEP = 8


class GrowthRule(NamedTuple):
    """Growth and backoff of scales; the arguments of :class:`~steadygrad.LayerwiseGradScaler`."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float


def next_scales(
    scales: Tensor, tracker: Tensor, nonfinite: Tensor, fixed: Tensor, rule: GrowthRule
) -> tuple[Tensor, Tensor]:
    """The scales for the next step.

    A layer where a value was not finite backs off and starts to count anew; every other layer
    counts on, although the step is skipped for all.

    Args:
        scales: With shape ``(layers)``, as all others.
        tracker: Finite steps since the last change, int32.
        nonfinite: Whether a value arose in this layer that is not finite.
        fixed: Whether a scale stays as it is.
        rule: The rule of those that move.

    Returns:
        Scales and counts.
    """
    counted = tracker + 1
    due = counted >= rule.growth_interval
    # The product is float64 until it is rounded, as in torch's kernel.
    precise = scales.to(exact(scales.device))
    grown = (precise * rule.growth_factor).to(scales.dtype)
    # Growth into infinity is left out, as torch does it.
    grown = torch.where(due & torch.isfinite(grown), grown, scales)
    moved = torch.where(nonfinite, (precise * rule.backoff_factor).to(scales.dtype), grown)
    bounded = moved.clamp(rule.min_scale, rule.max_scale)
    moved = torch.where(fixed | (moved == scales), scales, bounded)
    return moved, torch.where(nonfinite | due, 0, counted)


def followed_shift(histograms: Tensor, underflow: float, headroom: int) -> Tensor:
    """Shifts that each layer's total scale should take, in powers of two.

    Down, if the largest value has come within the headroom; up, if too large a share of the values
    that are not zero is subnormal; then in one go to where the largest value is just below the
    headroom. Two binades of slack on either side keep a scale where it is.

    Args:
        histograms: Exponents of the gradients as they were scaled, with shape ``(layers, BINS)``.
        underflow: Accepted share of subnormal values.
        headroom: Binades to be left free below float16's overflow.

    Returns:
        Whole numbers with shape ``(layers)``.
    """
    info = torch.finfo(torch.float16)
    # Exponents of the least normal number and of the first one too large.
    normal, over = math.frexp(info.tiny)[1] - 1, math.frexp(info.max)[1]
    largest = largest_exponents(histograms)
    # What has overflowed was larger than the type can say: at least this.
    overflowed = histograms[:, NONFINITE_BIN] > 0
    largest = torch.where(overflowed, largest.clamp(min=float(over)), largest)
    room = over - 1 - headroom - largest
    nonzero = histograms[:, 1:].sum(dim=1)
    subnormal = histograms[:, 1 : 1 + normal - LOWEST].sum(dim=1)
    starved = subnormal > underflow * nonzero
    move = (room <= -2) | (starved & (room >= 2))
    shift = torch.where(move, room, 0.0)
    only_zeros = (nonzero == 0) & (histograms[:, 0] > 0)
    shift = torch.where(only_zeros, float(BLIND_STEP), shift)
    return torch.where(nonzero + histograms[:, 0] > 0, shift, 0.0)


def exponent_histogram(tensor: Tensor) -> Tensor:
    """Counts a tensor's values by binary exponent.

    Args:
        tensor: Of any floating type and shape.

    Returns:
        float32 counts with shape ``(BINS)``: zeros, exponents ``LOWEST`` to ``HIGHEST``, not
        finite. Values of float64 outside these exponents count at the ends.
    """
    values = tensor.detach().flatten()
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    # Before frexp: it is not defined for half everywhere.
    values = values.to(wide(values.dtype))
    # frexp's mantissa lies in [1/2, 1), so its exponent is larger by one.
    exponent = torch.frexp(values).exponent.to(torch.int64) - 1
    place = exponent.clamp(LOWEST, HIGHEST) - LOWEST + 1
    place = torch.where(values == 0, 0, place)
    place = torch.where(torch.isfinite(values), place, NONFINITE_BIN)
    # Integers: their sum does not depend on the order. bincount would wait for the device.
    counts = torch.zeros(BINS, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, place, torch.ones_like(place)).to(torch.float32)


def largest_exponents(histograms: Tensor) -> Tensor:
    """Exponent of each row's largest finite value.

    Args:
        histograms: With shape ``(n, BINS)``.

    Returns:
        With shape ``(n)``; minus infinity where every value is zero or there is none.
    """
    exponents = torch.arange(LOWEST, HIGHEST + 1.0, device=histograms.device)
    return torch.where(histograms[:, 1:-1] > 0, exponents, -torch.inf).amax(dim=1)


def is_narrow(dtype: torch.dtype) -> bool:
    """Tells whether a floating type holds less than float32 does."""
    return dtype.itemsize < torch.float32.itemsize
