"""Takes the scales out of an optimizer's gradients, and takes or skips its step."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadygrad.distributed import World, gather_json, process_world
from steadygrad.formulas.exponents import BINS, exponent_histograms
from steadygrad.scale.audit import GraphAudit
from steadygrad.scale.layers import LOSS, Layers
from steadygrad.scale.table import ScaleTable
from steadygrad.shards import local

__all__ = ["MeasuredExponents", "StepUnscaler"]

# By the index of their layer.
Gradients = dict[int, list[Tensor]]


class MeasuredExponents(NamedTuple):
    """Counts the exponents of one step's scaled gradients; rows are layers, the loss first.

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


class StepUnscaler:
    """Unscales gradients, and keeps flags and exponent counts of one step until the update.

    Args:
        layers: The layers.
        table: Scales of the layers.
        audit: Knows which gradients can have lost anything, and which layers were called.
        group: Processes that skip a step together, as the user gave them.

    Attributes:
        names: Names of all processes' layers, in an order that is the same on all of them.
        measured: Exponents of the last measured step.
        counts: This step's exponents, of activations and weights, if it is measured.
        stages: ``"unscaled"`` or ``"stepped"`` for this step's optimizers.
    """

    def __init__(self, layers: Layers, table: ScaleTable, audit: GraphAudit, group: Any) -> None:
        self._layers, self._table, self._audit = layers, table, audit
        process_world(group)  # refuses what is none
        self._group, self._world = group, World()
        self._places: Tensor | None = None
        self.names = table.names
        self.measured: MeasuredExponents | None = None
        self.begin()

    def begin(self) -> None:
        """Forgets the step under way."""
        self.stages: dict[Optimizer, str] = {}
        self._nonfinite: dict[Optimizer, Tensor] = {}
        self.counts: Tensor | None = None
        self._table.clear()

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscales an optimizer's gradients, and adds up the flags and counts of all processes.

        Raises:
            RuntimeError: If that was done already.
            InputError: If a chosen module has a gradient but was not called.
        """
        if optimizer in self.stages:
            raise RuntimeError(
                "Expected one unscale_() and one step() between two update() calls. Found this "
                f"optimizer {self.stages[optimizer]} already. Remedy: call update() at the end of "
                "each step."
            )
        table = self._table
        table.collect()
        widen_gradients(optimizer)
        gradients, measured = self._gradients_by_layer(optimizer)
        uncalled = self._audit.uncalled(gradients)
        # Columns of the rows that travel: a flag, and two histograms in a measured step.
        columns = [table.counts, count_exponents(measured, table.own)] if table.measuring else []
        flags = table.nonfinite + unscale_gradients(gradients, table.inverse_totals)
        rows = table.merge_rows(torch.cat([flags[:, None], *columns], dim=1))
        everywhere = self._sum_rows(rows)
        if uncalled is not None:
            # Not before: the other processes would wait in the collective.
            raise uncalled
        self._nonfinite[optimizer] = everywhere[:, 0]
        self.stages[optimizer] = "unscaled"
        if table.measuring:
            activations, weights = self.own(everywhere)[:, 1:].split(BINS, dim=1)
            if self.counts is not None and self.measured is not None:
                # Another optimizer of this step: the boundaries are the same, the weights are not.
                weights = weights + self.measured.weights
            self.measured = MeasuredExponents(activations, weights, table.totals.clone())
            self.counts = activations + weights

    def carried_scales(self, parameters: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Finds the layers of parameters once; see :meth:`LayerwiseGradScaler.parameter_scales`."""
        table = self._table
        owners = [owner or LOSS for owner in self._layers.owners(parameters)]
        rows = torch.tensor(owners, device=table.own.device)

        def carried() -> Tensor:
            table.collect()
            scales = torch.where(table.nonfinite.any(), torch.nan, table.totals[rows])
            if not self.stages:
                return scales
            groups = [group for optimizer in self.stages for group in optimizer.param_groups]
            unscaled = {id(p) for group in groups for p in group["params"]}
            taken_out = torch.tensor([id(p) in unscaled for p in parameters])
            taken_out = taken_out.to(rows.device, non_blocking=True)
            return torch.where(taken_out, scales / table.totals[rows], scales)

        return carried

    def _gradients_by_layer(self, optimizer: Optimizer) -> tuple[Gradients, Gradients]:
        """Collects this process's gradients, and the measured ones among them."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients: Gradients = defaultdict(list)
        measured: Gradients = defaultdict(list)
        for parameter, owner in zip(parameters, self._layers.owners(parameters), strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                # First: adding up duplicates may overflow, and the check must see the sums.
                parameter.grad = gradient = gradient.coalesce()
                gradient = gradient._values()
            # The loss's scale is around the parameters of other models, too.
            gradients[owner or LOSS].append(local(gradient))
            if self._table.measuring and self._audit.may_be_narrow(parameter, gradient):
                measured[owner or LOSS].append(local(gradient))
        return gradients, measured

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Takes an optimizer's step, or skips it."""
        # Fused optimizers skip at exactly 1.
        found_inf = self._nonfinite[optimizer].any().float()
        self.stages[optimizer] = "stepped"
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            # The one wait there is, and only for optimizers that cannot skip by themselves.
            return None if found_inf.item() else optimizer.step(*args, **kwargs)
        optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def nonfinite(self) -> Tensor | None:
        """Flags the layers of all processes with a non-finite value; None before an unscaling."""
        flags = list(self._nonfinite.values())
        return torch.stack(flags).sum(dim=0) > 0 if flags else None

    def own(self, rows: Tensor) -> Tensor:
        """Selects this process's layers from rows of all processes' layers."""
        return rows if self._places is None else rows[self._places]

    def _sum_rows(self, rows: Tensor) -> Tensor:
        """Adds up rows over processes by the layers' names, in one collective.

        Processes may have other layers, as the stages of a pipeline do. Before the first sum they
        exchange names; a process adds zeros to the rows of layers that it does not have.
        """
        world, names = process_world(self._group), self._table.names
        if world != self._world:
            gathered = gather_json(names, world, rows.device)
            self.names = list(dict.fromkeys(name for given in gathered for name in given))
            places = torch.tensor([self.names.index(name) for name in names], device=rows.device)
            self._world, self._places = world, None if self.names == names else places
        if self._places is not None:
            spread = rows.new_zeros(len(self.names), rows.shape[1])
            rows = spread.index_copy_(0, self._places, rows)
        return world.sum(rows)


