"""Local shards and packed sums: all that the tools need of torch.distributed.

Everything here also works without a process group, where a sum over ranks is the value itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from steadygrad._checks import InputError

__all__ = ["World", "data_parallel_world", "fsdp_modules", "local", "replicas"]


@dataclass(frozen=True)
class World:
    """The processes that train one model together.

    Attributes:
        kind: ``"single"``, ``"ddp"`` or ``"fsdp"``: how the gradients are reduced.
        group: Process group of all of them; None means the default group or a single process.
        size: Number of processes.
    """

    kind: str = "single"
    group: dist.ProcessGroup | None = None
    size: int = 1

    def sum(self, packed: Tensor) -> Tensor:
        """Adds up one tensor over all processes, in one collective."""
        if self.size > 1:
            packed = packed.clone()
            dist.all_reduce(packed, group=self.group)
        return packed


def fsdp_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model`` that ``fully_shard`` was applied to, outermost first."""
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def data_parallel_world(model: nn.Module) -> World:
    """Finds out how ``model`` is trained: alone, with DDP or with FSDP2 (HSDP included).

    Args:
        model: The model as it is called in training, wrappers included.

    Returns:
        The world whose ranks see different samples.

    Raises:
        InputError: If parameters are sharded over a mesh that `fully_shard` did not set up
            (tensor parallelism), or over only a part of the processes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    if isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
        return World("ddp", group, dist.get_world_size(group))
    if next(fsdp_modules(model), None) is None:
        return World()
    return World("fsdp", None, _fsdp_size(model))


def _fsdp_size(model: nn.Module) -> int:
    size = dist.get_world_size()
    for name, parameter in model.named_parameters():
        mesh_size = parameter.device_mesh.size() if isinstance(parameter, DTensor) else size
        if mesh_size != size:
            raise InputError(
                f"Expected every parameter on one mesh of all {size} processes. Found {name!r} on "
                f"a mesh of {mesh_size}. Remedy: apply fully_shard to the whole model."
            )
    return size


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: its shard if it is a DTensor, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replicas(tensor: Tensor, world: World) -> int:
    """How many processes of ``world`` hold the same copy of this tensor's local part.

    Dividing by it lets a plain sum over all processes count every element once.
    """
    if not isinstance(tensor, DTensor):
        return world.size
    copies = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Partial):
            raise InputError(
                "Expected a reduced gradient. Found a partial DTensor. "
                "Remedy: call `step()` after the backward pass that synchronises gradients."
            )
        copies *= size if isinstance(placement, Replicate) else 1
    return copies
