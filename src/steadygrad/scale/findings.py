"""What one step finds out, from the unscaling of each optimizer's gradients to the update."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadygrad.scale.boundary import Boundary
from steadygrad.scale.build import uncalled
from steadygrad.scale.gradients import by_layer, count_exponents, unscale, widen
from steadygrad.scale.layers import Layers
from steadygrad.scale.table import ScaleTable
from steadygrad.sharding import process_world

__all__ = ["Findings", "MeasuredExponents"]


class MeasuredExponents(NamedTuple):
    """Exponents of one step's gradients, as they were scaled; rows are layers, the loss first.

    Attributes:
        activations: Counts at the boundaries, with shape ``(layers, BINS)``; of what lies in the
            layer, on either side of it.
        weights: Counts in the parameters' gradients, with shape ``(layers, BINS)``.
        scales: What the layers' gradients were multiplied by, with shape ``(layers)``.
    """

    activations: Tensor
    weights: Tensor
    scales: Tensor


class Findings:
    """Unscales gradients, and keeps what was found until the update.

    Args:
        layers: The layers.
        table: Their scales.
        boundaries: Of the chosen modules, by index.
        group: As the user said: which processes skip a step together.

    Attributes:
        measured: Exponents of the last measured step.
        counts: This step's, activations' and weights' together, if it is measured.
    """

    def __init__(
        self, layers: Layers, table: ScaleTable, boundaries: Mapping[int, Boundary], group: Any
    ) -> None:
        process_world(group)
        self._layers, self._table, self._boundaries = layers, table, boundaries
        self._group = group
        self.measured: MeasuredExponents | None = None
        self.begin()

    def begin(self) -> None:
        """Forgets the step under way."""
        self.stages: dict[int, str] = {}
        self._founds: dict[int, Tensor] = {}
        self.counts: Tensor | None = None
        self._table.clear()

    def take(self, optimizer: Optimizer) -> None:
        """Unscales an optimizer's gradients, and agrees with the other processes on what is bad."""
        table, layers = self._table, len(self._table.names)
        table.collect()
        widen(optimizer)
        gradients = by_layer(optimizer, self._layers.owner)
        called = {i: boundary.watch.called for i, boundary in self._boundaries.items()}
        wrong = uncalled(self._layers, called, gradients)
        packed = [table.found]
        if table.measuring:
            weights = count_exponents(gradients, layers, table.own.device)
            packed += [table.seen.flatten(), weights.flatten()]
        totals, inverse = table.totals()
        packed[0] = packed[0] + unscale(gradients, inverse)
        # One collective: the flags, and the counts where there are any.
        summed = process_world(self._group).sum(torch.cat(packed))
        if wrong is not None:
            # Not before: the other processes would wait in the collective.
            raise wrong
        self._founds[id(optimizer)] = summed[:layers]
        self.stages[id(optimizer)] = "unscaled"
        if table.measuring:
            self._count(summed[layers:].view(2, layers, -1), totals)

    def _count(self, counts: Tensor, totals: Tensor) -> None:
        activations, weights = counts.unbind()
        if self.counts is not None and self.measured is not None:
            # Another optimizer of this step: the boundaries are the same, the weights are not.
            weights = weights + self.measured.weights
        self.measured = MeasuredExponents(activations, weights, totals)
        self.counts = activations + weights

    def bad(self, optimizer: Optimizer) -> Tensor:
        """1 if this optimizer's step must be left out, else 0; float32 with shape ``()``."""
        # Fused optimizers skip at exactly 1.
        return self._founds[id(optimizer)].any().float()

    def found(self) -> Tensor | None:
        """Whether something not finite arose in each layer; None before gradients were seen."""
        if not self._founds:
            return None
        return torch.stack(list(self._founds.values())).sum(dim=0) > 0
