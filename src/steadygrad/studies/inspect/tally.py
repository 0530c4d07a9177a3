"""Counts of exponents, from the steps of training into a record and back."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.formulas.exponents import (
    BINS,
    LOWEST,
    NONFINITE_BIN,
    largest_exponents,
    shares,
)
from steadygrad.scale import MeasuredExponents

__all__ = ["KINDS", "Tally", "add_up", "lost_at", "plain_shares"]

KINDS = ("activations", "weights")

Counts = Mapping[str, Any]
"""A histogram in a record: ``zero``, ``low`` (an exponent), ``counts`` from it on, ``over``."""


class Tally:
    """Adds up what is measured in a stretch of training.

    Of a step that is left out only what overflowed is counted: before the overflowing layer
    gradients are not those of the batch.

    Args:
        names: Of the layers, the loss first.
        plain: Whether to keep the counts of what gradients would be without scales, too.
    """

    def __init__(self, names: Sequence[str], *, plain: bool = False) -> None:
        self._names, self._keeps_plain = list(names), plain
        self._counts = torch.zeros(2, len(self._names), BINS, dtype=torch.float64)
        self._plain = torch.zeros_like(self._counts)
        self._largest = torch.full((2, len(self._names)), -torch.inf)
        self._overflows = dict.fromkeys(self._names, 0)
        self._hopeless = dict.fromkeys(self._names, 0)
        self._overflowed_at: dict[str, float] = {}
        self._skipped = 0

    def add(
        self,
        measured: MeasuredExponents,
        culprits: Iterable[str],
        hopeless: Collection[str] = (),
    ) -> None:
        """Counts a step.

        Args:
            measured: Its exponents.
            culprits: Layers in which something was not finite.
            hopeless: Those of them in which it is not at any scale.
        """
        counts = torch.stack([measured.activations, measured.weights]).cpu()
        bad = list(culprits)
        scales = measured.scales.cpu().log2()
        for name in bad:
            self._overflows[name] += 1
            self._hopeless[name] += name in hopeless
            if name not in hopeless:
                scale = scales[self._names.index(name)].item()
                self._overflowed_at[name] = min(scale, self._overflowed_at.get(name, scale))
        if bad:
            self._skipped += 1
            self._counts[..., NONFINITE_BIN] += counts[..., NONFINITE_BIN]
            return
        self._counts += counts
        if self._keeps_plain:
            self._plain += _moved(counts, -scales)
        largest = largest_exponents(counts.flatten(0, 1)).view_as(self._largest) - scales
        self._largest = torch.maximum(self._largest, largest)

    def fields(self) -> dict[str, Any]:
        """Plain values for a record; layers without any value of a kind are left out."""
        found: dict[str, Any] = {
            "skipped": self._skipped,
            "overflows": {name: n for name, n in self._overflows.items() if n},
            "at_any_scale": {name: n for name, n in self._hopeless.items() if n},
            "overflowed_at": self._overflowed_at,
            "largest": {},
            "plain": {},
        }
        numbers = KINDS, self._counts, self._plain, self._largest.tolist()
        for kind, rows, plain, largest in zip(*numbers, strict=True):
            seen = [(i, name) for i, name in enumerate(self._names) if rows[i].any()]
            found[kind] = {name: _plain(rows[i]) for i, name in seen}
            found["plain"][kind] = {name: _plain(plain[i]) for i, name in seen if plain[i].any()}
            found["largest"][kind] = {name: largest[i] for i, name in seen}
        return found


def _moved(counts: Tensor, log2_scales: Tensor) -> Tensor:
    """Counts of what values would be, multiplied by the layers' scales; of any size."""
    place = torch.arange(BINS) + log2_scales.round().to(torch.int64)[:, None]
    place = place.clamp(1, NONFINITE_BIN - 1)
    # What is zero, or not finite, is so at any scale.
    place[:, 0], place[:, NONFINITE_BIN] = 0, NONFINITE_BIN
    return torch.zeros_like(counts).scatter_add_(2, place.expand(len(counts), -1, -1), counts)


def _plain(row: Tensor) -> dict[str, Any]:
    counts = [round(count) for count in row.tolist()]
    finite = counts[1:NONFINITE_BIN]
    places = [place for place, count in enumerate(finite) if count]
    first, last = (places[0], places[-1] + 1) if places else (0, 0)
    return {
        "zero": counts[0],
        "low": LOWEST + first,
        "counts": finite[first:last],
        "over": counts[NONFINITE_BIN],
    }


def add_up(histograms: Iterable[Counts]) -> Tensor:
    """The sum of recorded histograms, with shape ``(BINS)``."""
    total = torch.zeros(BINS, dtype=torch.float64)
    for found in histograms:
        total[0] += found["zero"]
        total[NONFINITE_BIN] += found["over"]
        first = found["low"] - LOWEST + 1
        counts = torch.tensor(found["counts"], dtype=torch.float64)
        total[first : first + len(counts)] += counts
    return total


def plain_shares(histogram: Tensor) -> dict[str, float] | None:
    """What float16 made of values that were scaled already; None where there were none.

    Args:
        histogram: With shape ``(BINS)``.

    Returns:
        ``zero`` (those that were just flushed included), ``subnormal`` and ``overflow``, as shares
        of all values.
    """
    if not histogram.any():
        return None
    found = shares(histogram[None], 0.0)
    return {
        "zero": (found.zero + found.flushed).item(),
        "subnormal": found.subnormal.item(),
        "overflow": found.overflow.item(),
    }


def lost_at(histogram: Tensor, log2_scale: float) -> float:
    """How many values other than zero become zero or subnormal by a scale.

    Args:
        histogram: With shape ``(BINS)``.
        log2_scale: Base-2 logarithm of the scale.
    """
    found = shares(histogram[None], log2_scale)
    return ((found.flushed + found.subnormal) * histogram.sum()).item()
