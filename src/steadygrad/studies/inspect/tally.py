"""Counts of exponents, from the steps of training into a record and back."""

from collections.abc import Iterable, Mapping, Sequence
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

__all__ = ["KINDS", "Tally", "add_up", "plain_shares"]

KINDS = ("activations", "weights")

Counts = Mapping[str, Any]
"""A histogram in a record: ``zero``, ``low`` (an exponent), ``counts`` from it on, ``over``."""


class Tally:
    """Adds up what is measured in a stretch of training.

    Of a step that is left out only what overflowed is counted: before the overflowing layer
    gradients are not those of the batch.

    Args:
        names: Of the layers, the loss first.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._counts = torch.zeros(2, len(self._names), BINS, dtype=torch.float64)
        self._largest = torch.full((2, len(self._names)), -torch.inf)
        self._overflows = dict.fromkeys(self._names, 0)
        self._skipped = 0

    def add(self, measured: MeasuredExponents, culprits: Iterable[str]) -> None:
        """Counts a step.

        Args:
            measured: Its exponents.
            culprits: Layers in which something was not finite.
        """
        counts = torch.stack([measured.activations, measured.weights]).cpu()
        bad = list(culprits)
        for name in bad:
            self._overflows[name] += 1
        if bad:
            self._skipped += 1
            self._counts[..., NONFINITE_BIN] += counts[..., NONFINITE_BIN]
            return
        self._counts += counts
        scales = measured.scales.cpu().log2()
        largest = largest_exponents(counts.flatten(0, 1)).view_as(self._largest) - scales
        self._largest = torch.maximum(self._largest, largest)

    def fields(self) -> dict[str, Any]:
        """Plain values for a record; layers without any value of a kind are left out."""
        found: dict[str, Any] = {
            "skipped": self._skipped,
            "overflows": {name: n for name, n in self._overflows.items() if n},
            "largest": {},
        }
        for kind, rows, largest in zip(KINDS, self._counts, self._largest.tolist(), strict=True):
            seen = [(i, name) for i, name in enumerate(self._names) if rows[i].any()]
            found[kind] = {name: _plain(rows[i]) for i, name in seen}
            found["largest"][kind] = {name: largest[i] for i, name in seen}
        return found


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
