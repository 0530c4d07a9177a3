"""Histograms of exponents, from the steps of training into a record and back."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.formulas.exponents import BINS, LOWEST, NONFINITE_BIN, largest_exponents, shares
from steadygrad.scale import MeasuredExponents
from steadygrad.studies.inspect.schema import KINDS, Histogram

__all__ = ["ExponentHistograms", "add_up", "float16_shares", "lost_at"]


class ExponentHistograms:
    """Adds up the exponents of all steps of a part.

    Of a skipped step only the values that are not finite are counted: in the layers before the
    overflow the gradients are not those of the batch.

    Args:
        names: Names of the layers, the loss first.
        unscaled: Whether to count the gradients without their scales as well.
    """

    def __init__(self, names: Sequence[str], *, unscaled: bool = False) -> None:
        self._names, self._keeps_unscaled = list(names), unscaled
        self._counts = torch.zeros(len(KINDS), len(names), BINS, dtype=torch.float64)
        self._unscaled = torch.zeros_like(self._counts)
        self._largest = torch.full(self._counts.shape[:2], -torch.inf)
        self._overflows = dict.fromkeys(names, 0)
        self._nonfinite = dict.fromkeys(names, 0)
        self._overflowed_at: dict[str, float] = {}
        self._skipped = 0
        self._forward: dict[str, int] = {}

    def add_forward(self, cause: str) -> None:
        """Counts a step whose forward pass was not finite: its gradients tell nothing of layers."""
        self._skipped += 1
        self._forward[cause] = self._forward.get(cause, 0) + 1

    def add(
        self, measured: MeasuredExponents, culprits: Sequence[str], nonfinite: Sequence[str] = ()
    ) -> None:
        """Counts a step with its culprits, and the culprits that are non-finite at any scale."""
        counts = torch.stack([measured.activations, measured.weights]).cpu()
        scales = measured.scales.cpu().log2()
        for name in culprits:
            self._overflows[name] += 1
            if name in nonfinite:
                self._nonfinite[name] += 1
            else:
                scale = scales[self._names.index(name)].item()
                self._overflowed_at[name] = min(scale, self._overflowed_at.get(name, scale))
        if culprits:
            self._skipped += 1
            self._counts[..., NONFINITE_BIN] += counts[..., NONFINITE_BIN]
            return
        self._counts += counts
        if self._keeps_unscaled:
            self._unscaled += _moved(counts, -scales)
        largest = largest_exponents(counts.flatten(0, 1)).view_as(self._largest) - scales
        self._largest = torch.maximum(self._largest, largest)

    def fields(self) -> dict[str, Any]:
        """The fields of a :class:`Part`; layers without any value of a kind are left out."""
        found: dict[str, Any] = {
            "skipped": self._skipped,
            "forward": self._forward,
            "overflows": {name: n for name, n in self._overflows.items() if n},
            "at_any_scale": {name: n for name, n in self._nonfinite.items() if n},
            "overflowed_at": self._overflowed_at,
            "largest": {},
            "plain": {},
        }
        for i, kind in enumerate(KINDS):
            largest = dict(zip(self._names, self._largest[i].tolist(), strict=True))
            found[kind] = self._by_name(self._counts[i])
            found["plain"][kind] = self._by_name(self._unscaled[i])
            found["largest"][kind] = {name: largest[name] for name in found[kind]}
        return found

    def _by_name(self, counts: Tensor) -> dict[str, Histogram]:
        rows = zip(self._names, counts, strict=True)
        return {name: _histogram(row) for name, row in rows if row.any()}


def _moved(counts: Tensor, log2_scales: Tensor) -> Tensor:
    """Counts of the values multiplied by the layers' scales, however large or small they get."""
    place = torch.arange(BINS) + log2_scales.round().to(torch.int64)[:, None]
    place = place.clamp(1, NONFINITE_BIN - 1)
    # Zeros stay zero, and values that are not finite stay so.
    place[:, 0], place[:, NONFINITE_BIN] = 0, NONFINITE_BIN
    return torch.zeros_like(counts).scatter_add_(2, place.expand(len(counts), -1, -1), counts)


def _histogram(row: Tensor) -> Histogram:
    zero, *finite, over = (round(count) for count in row.tolist())
    places = [place for place, count in enumerate(finite) if count]
    first, last = (places[0], places[-1] + 1) if places else (0, 0)
    counts = tuple(finite[first:last])
    return Histogram(zero=zero, low=LOWEST + first, counts=counts, over=over)


def add_up(histograms: Iterable[Histogram]) -> Tensor:
    """The sum of recorded histograms, with shape ``(BINS)``."""
    total = torch.zeros(BINS, dtype=torch.float64)
    for found in histograms:
        first = found.low - LOWEST + 1
        total[0] += found.zero
        total[first : first + len(found.counts)] += torch.tensor(found.counts, dtype=total.dtype)
        total[NONFINITE_BIN] += found.over
    return total


def float16_shares(histogram: Tensor) -> dict[str, float]:
    """Shares of scaled values that float16 changes; flushed values are zero."""
    found = shares(histogram[None], 0.0)
    return {
        "zero": (found.zero + found.flushed).item(),
        "subnormal": found.subnormal.item(),
        "overflow": found.overflow.item(),
    }


def lost_at(histogram: Tensor, log2_scale: float) -> float:
    """Number of nonzero values that a scale, by its base-2 logarithm, makes zero or subnormal."""
    found = shares(histogram[None], log2_scale)
    return ((found.flushed + found.subnormal) * histogram.sum()).item()
