"""This process's parts of tensors."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

__all__ = ["aligned", "aligned_locals", "first_shard", "is_sharded", "local", "shared_out"]


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which this process holds a part."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: its shard if it is a DTensor, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FirstShard(NamedTuple):
    """The rows of a tensor that the first process of its mesh's last dimension holds.

    Attributes:
        shape: Their shape; the tensor's own where it is not sharded.
        here: Whether this process holds them.
    """

    shape: tuple[int, ...]
    here: bool


def first_shard(tensor: Tensor) -> FirstShard | None:
    """The first rows of a tensor, which lie alike in its whole; None if its columns are sharded."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor) or not isinstance(tensor.placements[-1], Shard):
        return FirstShard(shape, True)
    if tensor.placements[-1].dim != 0:
        return None
    coordinate = tensor.device_mesh.get_coordinate()
    rows = -(-shape[0] // tensor.device_mesh.size(-1))
    return FirstShard((rows, *shape[1:]), coordinate is not None and coordinate[-1] == 0)


def aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient laid out as its parameter is; communicates only where it was not."""
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def aligned_locals(gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """This process's parts of gradients laid out as their parameters are.

    Sequence parallelism leaves the gradients of whole parameters, a norm's gain, as partial sums.
    These are added up together: one collective for all of one type, not one for each. So they must
    be there on all processes of their mesh, or on none.
    """
    found: list[Tensor] = []
    partial: dict[Any, list[int]] = defaultdict(list)
    for gradient, parameter in zip(gradients, parameters, strict=True):
        axis = _partial_axis(gradient, parameter)
        if axis is None:
            found.append(local(aligned(gradient, parameter)))
        else:
            partial[gradient.device_mesh, axis, gradient.dtype].append(len(found))  # type: ignore[attr-defined]
            found.append(local(gradient))
    for (mesh, axis, _), places in partial.items():
        packed = torch.cat([found[i].reshape(-1) for i in places])
        dist.all_reduce(packed, group=mesh.get_group(axis))
        totals = packed.split([found[i].numel() for i in places])
        for i, total in zip(places, totals, strict=True):
            found[i] = total.view(found[i].shape)
    return found


def _partial_axis(gradient: Tensor, parameter: Tensor) -> int | None:
    """The one axis to add a gradient up over, where that is all it needs."""
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return None
    pairs = list(zip(gradient.placements, parameter.placements, strict=True))
    axes = [axis for axis, (own, wanted) in enumerate(pairs) if own != wanted]
    if len(axes) != 1 or pairs[axes[0]] != (Partial("sum"), Replicate()):
        return None
    return axes[0]


def shared_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, the same on every process, laid out as another is; no communication."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
