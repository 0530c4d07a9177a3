r"""Growth and back-off of scales, and scales from measurements; decided on the device.

A layer's **own** scale multiplies the gradient that enters it. Layers may lie inside others, so
the gradients in layer :math:`l` carry the **total** scale

.. math:: S_l = \prod_{a \ni l} s_a

over the layer and all layers around it; the loss itself is the outermost one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad.formulas.exponents import (
    NONFINITE_BIN,
    exponents_of_bins,
    largest_exponents,
    limits,
)

__all__ = ["Growth", "followed_shift", "next_scales", "relative_shift", "total_scales"]

# How far a scale is raised at a time while nothing but zeros is seen.
BLIND_STEP = 8


class Growth(NamedTuple):
    """The layers' growth rules as columns, with shape ``(layers)`` and float64 unless said.

    Attributes:
        growth_factor: Multiplies a scale after ``growth_interval`` finite steps; 1: it is fixed.
        backoff_factor: Multiplies it after a step that was not finite in this layer.
        growth_interval: Number of steps, int32.
        min_scale: Least scale.
        max_scale: Largest scale.
    """

    growth_factor: Tensor
    backoff_factor: Tensor
    growth_interval: Tensor
    min_scale: Tensor
    max_scale: Tensor


def total_scales(own: Tensor, around: Tensor) -> Tensor:
    """Product of each layer's scale and the scales of the layers around it.

    Args:
        own: With shape ``(layers)``.
        around: Whether layer ``j`` is, or lies around, layer ``i``: shape ``(layers, layers)``.

    Returns:
        With shape ``(layers)``.
    """
    return torch.where(around, own, 1.0).prod(dim=1)


def next_scales(
    own: Tensor, tracker: Tensor, found: Tensor, growth: Growth
) -> tuple[Tensor, Tensor]:
    """The scales for the next step.

    A layer where a value was not finite backs off and starts to count anew; every other layer
    counts on, although the step is skipped for all.

    Args:
        own: Scales with shape ``(layers)``.
        tracker: Finite steps since the last change, int32 with shape ``(layers)``.
        found: Whether a value arose in this layer that is not finite, with shape ``(layers)``.
        growth: The rule.

    Returns:
        Scales and counts, with shape ``(layers)``.
    """
    counted = tracker + 1
    due = counted >= growth.growth_interval
    # The factors are float64, and so is the product until it is rounded: as torch's kernel does.
    grown = (own * growth.growth_factor).to(own.dtype)
    # Growth into infinity is left out, as torch does it.
    grown = torch.where(due & torch.isfinite(grown), grown, own)
    moved = torch.where(found, (own * growth.backoff_factor).to(own.dtype), grown)
    kept = moved == own
    moved = torch.where(kept, own, moved.clamp(growth.min_scale, growth.max_scale).to(own.dtype))
    return moved, torch.where(found | due, 0, counted)


def followed_shift(
    histograms: Tensor, *, underflow: float, headroom: int, dtype: torch.dtype
) -> Tensor:
    """Shifts that each layer's total scale should take, in powers of two.

    Down, if the largest value has come within the headroom; up, if too large a share of the values
    that are not zero is subnormal; then in one go to where the largest value is just below the
    headroom. Two binades of slack on either side keep a scale where it is.

    Args:
        histograms: Exponents of the gradients as they were scaled, with shape ``(layers, BINS)``.
        underflow: Accepted share of subnormal values.
        headroom: Binades to be left free below overflow.
        dtype: The gradients' type.

    Returns:
        Whole numbers with shape ``(layers)``.
    """
    normal, _, over = limits(dtype)
    exponents = exponents_of_bins(histograms.device)
    largest = largest_exponents(histograms)
    # What has overflowed was larger than the type can say: at least this.
    overflowed = histograms[:, NONFINITE_BIN] > 0
    largest = torch.where(overflowed, largest.clamp(min=float(over)), largest)
    room = over - 1 - headroom - largest
    nonzero = histograms[:, 1:].sum(dim=1)
    below = torch.where(exponents[1:] < normal, histograms[:, 1:], 0.0).sum(dim=1)
    starved = below > underflow * nonzero
    move = (room <= -2) | (starved & (room >= 2))
    shift = torch.where(move, room, 0.0)
    only_zeros = (nonzero == 0) & (histograms[:, 0] > 0)
    shift = torch.where(only_zeros, float(BLIND_STEP), shift)
    return torch.where(nonzero + histograms[:, 0] > 0, shift, 0.0)


def relative_shift(shift: Tensor, parent: Tensor) -> Tensor:
    """Turns shifts of total scales into shifts of the layers' own.

    Args:
        shift: Shifts of the totals, with shape ``(layers)``.
        parent: Index of the next layer around each, with shape ``(layers)``; the outermost layer
            is the first and its own parent.
    """
    around = shift[parent]
    return shift - torch.cat([torch.zeros_like(around[:1]), around[1:]])
