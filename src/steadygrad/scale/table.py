"""The table of scales: one row for each layer, as tensors on one device."""

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Variable

from steadygrad._checks import InputError, check_count, check_number, check_type
from steadygrad.formulas.exponents import BINS
from steadygrad.formulas.loss_scaling import (
    Growth,
    followed_shift,
    next_scales,
    relative_shift,
    total_scales,
)
from steadygrad.scale.layers import LOSS, Layers
from steadygrad.scale.options import AutoScale, LayerScale, check_scale

__all__ = ["OTHERS", "OWN", "ScaleTable", "check_saved_count"]

# Kinds of backward passes: of an own loss, of one that another scaler scaled, of one that none did.
OWN, OTHERS, UNSCALED = range(3)
# Keys of a saved row.
_KEYS = "scale", "growth_tracker", "overflows"


class ScaleTable:
    """Holds the scales of all layers, and the overflows of a step; row 0 is the loss.

    The tensors are made once and changed in place: a compiled step and a CUDA graph keep seeing
    them. What a backward pass detects arrives as the gradient of leaf tensors that take part in
    each boundary. So it needs no side effect, adds up over micro-batches, and happens once under
    activation checkpointing. Passes of others' losses, as of an actor's through its critic, leave
    no trace. A scaler without losses, as of a pipeline's earlier stage, counts unmarked passes.

    Args:
        layers: The layers.
        rules: First scale and growth rule of each layer.
        device: Device of the tensors.

    Attributes:
        own: Scales, float32 with shape ``(layers)``; ``inverse`` holds their reciprocals.
        totals: Product of each layer's scale and those around it; ``inverse_totals`` likewise.
        tracker: Finite steps in a row, int32.
        overflows: Number of steps with a value that was not finite, int64.
        nonfinite: How many non-finite gradients left each layer through its boundary in this step.
        counts: Exponents at the boundaries in this step, with shape ``(layers, BINS)``.
        nonfinite_leaves: A leaf for each row, whose gradient is that row of ``nonfinite``.
        count_leaves: A leaf for each row, whose gradient is that row of ``counts``.
        measuring: Whether backward passes count exponents.
        has_loss: Whether a loss was scaled.
        running: The kind of backward pass that is running; compiled code reads it in ``gate``.
        called: Indices of layers that were called, or traced, with gradients to come.
        merged: Indices of layers that count as part of the layer around them.
    """

    _tables: ClassVar["weakref.WeakSet[ScaleTable]"] = weakref.WeakSet()
    _marked: ClassVar["weakref.WeakSet[ScaleTable]"] = weakref.WeakSet()

    def __init__(self, layers: Layers, rules: Sequence[LayerScale], device: torch.device) -> None:
        count, rows = len(rules), range(len(rules))
        self.names = [layer.name for layer in layers.layers]
        self.rules = list(rules)
        # float64 does not exist on Apple's GPUs.
        self._wide = torch.float32 if device.type == "mps" else torch.float64

        def column(name: str) -> Tensor:
            dtype = torch.int32 if name == "growth_interval" else self._wide
            return torch.tensor([getattr(rule, name) for rule in rules], dtype=dtype, device=device)

        self._layers, self._growth = layers, Growth(*map(column, Growth._fields))
        self._parent = torch.tensor([layer.parent for layer in layers.layers], device=device)
        chains = [set(layers.chain(i)) for i in rows]
        self._around = torch.tensor([[j in chain for j in rows] for chain in chains], device=device)
        scales = [rule.scale for rule in rules]
        self.own = torch.tensor(scales, dtype=torch.float32, device=device)
        self.inverse, self.totals, self.inverse_totals = (self.own.clone() for _ in range(3))
        self.tracker = torch.zeros(count, dtype=torch.int32, device=device)
        self.overflows = torch.zeros(count, dtype=torch.int64, device=device)
        self.nonfinite = torch.zeros(count, device=device)
        self.counts = torch.zeros(count, BINS, device=device)
        self._rows = (*self.nonfinite.unbind(), *self.counts.unbind())
        leaves = [torch.zeros_like(row, requires_grad=True) for row in self._rows]
        self.nonfinite_leaves, self.count_leaves = leaves[:count], leaves[count:]
        self.enabled, self.measuring = True, False
        self.has_loss, self.running = False, OWN
        self.gate = torch.tensor(OWN, device=device)
        self._tables.add(self)
        self.called = {LOSS}
        self.merged: set[int] = set()
        self._merged_into = torch.arange(count, device=device)
        self.set_scales(self.own)

    def set_scales(self, own: Tensor) -> None:
        """Writes the scales, with shape ``(layers)``, their reciprocals and their products."""
        self.own.copy_(own)
        # As torch does it: the quotient is rounded once.
        self.inverse.copy_(self.own.to(self._wide).reciprocal())
        self.totals.copy_(total_scales(self.own, self._around))
        self.inverse_totals.copy_(self.totals.to(self._wide).reciprocal())

    def merge(self, indices: Collection[int]) -> None:
        """Counts layers, whose own scales are one, as part of the layers around them."""
        self.merged |= set(indices)
        into = [
            next(j for j in self._layers.chain(i) if j not in self.merged)
            for i in range(len(self.names))
        ]
        self._merged_into = torch.tensor(into, device=self.own.device)

    def merge_rows(self, rows: Tensor) -> Tensor:
        """Adds the rows of merged layers, ``(layers, *)``, to the rows of their parents."""
        if not self.merged:
            return rows
        return torch.zeros_like(rows).index_add_(0, self._merged_into, rows)

    def mark(self, loss: Tensor) -> None:
        """Makes the passes of a scaled loss the scaler's own."""
        if not self.has_loss:
            self.has_loss = True
            self._set_marked()
            self.clear()
        loss.register_hook(self._begin_pass)

    def _begin_pass(self, gradient: Tensor) -> None:
        def end() -> None:
            """Is dropped by the engine when the pass ends, by an error too."""

        self._set_marked(True)
        weakref.finalize(end, self._set_marked)
        Variable._execution_engine.queue_callback(end)

    def _set_marked(self, running: bool = False) -> None:
        (self._marked.add if running else self._marked.discard)(self)
        for table in list(self._tables):
            before, table.running = table.running, UNSCALED
            if table in self._marked or not (table.has_loss or self._marked):
                table.running = OWN
            elif table.has_loss and self._marked:
                table.running = OTHERS
            if table.running != before:
                # `data` has no version: compiled code saves the gate before the pass begins.
                table.gate.data.fill_(table.running)

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
        """Moves the scales.

        Args:
            nonfinite: Whether a value in each layer was not finite, with shape ``(layers)``.
            counts: This step's exponents, with shape ``(layers, BINS)``, if it was measured.
            auto: How scales follow them, if they do.
        """
        own, tracker = next_scales(self.own, self.tracker, nonfinite, self._growth)
        if auto is not None and counts is not None:
            shift = followed_shift(
                counts, underflow=auto.underflow, headroom=auto.headroom, dtype=auto.dtype
            )
            relative = relative_shift(shift[self._merged_into], self._parent)
            moved = torch.ldexp(self.own, relative)
            moved = moved.clamp(self._growth.min_scale, self._growth.max_scale).to(own)
            # A measurement says more than a flag, unless nothing was measured.
            own = torch.where(nonfinite & (moved >= self.own), own, moved)
        self.set_scales(own)
        self.tracker.copy_(tracker)
        self.overflows.add_(nonfinite)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Lists each layer's scale, finite steps and overflows by name; waits for the device."""
        columns = [column.tolist() for column in (self.own, self.tracker, self.overflows)]
        rows = [dict(zip(_KEYS, row, strict=True)) for row in zip(*columns, strict=True)]
        return dict(zip(self.names, rows, strict=True))

    @torch.no_grad()
    def load_state_dict(self, saved: Any) -> None:
        """Loads the result of :meth:`state_dict`, whatever the order of the layers.

        Raises:
            InputError: If it is of other layers or damaged; the table is as it was.
        """
        remedy = "hand in what state_dict() returned"
        check_type("state_dict['layers']", saved, Mapping, remedy)  # type: ignore[type-abstract]
        missing, other = {*self.names} - saved.keys(), saved.keys() - {*self.names}
        if missing or other:
            raise InputError(
                "Expected a state of the layers that are scaled now. Found one without "
                f"{sorted(missing)} and with {sorted(map(str, other))}. Remedy: build the scaler "
                "with the same layer_scales."
            )
        rows = []
        for name in self.names:
            where = f"state_dict['layers'][{name!r}]"
            row = check_type(where, saved[name], Mapping, remedy)  # type: ignore[type-abstract]
            scale, tracker, overflows = (row.get(key) for key in _KEYS)
            check_scale(f"{where}['scale']", scale)
            check_saved_count(f"{where}['growth_tracker']", tracker, bits=31)
            check_saved_count(f"{where}['overflows']", overflows)
            rows.append((scale, tracker, overflows))
        columns = [self.own.clone(), self.tracker, self.overflows]
        for column, values in zip(columns, zip(*rows, strict=True), strict=True):
            column.copy_(torch.tensor(values, dtype=column.dtype))
        self.set_scales(columns[0])


def check_saved_count(name: str, count: Any, bits: int = 63) -> int:
    """Returns a saved count if a signed integer with ``bits`` bits beside its sign can hold it."""
    check_number(name, check_count(name, count, low=0), high=2**bits - 1)
    return int(count)
