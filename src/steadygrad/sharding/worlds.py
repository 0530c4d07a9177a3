"""The processes that train one model together."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from steadygrad._checks import InputError

__all__ = [
    "World",
    "data_parallel_world",
    "fsdp_modules",
    "gather_json",
    "process_world",
    "replicas",
]

T = TypeVar("T")


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


_ALONE = World()


def process_world(group: "dist.ProcessGroup | str | None" = "all") -> World:
    """The processes that take every step together, whatever they share of the model.

    Args:
        group: ``"all"``: all there are; None: this one alone; or a process group.

    Raises:
        InputError: If it is none of these.
    """
    ready = dist.is_available() and dist.is_initialized()
    if group is None or (group == "all" and not ready):
        return _ALONE
    if group == "all":
        return World("all", None, dist.get_world_size())
    if not (ready and isinstance(group, dist.ProcessGroup)):
        raise InputError(
            "Parameter `process_group` should be 'all', None or a process group. Found "
            f"{group!r}. Remedy: `mesh.get_group('name')` for one dimension of a device mesh."
        )
    return World("all", group, dist.get_world_size(group))


def fsdp_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model`` that ``fully_shard`` was applied to, outermost first."""
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def data_parallel_world(model: nn.Module) -> World:
    """Finds out how ``model`` is trained: alone, with DDP or with FSDP2 (HSDP included).

    Wrappers may lie in any order: a compiled DDP model, a DDP model inside another module.
    Warns if there are several processes but the model is neither in DDP nor sharded by FSDP2.

    Args:
        model: The model as it is called in training, wrappers included.

    Returns:
        The world whose ranks see different samples.

    Raises:
        InputError: If a parameter is sharded over a mesh that `fully_shard` alone did not set up
            (tensor parallelism), or over only a part of the processes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    sharded = next(fsdp_modules(model), None) is not None
    for name, parameter in model.named_parameters():
        _refuse_other_shards(name, parameter, sharded)
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            group = module.process_group
            return World("ddp", group, dist.get_world_size(group))
        if (found := _replicated_group(module)) is not None:
            return World("ddp", *found)
    if sharded:
        return World("fsdp", None, dist.get_world_size())
    if dist.get_world_size() > 1:
        warnings.warn(
            f"Expected a DDP or fully_shard-ed model among {dist.get_world_size()} processes. "
            f"Found {type(model).__name__}: only this process's samples are measured. Remedy: "
            "hand in the model as it is called in training, wrappers included.",
            stacklevel=3,
        )
    return World()


def _replicated_group(module: nn.Module) -> "tuple[dist.ProcessGroup | None, int] | None":
    """Group and size of torch's composable DDP, `replicate`, as OLMo-core uses it; None elsewhere.

    It makes its DistributedDataParallel in the first forward pass, and no child of it.
    """
    from torch.distributed._composable.replicate import DDP, replicate

    if not isinstance(module, DDP):
        return None
    state = replicate.state(module)
    mesh = state._init_kwargs.get("device_mesh")
    group = mesh.get_group() if mesh is not None else state._init_kwargs.get("process_group")
    if state.has_initialized:
        group = state._ddp.process_group
    return group, dist.get_world_size(group)


def _refuse_other_shards(name: str, parameter: nn.Parameter, sharded: bool) -> None:
    """FSDP2 shards the last dimension of its mesh; HSDP replicates over one before it."""
    if not isinstance(parameter, DTensor):
        return
    *before, last = parameter.placements
    data_parallel = isinstance(last, Shard) and all(isinstance(p, Replicate) for p in before)
    whole = parameter.device_mesh.size() == dist.get_world_size()
    if not (sharded and data_parallel and len(before) <= 1 and whole):
        raise InputError(
            f"Expected parameters sharded by fully_shard alone, over all {dist.get_world_size()} "
            f"processes. Found {name!r} with {parameter.placements} on a mesh of "
            f"{tuple(parameter.device_mesh.shape)}. Remedy: tensor parallelism is not supported "
            "here; measure a copy of the run without it."
        )


def replicas(tensor: Tensor, world: World) -> int:
    """The number of processes of ``world`` that hold the same copy of this tensor's local part.

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


def gather_json(value: T, world: World, device: torch.device) -> list[T]:
    """One JSON-like value from each process, in order, on every process."""
    if world.size == 1:
        return [value]
    # JSON, not torch's object collectives: those unpickle what a peer sends.
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = _all_gather(torch.tensor([len(text)], device=device), world)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8, device=device)
    padded[: len(text)] = text.to(device)
    pairs = zip(_all_gather(padded, world), lengths, strict=True)
    return [json.loads(bytes(text[: int(length)].tolist())) for text, length in pairs]


def _all_gather(tensor: Tensor, world: World) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(world.size)]
    dist.all_gather(parts, tensor, group=world.group)
    return parts
