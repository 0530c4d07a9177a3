r"""Binary exponents of a tensor's values, and their rounding in a narrow type.

A histogram counts the values :math:`2^e \le |x| < 2^{e+1}` for each exponent that float32 has. A
scale :math:`2^k` moves it by :math:`k` places; a type with fewer exponents cuts it off on both
sides. Nothing here waits for the device.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BINS",
    "HIGHEST",
    "LOWEST",
    "NONFINITE_BIN",
    "ExponentShares",
    "exponent_histograms",
    "exponents_of_bins",
    "largest_exponents",
    "limits",
    "shares",
]

LOWEST, HIGHEST = -149, 127
# The first place counts zeros, the last one infinities and NaN.
BINS = HIGHEST - LOWEST + 3
NONFINITE_BIN = BINS - 1


class ExponentShares(NamedTuple):
    """Shares of values by their fate under a scale in a type, each of shape ``(n)``.

    Attributes:
        zero: Values that are zero to begin with.
        flushed: Others that become zero.
        subnormal: Values that keep some of their digits only.
        overflow: Values that become infinite, or are not finite to begin with.
    """

    zero: Tensor
    flushed: Tensor
    subnormal: Tensor
    overflow: Tensor


def exponent_histograms(tensors: Sequence[Tensor]) -> Tensor:
    """Counts each tensor's values by binary exponent.

    Args:
        tensors: Tensors of any floating types and shapes, on one device, at least one.

    Returns:
        float32 counts with shape ``(tensors, BINS)``: zeros, exponents ``LOWEST`` to ``HIGHEST``,
        not finite. Values of float64 outside these exponents count at the ends.
    """
    return torch.stack([_histogram(tensor) for tensor in tensors])


def _histogram(tensor: Tensor) -> Tensor:
    values = tensor.detach().flatten()
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    # Before frexp: it is not defined for half everywhere.
    values = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    # frexp's mantissa lies in [1/2, 1), so its exponent is larger by one.
    exponent = torch.frexp(values).exponent.to(torch.int64) - 1
    place = exponent.clamp(LOWEST, HIGHEST) - LOWEST + 1
    place = torch.where(values == 0, 0, place)
    place = torch.where(torch.isfinite(values), place, NONFINITE_BIN)
    # Integers: their sum does not depend on the order. bincount would wait for the device.
    counts = torch.zeros(BINS, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, place, torch.ones_like(place)).to(torch.float32)


def exponents_of_bins(device: torch.device | None = None) -> Tensor:
    """Exponent of each place, with shape ``(BINS)``: minus and plus infinity at the ends."""
    exponents = torch.arange(LOWEST - 1, HIGHEST + 2, device=device, dtype=torch.float32)
    place = torch.arange(BINS, device=device)
    exponents = torch.where(place == 0, -torch.inf, exponents)
    return torch.where(place == NONFINITE_BIN, torch.inf, exponents)


def largest_exponents(histograms: Tensor) -> Tensor:
    """Exponent of each row's largest finite value.

    Args:
        histograms: With shape ``(n, BINS)``.

    Returns:
        With shape ``(n)``; minus infinity where every value is zero or there is none.
    """
    exponents = exponents_of_bins(histograms.device)
    seen = (histograms > 0) & (exponents < torch.inf)
    return torch.where(seen, exponents, -torch.inf).amax(dim=1)


def shares(
    histograms: Tensor, log2_scale: Tensor | float, dtype: torch.dtype = torch.float16
) -> ExponentShares:
    r"""Shares of values by their fate when they are multiplied by a scale and rounded to a type.

    A value below half the type's least subnormal number becomes zero; one of at least twice the
    power of two in its largest number becomes infinite.

    Args:
        histograms: Counts with shape ``(n, BINS)``.
        log2_scale: Base-2 logarithm of the scale, a whole number; one for all, or shape ``(n)``.
        dtype: The type.

    Returns:
        Shares of all values of a row; zero where the row is empty.

    References:
        | IEEE 754-2019, sections 3.4 and 4.3.1: binary formats, and rounding to nearest
    """
    normal, least, over = limits(dtype)
    moved = exponents_of_bins(histograms.device) + torch.as_tensor(
        log2_scale, device=histograms.device
    ).unsqueeze(-1)
    total = histograms.sum(dim=1).clamp(min=1)

    def share(where: Tensor) -> Tensor:
        return torch.where(where, histograms, 0.0).sum(dim=1) / total

    nonzero = moved > -torch.inf
    return ExponentShares(
        zero=share(~nonzero),
        flushed=share(nonzero & (moved < least - 1)),
        subnormal=share((moved >= least - 1) & (moved < normal)),
        overflow=share(moved >= over),
    )


def limits(dtype: torch.dtype) -> tuple[int, int, int]:
    """Exponents of a type's least normal and subnormal numbers, and the first one too large."""
    info = torch.finfo(dtype)
    normal = _exponent(info.tiny)
    return normal, normal + _exponent(info.eps), _exponent(info.max) + 1


def _exponent(value: float) -> int:
    return math.frexp(value)[1] - 1
