"""Local shards and packed sums: all that the tools need of torch.distributed.

Everything here also works without a process group, where a sum over ranks is the value itself.
"""

import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from steadygrad._checks import InputError

__all__ = [
    "RankSum",
    "ShardSum",
    "World",
    "aligned",
    "data_parallel_world",
    "fsdp_modules",
    "gather_json",
    "is_sharded",
    "join_processes",
    "leave_processes",
    "local",
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


def fsdp_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model`` that ``fully_shard`` was applied to, outermost first."""
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def data_parallel_world(model: nn.Module) -> World:
    """Finds out how ``model`` is trained: alone, with DDP or with FSDP2 (HSDP included).

    Wrappers may lie in any order: a compiled DDP model, a DDP model inside another module.
    Warns where there are several processes but nothing that makes them one.

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


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which this process holds a part."""
    return isinstance(tensor, DTensor)


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


class ShardSum:
    """Sums over the shards of many tensors, packed: one collective for all of them.

    Every tensor's local values are added up over the processes that hold its other shards, and
    over no others: replicas are not asked. Tensors that are sharded over different axes of one mesh
    travel together over all these axes, those that are replicated along one of them with a share
    of their value. Tensors on unrelated meshes make a collective each.

    Every process of a mesh must make the same calls; one that holds an empty shard adds zeros.

    Args:
        tensors: The tensors, DTensors or plain ones; these are left as they are.

    Raises:
        InputError: If a DTensor is a partial sum.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        found = [_shard_axes(tensor) for tensor in tensors]
        union: dict[DeviceMesh, set[int]] = {}
        for mesh, axes in found:
            if mesh is not None and axes:
                union.setdefault(mesh, set()).update(axes)
        self._groups = [_axes_group(mesh, axes) for mesh, axes in union.items()]
        self._members = [[m == mesh and bool(axes) for m, axes in found] for mesh in union]
        self._shares = [
            1 / math.prod(mesh.size(axis) for axis in union[mesh] - axes) if axes and mesh else 1.0
            for mesh, axes in found
        ]
        self._constants: dict[torch.device, tuple[Tensor, list[Tensor]]] = {}

    @property
    def collectives(self) -> int:
        """How many collectives a call makes."""
        return len(self._groups)

    def __call__(self, columns: Tensor) -> Tensor:
        """Adds up ``columns`` with shape ``(k, tensors)``, whose last axis goes by tensor."""
        if not self._groups:
            return columns
        shares, members = self._constants_on(columns.device)
        columns = columns * shares
        for group, member in zip(self._groups, members, strict=True):
            # The whole vector travels, the places of others as zeros: no index, no host wait.
            packed = torch.where(member, columns, 0.0)
            dist.all_reduce(packed, group=group)
            columns = torch.where(member, packed, columns)
        return columns

    def _constants_on(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        # Copied to the device once: such a copy waits for it.
        if device not in self._constants:
            members = [torch.tensor(member, device=device) for member in self._members]
            self._constants[device] = torch.tensor(self._shares, device=device), members
        return self._constants[device]


def _shard_axes(tensor: Tensor) -> tuple[DeviceMesh | None, set[int]]:
    """The outermost mesh a tensor lies on, and the axes of it that it is sharded over."""
    if not isinstance(tensor, DTensor):
        return None, set()
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise InputError(
            "Expected parameters that are sharded or replicated. Found a partial DTensor. "
            "Remedy: redistribute it before it is handed to an optimizer."
        )
    sharded = {axis for axis, p in enumerate(placements) if not isinstance(p, Replicate)}
    root, names = mesh._get_root_mesh(), mesh.mesh_dim_names
    if names is None or not set(names) <= set(root.mesh_dim_names or ()):
        return mesh, sharded
    order = list(root.mesh_dim_names or ())
    return root, {order.index(names[axis]) for axis in sharded}


_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _axes_group(mesh: DeviceMesh, axes: set[int]) -> dist.ProcessGroup:
    """The processes that differ from this one along these axes only."""
    if len(axes) == 1:
        return mesh.get_group(next(iter(axes)))
    here = mesh.get_coordinate()
    if here is None:
        raise InputError(
            "Expected this process to be part of the mesh. Found that it is not. Remedy: "
            "build the optimizer on the mesh's own processes only."
        )
    places = tuple(slice(None) if axis in axes else here[axis] for axis in range(mesh.ndim))
    ranks = tuple(mesh.mesh[places].flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return _world_group()
    if ranks not in _GROUPS:
        # Only its members come to this line, and only once: later steps find the group here.
        _GROUPS[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _GROUPS[ranks]


def _world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "Expected a process group. Found none. Remedy: init_process_group first."
        )
    return group


def aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient laid out as its parameter is; communicates only where it was not."""
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def join_processes(device: torch.device) -> tuple[int, int, torch.device]:
    """Joins the processes that ``torchrun`` started; alone without it.

    Args:
        device: Kind of device to train on.

    Returns:
        This process's rank, the number of processes, and this process's own device.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        # A rank that died without closing its sockets must not hold the others for long.
        dist.init_process_group(backend, timeout=timedelta(minutes=5))
    return dist.get_rank(), size, device


def leave_processes() -> None:
    """Ends the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


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


class RankSum:
    """Adds up one small tensor over data-parallel processes, on a process group of its own.

    A backward pass that reduces gradients has collectives of its own under way, in an order that
    processes do not share with ours; one group for both could pair the wrong ones.

    Args:
        group: ``"all"`` for all processes, if there are several; None for this one alone; or the
            process group whose members see different samples.

    Raises:
        InputError: If it is none of these.
    """

    def __init__(self, group: "dist.ProcessGroup | str | None" = "all") -> None:
        is_group = dist.is_available() and isinstance(group, dist.ProcessGroup)
        if not (group is None or group == "all" or is_group):
            raise InputError(
                "Parameter `process_group` should be 'all', None or a process group. Found "
                f"{group!r}. Remedy: `mesh.get_group('name')` for one dimension of a device mesh."
            )
        self._members = group
        self._own: tuple[object, dist.ProcessGroup] | None = None

    @property
    def size(self) -> int:
        """Number of processes."""
        if self._members is None or not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group())

    def prepare(self) -> None:
        """Makes the group, once; every member must get here. Afterwards calls are cheap."""
        if self.size == 1:
            return
        world = dist.group.WORLD
        if self._own is None or self._own[0] is not world:
            ranks = dist.get_process_group_ranks(self._group())
            # Only members call this, so that balancers in other groups need not know of it.
            own = dist.new_group(ranks, use_local_synchronization=True)
            self._own = (world, own)

    def __call__(self, packed: Tensor) -> Tensor:
        """The sum over all processes, the same on each to the bit; one collective."""
        if self.size == 1:
            return packed
        self.prepare()
        packed = packed.clone()
        dist.all_reduce(packed, group=self._own[1] if self._own else None)
        return packed

    def _group(self) -> "dist.ProcessGroup | None":
        return None if self._members == "all" else self._members  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, object]) -> "RankSum":
        """A process group cannot be copied, and a copy's members are the same."""
        return RankSum(self._members)

    def __reduce__(self) -> tuple[object, ...]:
        """Nor can it be saved: what is loaded belongs to all processes, or to one."""
        return RankSum, ("all" if self._members is not None else None,)
