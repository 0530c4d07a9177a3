"""Takes the scales out of an optimizer's gradients, and takes or skips its step."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadygrad.formulas.exponents import BINS, exponent_histograms
from steadygrad.scale.audit import GraphAudit
from steadygrad.scale.layers import LOSS, Layers
from steadygrad.scale.table import ScaleTable
from steadygrad.sharding import World, gather_json, local, process_world

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
        row_sum: Adds up over processes.
        measured: Exponents of the last measured step.
        counts: This step's exponents, of activations and weights, if it is measured.
        stages: ``"unscaled"`` or ``"stepped"`` for this step's optimizers.
    """

    def __init__(self, layers: Layers, table: ScaleTable, audit: GraphAudit, group: Any) -> None:
        self._layers, self._table, self._audit = layers, table, audit
        self.row_sum = RowSum(table.names, group)
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
        gradients = self._gradients_by_layer(optimizer)
        uncalled = self._audit.uncalled(gradients)
        # Columns of the rows that travel: a flag, and two histograms in a measured step.
        columns = [table.nonfinite[:, None]]
        if table.measuring:
            narrow = self._gradients_by_layer(optimizer, self._audit.may_be_narrow)
            columns += [table.counts, count_exponents(narrow, table.own)]
        columns[0] = columns[0] + unscale_gradients(gradients, table.inverse_totals)[:, None]
        rows = table.merge_rows(torch.cat(columns, dim=1))
        everywhere, own = self.row_sum(rows)
        if uncalled is not None:
            # Not before: the other processes would wait in the collective.
            raise uncalled
        self._nonfinite[optimizer] = everywhere[:, 0]
        self.stages[optimizer] = "unscaled"
        if table.measuring:
            self._record_counts(*own[:, 1:].split(BINS, dim=1))

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

    def _gradients_by_layer(
        self, optimizer: Optimizer, wanted: Callable[[Tensor], bool] = lambda parameter: True
    ) -> Gradients:
        """Collects this process's gradients of the wanted parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients: Gradients = defaultdict(list)
        for parameter, owner in zip(parameters, self._layers.owners(parameters), strict=True):
            gradient = parameter.grad
            if gradient is None or not wanted(parameter):
                continue
            if gradient.is_sparse:
                # First: adding up duplicates may overflow, and the check must see the sums.
                parameter.grad = gradient = gradient.coalesce()
                gradient = gradient._values()
            # The loss's scale is around the parameters of other models, too.
            gradients[owner or 0].append(local(gradient))
        return gradients

    def _record_counts(self, activations: Tensor, weights: Tensor) -> None:
        if self.counts is not None and self.measured is not None:
            # Another optimizer of this step: the boundaries are the same, the weights are not.
            weights = weights + self.measured.weights
        self.measured = MeasuredExponents(activations, weights, self._table.totals.clone())
        self.counts = activations + weights

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
        if not self._nonfinite:
            return None
        first, *more = self._nonfinite.values()
        return sum(more, first) > 0


class RowSum:
    """Adds up rows of layers over processes, by the layers' names, in one collective.

    Processes may have other layers, as the stages of a pipeline do. Before the first sum they
    exchange their names; a process adds zeros to the rows of layers that it does not have.

    Args:
        names: Names of this process's layers.
        group: The processes, as the user gave them.

    Attributes:
        names: Names of all processes' layers, in an order that is the same on all of them.
    """

    def __init__(self, names: list[str], group: Any) -> None:
        process_world(group)
        self._group, self._own_names, self.names = group, names, names
        self._world = World()
        self._places: Tensor | None = None

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Adds up rows, with shape ``(layers, n)`` and the same ``n`` on all processes.

        Returns:
            The sums for all names, and for this process's layers.
        """
        world = process_world(self._group)
        if world != self._world:
            self._agree(world, rows.device)
        if self._places is not None:
            spread = rows.new_zeros(len(self.names), rows.shape[1])
            rows = spread.index_copy_(0, self._places, rows)
        summed = world.sum(rows)
        return summed, self.own(summed)

    def own(self, rows: Tensor) -> Tensor:
        """Selects the rows of this process's layers."""
        return rows if self._places is None else rows[self._places]

    def _agree(self, world: World, device: torch.device) -> None:
        """Exchanges names; each process of a group gets here at its first sum."""
        gathered = gather_json(self._own_names, world, device)
        self.names = list(dict.fromkeys(name for names in gathered for name in names))
        self._world, self._places = world, None
        if self.names != self._own_names:
            places = [self.names.index(name) for name in self._own_names]
            self._places = torch.tensor(places, device=device)


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
        if whole:
            counts[index] += exponent_histograms(whole).sum(dim=0).to(own.device)
    return counts