def widen_gradients(optimizer: Optimizer) -> None:
    """Casts an optimizer's float16 gradients to float32, where it keeps float32 masters.

    An unscaled gradient may be too small for float16.
    """
    for group in optimizer.param_groups:
        # How steadygrad's optimizers, and others, say so; False: no masters.
        if group.get("master_weights", False) is False:
            continue
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.dtype == torch.float16:
                parameter.grad = None
                parameter.grad_dtype = None
                parameter.grad = gradient.to(torch.float32)


@torch.no_grad()
def unscale_gradients(gradients: Gradients, inverse: Tensor) -> Tensor:
    """Multiplies gradients in place by ``inverse``, the reciprocals of the layers' total scales.

    Returns:
        1 where a layer had a value that is not finite, 0 elsewhere, with shape ``(layers)``.
    """
    nonfinite = torch.zeros_like(inverse)
    for index, whole in gradients.items():
        kinds = defaultdict(list)
        for gradient in whole:
            kinds[gradient.device, gradient.dtype].append(gradient)
        for (device, _), part in kinds.items():
            # Set where a value is not finite, and left as it was elsewhere.
            flag = nonfinite[index].to(device)
            factor = inverse[index].to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(part, flag, factor)
            if device != nonfinite.device:
                nonfinite[index].copy_(flag)
    return nonfinite


def count_exponents(gradients: Gradients, own: Tensor) -> Tensor:
    """Counts exponents of each layer's gradients, with shape ``(layers, BINS)``, on its device."""
    counts = torch.zeros(len(own), BINS, device=own.device)
    for index, whole in gradients.items():
        counts[index] += exponent_histograms(whole).sum(dim=0).to(own.device)
    return counts
