"""Sums over the shards of many tensors, packed into one collective."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from steadygrad._checks import InputError
from steadygrad.formulas.tensors import exact
from steadygrad.sharding.groups import group_of

__all__ = ["PackedSum", "ShardSum"]


class ShardSum:
    """Sums over the shards of many tensors, packed: one collective for all of them.

    Every tensor's local values are added up over the processes that hold its other shards, and
    over no others: replicas are not asked. Tensors that are sharded over different axes of one mesh
    travel together over all these axes, and so do those whose processes are among another's: each
    with a share of its value, as often as it is held there. Tensors on unrelated meshes make a
    collective each.

    Every process of a mesh must make the same calls; one that holds an empty shard adds zeros.

    Args:
        tensors: The tensors, DTensors or plain ones; columns of plain ones are left as they are.
        flags: Number of further columns, at the end, that are added up over all these processes:
            where there are several groups, one after the other, so that what is not zero stays so.

    Raises:
        InputError: If a DTensor is a partial sum.
    """

    def __init__(self, tensors: Sequence[Tensor], flags: int = 0) -> None:
        found = [_shard_axes(tensor) for tensor in tensors]
        union: dict[DeviceMesh, set[int]] = {}
        for mesh, axes in found:
            if mesh is not None:
                union.setdefault(mesh, set()).update(axes)
        teams = {mesh: _team(mesh, axes) for mesh, axes in union.items()}
        homes = {mesh: _widest(team, teams) for mesh, team in teams.items()}
        kept = list(dict.fromkeys(homes.values()))
        self._groups = [_axes_group(mesh, union[mesh]) for mesh in kept]
        self._members = [
            [m is not None and homes[m] == mesh for m, _ in found] + [True] * flags for mesh in kept
        ]
        self._shares = [
            1.0 if mesh is None else _size(mesh, axes) / len(teams[homes[mesh]])
            for mesh, axes in found
        ] + [1.0] * flags
        self._constants: dict[torch.device, tuple[Tensor, list[Tensor]]] = {}

    @property
    def collectives(self) -> int:
        """Collectives of a call."""
        return len(self._groups)

    def __call__(self, columns: Tensor) -> Tensor:
        """Adds up columns with shape ``(k, tensors + flags)``, whose last axis goes by tensor."""
        if not self._groups:
            return columns
        shares, members = self._constants_on(columns.device)
        columns = columns * shares.to(columns.dtype)
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
            # A third in float32 is not one in float64.
            shares = torch.tensor(self._shares, dtype=exact(device), device=device)
            self._constants[device] = shares, members
        return self._constants[device]


class PackedSum:
    """Sums over the shards of all parameters of an optimizer, and one flag, in one collective.

    The columns of all parameters travel in every call, those that nobody works on as zeros: so
    they have one length on all processes, whatever each of them works on.

    Args:
        params: The parameters, in an order that is the same on all processes.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._layout, self._count = _layout_of(params), len(params)
        self._total = ShardSum(params, flags=1)

    @property
    def collectives(self) -> int:
        """Collectives of a call."""
        return self._total.collectives

    def is_of(self, params: Sequence[Tensor]) -> bool:
        """Whether these parameters are sharded as those that it was made for."""
        return self._layout == _layout_of(params)

    def __call__(
        self, indices: Sequence[Tensor], columns: Sequence[Tensor], flag: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Adds up over shards.

        Args:
            indices: Indices of some parameters, one tensor for each of ``columns``.
            columns: Local sums of these parameters, each with shape ``(k, len(index))``.
            flag: What every process must know, with shape ``()``; None: nothing.

        Returns:
            The sums, and whether the flag is up on any process.
        """
        device = columns[0].device
        # In the widest type, so that the order of processes costs no digits.
        packed = torch.zeros(len(columns[0]), self._count + 1, dtype=exact(device), device=device)
        places = [index.to(device) for index in indices]
        for place, own in zip(places, columns, strict=True):
            packed[:, place] = own.to(packed)
        if flag is not None:
            packed[0, -1] = flag.to(packed)
        packed = self._total(packed)
        found = [packed[:, p].to(own) for p, own in zip(places, columns, strict=True)]
        return found, packed[0, -1] != 0


def _layout_of(params: Sequence[Tensor]) -> list[Any]:
    return [(getattr(p, "device_mesh", None), getattr(p, "placements", None)) for p in params]


def _shard_axes(tensor: Tensor) -> tuple[DeviceMesh | None, set[int]]:
    """The outermost mesh a tensor lies on and the axes of it that split it; None: it is whole."""
    if not isinstance(tensor, DTensor):
        return None, set()
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise InputError(
            "Expected parameters that are sharded or replicated. Found a partial DTensor. "
            "Remedy: redistribute it before it is handed to an optimizer."
        )
    sharded = {axis for axis, p in enumerate(placements) if not isinstance(p, Replicate)}
    if _size(mesh, sharded) == 1:
        return None, set()
    root, names = mesh._get_root_mesh(), mesh.mesh_dim_names
    if names is None or not set(names) <= set(root.mesh_dim_names or ()):
        return mesh, sharded
    order = list(root.mesh_dim_names or ())
    return root, {order.index(names[axis]) for axis in sharded}


def _size(mesh: DeviceMesh, axes: set[int]) -> int:
    return math.prod(mesh.size(axis) for axis in axes)


def _team(mesh: DeviceMesh, axes: set[int]) -> tuple[int, ...]:
    """The processes that differ from this one along these axes only, by rank."""
    here = mesh.get_coordinate()
    if here is None:
        raise InputError(
            "Expected this process to be part of its parameters' mesh. Found that it is not. "
            "Remedy: make optimizers only on the processes that hold the model."
        )
    places = tuple(slice(None) if axis in axes else here[axis] for axis in range(mesh.ndim))
    return tuple(mesh.mesh[places].flatten().tolist())


def _widest(team: tuple[int, ...], teams: Mapping[DeviceMesh, tuple[int, ...]]) -> DeviceMesh:
    """The mesh of the largest team that all of this one is in; the first of equals."""
    return max(
        (m for m, other in teams.items() if {*team} <= {*other}), key=lambda m: len(teams[m])
    )


# The world that a group was made in, and the group: another world needs another.
_GROUPS: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def _axes_group(mesh: DeviceMesh, axes: set[int]) -> dist.ProcessGroup:
    """The group of this process's team."""
    if len(axes) == 1:
        return mesh.get_group(next(iter(axes)))
    world, ranks = _world_group(), _team(mesh, axes)
    if len(ranks) == world.size():
        return world
    if ranks not in _GROUPS or _GROUPS[ranks][0] is not world:
        # Only its members come to this line, and only once: later steps find the group here.
        made = group_of(ranks, [mesh.get_group(axis) for axis in sorted(axes)])
        _GROUPS[ranks] = world, made
    return _GROUPS[ranks][1]


def _world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "Expected a process group. Found none. Remedy: init_process_group first."
        )
    return group
