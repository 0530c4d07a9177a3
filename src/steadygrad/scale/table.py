"""The scales of all layers, and what backward passes find out about them: tensors on one device."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from steadygrad.formulas.exponents import BINS
from steadygrad.formulas.loss_scaling import (
    Growth,
    followed_shift,
    next_scales,
    relative_shift,
    total_scales,
)
from steadygrad.scale.layers import Layers
from steadygrad.scale.options import AutoScale, Rule

__all__ = ["ScaleTable"]


class ScaleTable:
    """One row for each layer, the loss first.

    The tensors are made once and changed in place: a compiled step and a CUDA graph keep seeing
    them. What a backward pass finds comes back as the gradient of ``flags`` and ``gauges``, leaves
    that the boundaries take part in with; so it needs no side effect, adds up over micro-batches,
    and happens once under activation checkpointing.

    Args:
        layers: The layers.
        scales: Their own scales.
        rules: How these move.
        device: Where the tensors live.

    Attributes:
        own: Scales, with shape ``(layers)``; changes in ``update``.
        inverse: Their reciprocals.
        totals: What each layer's gradients are multiplied by.
        inverse_totals: Their reciprocals.
        tracker: Finite steps in a row, int32.
        overflows: How often something not finite arose in each layer, int64.
        found: Whether something not finite has passed a boundary out of each layer in this step.
        seen: Counts of exponents at the boundaries, with shape ``(layers, BINS)``.
        measuring: Whether the passes now under way count exponents.
        home: Index of the layer that each one counts as, with shape ``(layers)``; None: itself.
    """

    def __init__(
        self,
        layers: Layers,
        scales: Sequence[float],
        rules: Sequence[Rule],
        device: torch.device,
    ) -> None:
        self.names = [layer.name for layer in layers.layers]
        self.rules = list(rules)
        self.parent = torch.tensor([layer.parent for layer in layers.layers], device=device)
        self._around = torch.tensor(layers.around(), device=device)
        self._growth = growth_of(rules, device)
        self.own = torch.tensor(scales, dtype=torch.float32, device=device)
        self.inverse = self.own.clone()
        self.tracker = torch.zeros(len(rules), dtype=torch.int32, device=device)
        self.overflows = torch.zeros(len(rules), dtype=torch.int64, device=device)
        self.found = torch.zeros(len(rules), device=device)
        self.seen = torch.zeros(len(rules), BINS, device=device)
        self._rows = self.found.unbind(), self.seen.unbind()
        self.flags = [_leaf(row) for row in self._rows[0]]
        self.gauges = [_leaf(row) for row in self._rows[1]]
        self.enabled, self.measuring, self._gauged = True, False, False
        self.home: Tensor | None = None
        self.totals, self.inverse_totals = self.own.clone(), self.own.clone()
        self.changed()

    def leave_out(self, indices: Collection[int], layers: Layers) -> None:
        """Makes layers, whose own scales are one, part of what lies around them."""
        rows = range(len(layers.layers))
        home = [next(j for j in layers.chain(i) if j not in indices) for i in rows]
        self.home = torch.tensor(home, device=self.own.device)

    def at_home(self, rows: Tensor) -> Tensor:
        """Adds the rows of layers that were left out to those around them."""
        return rows if self.home is None else torch.zeros_like(rows).index_add_(0, self.home, rows)

    def changed(self) -> None:
        """To be called after ``own`` was written to."""
        # As torch does it: the quotient is rounded once.
        self.inverse.copy_(_wide(self.own).reciprocal())
        self.totals.copy_(total_scales(self.own, self._around))
        self.inverse_totals.copy_(_wide(self.totals).reciprocal())

    def collect(self) -> None:
        """Brings what was found into ``found`` and ``seen``, if it is not there already."""
        _gather(self.flags, self._rows[0])
        if self._gauged:
            _gather(self.gauges, self._rows[1])

    def clear(self) -> None:
        """Forgets what this step's backward passes have found."""
        self.collect()
        self.found.zero_()
        if self._gauged:
            self.seen.zero_()
        self._gauged = self.measuring

    def measure(self, active: bool) -> None:
        """Says whether the passes to come count exponents."""
        self.measuring, self._gauged = active, self._gauged or active

    @torch.no_grad()
    def update(
        self,
        found: Tensor,
        bad: float | None,
        histograms: Tensor | None,
        auto: AutoScale | None,
    ) -> None:
        """Moves the scales.

        Args:
            found: Whether something not finite arose in each layer, with shape ``(layers)``.
            bad: Whether it did in any; None: the host would have to wait to know.
            histograms: This step's exponents, with shape ``(layers, BINS)``, if it was measured.
            auto: How scales follow them, if they do.
        """
        if histograms is None and bad == 0 and (self.tracker + 1 < self._growth.interval).all():
            # All stay as they are.
            self.tracker.add_(1)
            return
        own, tracker = next_scales(self.own, self.tracker, found, self._growth)
        if auto is not None and histograms is not None:
            shift = followed_shift(
                histograms, underflow=auto.underflow, headroom=auto.headroom, dtype=auto.dtype
            )
            shift = shift if self.home is None else shift[self.home]
            moved = torch.ldexp(self.own, relative_shift(shift, self.parent))
            moved = moved.clamp(self._growth.low, self._growth.high).to(own)
            # What has been measured says more than a flag, unless it says nothing.
            own = torch.where(found & (moved >= self.own), own, moved)
        self.own.copy_(own)
        self.tracker.copy_(tracker)
        self.overflows.add_(found)
        self.changed()


def growth_of(rules: Sequence[Rule], device: torch.device) -> Growth:
    """One tensor for each column of the rules."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(rule, name) for rule in rules], dtype=dtype, device=device)

    wide = torch.float32 if device.type == "mps" else torch.float64
    return Growth(
        factor=column("growth_factor", wide),
        backoff=column("backoff_factor", wide),
        interval=column("growth_interval", torch.int32),
        low=column("min_scale", wide),
        high=column("max_scale", wide),
    )


def _gather(leaves: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    # backward(create_graph=True) does not add in place.
    for leaf, row in zip(leaves, rows, strict=True):
        gradient = leaf.grad
        if gradient is not row:
            if gradient is not None:
                row.copy_(gradient.detach())
            leaf.grad = row


def _leaf(row: Tensor) -> Tensor:
    """A leaf whose gradient is added up in a row."""
    leaf = torch.zeros_like(row, requires_grad=True)
    leaf.grad = row
    return leaf


def _wide(scales: Tensor) -> Tensor:
    return scales if scales.device.type == "mps" else scales.to(torch.float64)
