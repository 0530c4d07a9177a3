"""The table of scales: one row for each layer, as tensors on one device."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Variable

from steadygrad.averages import check_state
from steadygrad.numerics import exact
from steadygrad.scale.equations import BINS, GrowthRule, followed_shift, next_scales
from steadygrad.scale.layers import LARGEST_SCALE, LOSS, AutoScale, Layers, LayerScale

# Kinds of backward passes: of an own loss, of one that another scaler scaled, of one that none did.
OWN, OTHERS, UNSCALED = range(3)
_KEYS = "scale", "growth_tracker", "overflows"
_BOUNDS = {"scale": (2.0**-149, LARGEST_SCALE), "growth_tracker": (0, 2**31 - 1)}


class ScaleTable:
    """Holds the scales of all layers, and the overflows of a step; row 0 is the loss.

    The tensors are made once and changed in place: a compiled step and a CUDA graph keep seeing
    them. What a backward pass detects arrives as the gradient of leaf tensors that take part in
    each boundary. So it needs no side effect, adds up over micro-batches, and happens once under
    activation checkpointing. Passes of others' losses, as of an actor's through its critic, leave
    no trace. A scaler without losses, as of a pipeline's earlier stage, counts unmarked passes.
    """

    _tables: ClassVar["weakref.WeakSet[ScaleTable]"] = weakref.WeakSet()

    def __init__(
        self, layers: Layers, first: Sequence[LayerScale], rule: GrowthRule, device: torch.device
    ) -> None:
        self._chains, count = layers.chains, len(first)
        self.names, self._rule = layers.names, rule
        around = [[j in chain for j in range(count)] for chain in layers.chains]
        self._around = torch.tensor(around, device=device)
        self._parent = torch.tensor([chain[-2:][0] for chain in layers.chains], device=device)
        self.scales = torch.tensor([x.scale for x in first], dtype=torch.float32, device=device)
        # Reciprocals, and products of each layer's scale and those around it.
        self.inverse, self.totals, self.inverse_totals = (self.scales.clone() for _ in range(3))
        # Finite steps in a row, and how many were not finite.
        self.tracker = torch.zeros(count, dtype=torch.int32, device=device)
        self.overflows = torch.zeros(count, dtype=torch.int64, device=device)
        # Of this step: how many non-finite gradients left each layer through its boundary, and the
        # exponents there. Each row is the gradient of a leaf.
        self.nonfinite = torch.zeros(count, device=device)
        self.counts = torch.zeros(count, BINS, device=device)
        self._rows = (*self.nonfinite.unbind(), *self.counts.unbind())
        leaves = [torch.zeros_like(row, requires_grad=True) for row in self._rows]
        self.nonfinite_leaves, self.count_leaves = leaves[:count], leaves[count:]
        # Whether boundaries scale, and count; indices of layers that were called, or traced.
        self.enabled, self.measuring, self.called = True, False, {LOSS}
        # The kind of backward pass that is running; compiled code reads it in `gate`.
        self.running, self.gate = OWN, torch.tensor(OWN, device=device)
        self.has_loss, self.in_pass = False, False
        self._tables.add(self)
        self.fixed = {index for index, layer in enumerate(first) if layer.fixed}
        self.fix(())
        self.set_scales(self.scales)

    def fix(self, layers: Iterable[int]) -> None:
        """Fixes scales. What is seen in such a layer counts for the next around it that moves."""
        self.fixed |= {*layers}
        moving = [[j for j in chain if j == LOSS or j not in self.fixed] for chain in self._chains]
        self._into = torch.tensor([chain[-1] for chain in moving], device=self.scales.device)
        fixed = [index in self.fixed for index in range(len(moving))]
        self._is_fixed = torch.tensor(fixed, device=self.scales.device)

    def set_scales(self, scales: Tensor) -> None:
        """Writes the scales, with shape ``(layers)``, their reciprocals and their products."""
        self.scales.copy_(scales)
        self.totals.copy_(torch.where(self._around, self.scales, 1.0).prod(dim=1))
        # As torch does it: the quotient is rounded once.
        wide = exact(self.scales.device)
        self.inverse.copy_(self.scales.to(wide).reciprocal())
        self.inverse_totals.copy_(self.totals.to(wide).reciprocal())

    def mark(self, loss: Tensor) -> None:
        """Makes the passes of a scaled loss the scaler's own."""
        if not self.has_loss:
            self.has_loss = True
            self._set_in_pass(False)
            self.clear()
        loss.register_hook(self._begin_pass)

    def _begin_pass(self, gradient: Tensor) -> None:
        def end() -> None:
            """Is dropped by the engine when the pass ends, by an error too."""

        self._set_in_pass(True)
        weakref.finalize(end, self._set_in_pass, False)
        Variable._execution_engine.queue_callback(end)

    def _set_in_pass(self, in_pass: bool) -> None:
        self.in_pass, tables = in_pass, list(self._tables)
        scaled = any(table.in_pass for table in tables)
        for table in tables:
            own = table.in_pass or not (table.has_loss or scaled)
            running = OWN if own else OTHERS if table.has_loss and scaled else UNSCALED
            if running != table.running:
                table.running = running
                # `data` has no version: compiled code saves the gate before the pass begins.
                table.gate.data.fill_(running)

    def collect(self) -> None:
        """Copies the leaves' gradients to their rows, where they are not the rows themselves."""
        leaves = (*self.nonfinite_leaves, *self.count_leaves)
        for leaf, row in zip(leaves, self._rows, strict=True):
            gradient = leaf.grad
            # backward(create_graph=True) does not add in place.
            if gradient is not row:
                if gradient is not None:
                    row.copy_(gradient.detach())
                leaf.grad = row

    def clear(self) -> None:
        """Forgets the overflows of this step's backward passes."""
        self.collect()
        self.nonfinite.zero_()
        self.counts.zero_()

    @torch.no_grad()
    def update(self, nonfinite: Tensor, counts: Tensor | None, auto: AutoScale | None) -> None:
        """Moves the scales by flags ``(layers)``, and exponents ``(layers, BINS)`` if there are."""
        fixed, rule, zeros = self._is_fixed, self._rule, torch.zeros_like(self.nonfinite)
        bad = zeros.index_add_(0, self._into, nonfinite.float()) > 0
        scales, tracker = next_scales(self.scales, self.tracker, bad, fixed, rule)
        if auto is not None and counts is not None:
            counts = torch.zeros_like(counts).index_add_(0, self._into, counts)
            shift = followed_shift(counts, auto.underflow, auto.headroom)[self._into]
            # Shifts of the totals: what the layers around it take is not the layer's own.
            shift[1:] -= shift[self._parent[1:]]
            moved = torch.ldexp(self.scales, shift).clamp(rule.min_scale, rule.max_scale)
            # A measurement says more than a flag, unless nothing was measured.
            scales = torch.where(fixed | bad & (moved >= self.scales), scales, moved)
        self.set_scales(scales)
        self.tracker.copy_(tracker)
        self.overflows.add_(nonfinite)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Lists each layer's scale, finite steps and overflows by name; waits for the device."""
        columns = (x.tolist() for x in (self.scales, self.tracker, self.overflows))
        rows = [dict(zip(_KEYS, row, strict=True)) for row in zip(*columns, strict=True)]
        return dict(zip(self.names, rows, strict=True))

    @torch.no_grad()
    def load_state_dict(self, saved: Any) -> None:
        """Loads a state of :meth:`state_dict`; a damaged one changes nothing."""
        check_state("state", saved, self.state_dict(), place="['layers']", bounds=_BOUNDS)
        rows = [[saved[name][key] for name in self.names] for key in _KEYS]
        self.tracker.copy_(torch.tensor(rows[1]))
        self.overflows.copy_(torch.tensor(rows[2]))
        self.set_scales(torch.tensor(rows[0], dtype=torch.float64))
