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
from steadygrad.scale.usage import Usage
from steadygrad.sharding import process_world

__all__ = ["Findings", "MeasuredExponents"]


class MeasuredExponents(NamedTuple):
    """Exponents of one step's gradients, as they were scaled; rows are layers, the loss first.

    Only gradients of types narrower than float32 are counted, and float32 ones of parameters that
    may have been so just before, as under autocast: others lose nothing.

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
        usage: Knows which gradients can have lost anything.
        group: As the user said: which processes skip a step together.

    Attributes:
        measured: Exponents of the last measured step.
        counts: This step's, activations' and weights' together, if it is measured.
    """

    def __init__(
        self,
        layers: Layers,
        table: ScaleTable,
        boundaries: Mapping[int, Boundary],
        usage: Usage,
        group: Any,
    ) -> None:
        process_world(group)
        self._layers, self._table, self._boundaries = layers, table, boundaries
        self._group, self._usage = group, usage
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
            lossy = by_layer(optimizer, self._layers.owner, self._usage.lossy)
            weights = count_exponents(lossy, layers, table.own.device)
            packed += [table.seen.flatten(), weights.flatten()]
        packed[0] = packed[0] + unscale(gradients, table.inverse_totals)
        # One collective: the flags, and the counts where there are any.
        sent = torch.cat(packed) if table.measuring else packed[0]
        summed = process_world(self._group).sum(sent)
        if wrong is not None:
            # Not before: the other processes would wait in the collective.
            raise wrong
        self._founds[id(optimizer)] = summed[:layers]
        self.stages[id(optimizer)] = "unscaled"
        if table.measuring:
            self._count(summed[layers:].view(2, layers, -1))

    def _count(self, counts: Tensor) -> None:
        activations, weights = (self._table.at_home(count) for count in counts.unbind())
        if self.counts is not None and self.measured is not None:
            # Another optimizer of this step: the boundaries are the same, the weights are not.
            weights = weights + self.measured.weights
        self.measured = MeasuredExponents(activations, weights, self._table.totals.clone())
        self.counts = activations + weights

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Takes an optimizer's step, or leaves it out."""
        # Fused optimizers skip at exactly 1.
        bad = self._founds[id(optimizer)].any().float()
        self.stages[id(optimizer)] = "stepped"
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            # The one wait there is, and only for optimizers that cannot skip by themselves.
            return None if bad.item() else optimizer.step(*args, **kwargs)
        optimizer.grad_scale, optimizer.found_inf = None, bad  # type: ignore[attr-defined]
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def found(self) -> Tensor | None:
        """Whether something not finite arose in each layer; None before gradients were seen."""
        if not self._founds:
            return None
        first, *more = self._founds.values()
        return self._table.at_home(sum(more, first)) > 0
