"""This process's parts of tensors."""

from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

__all__ = ["aligned", "first_shard", "is_on_mesh_of", "is_sharded", "local", "shared_out"]


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which this process holds a part."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: its shard if it is a DTensor, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FirstShard(NamedTuple):
    """The rows of a tensor that the first process of its mesh's last dimension holds.

    Attributes:
        shape: Shape of the rows; the tensor's own where it is not sharded.
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


def aligned(tensor: Tensor, like: Tensor) -> Tensor:
    """A gradient laid out as its parameter is; communicates only where it was not."""
    if not isinstance(like, DTensor) or not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements == like.placements:
        return tensor
    return tensor.redistribute(placements=like.placements)


def is_on_mesh_of(tensor: Tensor, like: Tensor) -> bool:
    """Whether :func:`shared_out` can lay a tensor out: it is plain, or on the other's mesh."""
    mesh = getattr(like, "device_mesh", None)
    return not isinstance(tensor, DTensor) or tensor.device_mesh == mesh


def shared_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor laid out as another is; a plain one is whole, and the same on every process.

    Communicates only where it is a DTensor of other placements.
    """
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return aligned(tensor, like)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
