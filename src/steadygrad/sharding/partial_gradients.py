"""Sums of gradients that are partial, packed into one collective for all of one type."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from steadygrad.sharding.shards import aligned, local

__all__ = ["PartialGradients", "layout_of"]

# Axes of a parameter's mesh to add its gradient up over.
Axes = tuple[int, ...]


class PartialGradients:
    """Adds up gradients that are partial sums: one collective for all of one type.

    Sequence parallelism leaves the gradients of whole parameters, a norm's gain, as partial sums.
    Before the first step all processes of a mesh agree on which these are: from then on a process
    without such a gradient adds zeros. One that is partial for the first time later must be so on
    all of them.

    Args:
        params: The parameters, those of a mesh in an order that is the same on all processes.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._layout = layout_of(params)
        self._known: dict[int, Axes] | None = None
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def is_of(self, params: Sequence[Tensor]) -> bool:
        """Whether these parameters are sharded as the ones that it was made for."""
        return self._layout == layout_of(params)

    def __call__(
        self, gradients: Sequence[Tensor | None], params: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Lays gradients out as their parameters are.

        Args:
            gradients: One for each parameter; None: this process has none.
            params: The parameters.

        Returns:
            This process's parts, and whether any process has the gradient, of partial ones only,
            boolean with shape ``(params)``; None: none is partial.
        """
        axes = [_partial_axes(g, p) for g, p in zip(gradients, params, strict=True)]
        if self._known is None:
            self._known = _agreed(axes, params)
        self._known |= {i: own for i, own in enumerate(axes) if own}
        found = [
            g if g is None else local(g if own else aligned(g, p))
            for g, p, own in zip(gradients, params, axes, strict=True)
        ]
        kinds: dict[Any, list[int]] = defaultdict(list)
        parts: dict[int, Tensor] = {}
        for i, own in sorted(self._known.items()):
            g, p = found[i], params[i]
            # One that is whole already stays as it is, on all processes.
            is_part = g is not None and axes[i]
            parts[i] = g if is_part else torch.zeros_like(local(p.detach()) if g is None else g)  # type: ignore[assignment]
            kinds[p.device_mesh, own, parts[i].dtype].append(i)  # type: ignore[attr-defined]
        anywhere = None
        for (mesh, own, _), places in kinds.items():
            groups = [mesh.get_group(axis) for axis in own]
            totals, some = _add_up(
                [parts[i] for i in places], [axes[i] != () for i in places], groups
            )
            for i, total in zip(places, totals, strict=True):
                found[i] = total if axes[i] or found[i] is None else found[i]
            if anywhere is None:
                anywhere = torch.zeros(len(params), dtype=torch.bool, device=some.device)
            anywhere.index_put_((self._index(places, anywhere.device),), some.to(anywhere.device))
        return found, anywhere

    def _index(self, places: list[int], device: torch.device) -> Tensor:
        # Copied to the device once: such a copy waits for it.
        key = tuple(places)
        if key not in self._indices:
            self._indices[key] = torch.tensor(places, device=device)
        return self._indices[key]


def _add_up(
    parts: Sequence[Tensor], has_part: Sequence[bool], groups: Sequence[dist.ProcessGroup]
) -> tuple[list[Tensor], Tensor]:
    """Sums of tensors over all of these groups, and whether any process has a part of each."""
    yes = parts[0].new_ones(1)
    # Not copied from the host, which would wait for the device.
    flags = [yes if has else yes - 1 for has in has_part]
    packed = torch.cat([*(part.reshape(-1) for part in parts), *flags])
    for group in groups:
        dist.all_reduce(packed, group=group)
    *totals, counts = packed.split([*(part.numel() for part in parts), len(parts)])
    shaped = [total.view(part.shape) for total, part in zip(totals, parts, strict=True)]
    return shaped, counts > 0


def layout_of(params: Sequence[Tensor]) -> list[Any]:
    """Mesh and placements of each parameter."""
    return [(getattr(p, "device_mesh", None), getattr(p, "placements", None)) for p in params]


def _partial_axes(gradient: Tensor | None, parameter: Tensor) -> Axes:
    """The axes to add a gradient up over, where that is all it needs."""
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return ()
    if gradient.placements == parameter.placements:
        return ()
    pairs = list(zip(gradient.placements, parameter.placements, strict=True))
    axes = tuple(axis for axis, (own, wanted) in enumerate(pairs) if own != wanted)
    is_sum = all(pairs[axis] == (Partial("sum"), Replicate()) for axis in axes)
    return axes if is_sum else ()


def _agreed(axes: Sequence[Axes], params: Sequence[Tensor]) -> dict[int, Axes]:
    """Axes of each gradient that is partial on any process; once in an optimizer's life."""
    copied: dict[Any, list[int]] = defaultdict(list)
    for i, p in enumerate(params):
        if isinstance(p, DTensor) and any(isinstance(place, Replicate) for place in p.placements):
            copied[p.device_mesh].append(i)
    known = {}
    for mesh, places in copied.items():
        flags = [[float(axis in axes[i]) for axis in range(mesh.ndim)] for i in places]
        table = torch.tensor(flags, device=mesh.device_type)
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                dist.all_reduce(table, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        for i, row in zip(places, table.tolist(), strict=True):
            own = tuple(axis for axis, is_partial in enumerate(row) if is_partial)
            if own:
                known[i] = own
    return known
