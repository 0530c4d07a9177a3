"""Sums over the shards of many tensors, packed into one collective."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from steadygrad._checks import InputError
from steadygrad.numerics import exact
from steadygrad.sharding.groups import group_of

__all__ = ["ShardSum"]


@dataclass(frozen=True)
class Spread:
    """The processes that a tensor is spread over.

    Attributes:
        mesh: The outermost mesh that it lies on.
        sharded: Axes of this mesh that split it.
        axes: Axes of this mesh along which processes hold it, as shards or as copies.
        shards: Number of its shards.
        holders: Ranks of the processes that hold it.
    """

    mesh: DeviceMesh
    sharded: set[int]
    axes: set[int]
    shards: int
    holders: set[int]


class ShardSum:
    """Sums over the shards of many tensors, packed: one collective for all of them.

    Every tensor's local values are added up over the processes that hold its other shards. Tensors
    that are sharded over different axes of one mesh travel together over all these axes, and so do
    those whose processes are among another's. Copies count with a share of the value. Processes
    that are not known to hold the same tensor (other experts, on another part of the mesh) have
    columns of their own on the way. Tensors on unrelated meshes make a collective each.

    Every process of a mesh must make the same calls; one that holds an empty shard adds zeros.

    Args:
        tensors: The tensors, DTensors or plain ones; columns of plain ones are left as they are.
            Where there are some on any process, and where tensors lie on several parts of a mesh,
            the collective includes replicas as well, because a flag from one tensor must reach all
            replicas of the others.
        flags: Number of further columns, at the end, that are added up over all these processes:
            where there are several groups, one after the other, so that what is not zero stays so.

    Attributes:
        is_uniform: Whether all these processes find the same sums.

    Raises:
        InputError: If a DTensor is a partial sum.
    """

    def __init__(self, tensors: Sequence[Tensor], flags: int = 0) -> None:
        found = [_spread(tensor) for tensor in tensors]
        spreads = [spread for spread in found if spread is not None]
        self.is_uniform = _are_alike(spreads, len(spreads) == len(tensors))
        union: dict[DeviceMesh, set[int]] = {}
        for one in spreads:
            axes = one.sharded if self.is_uniform else one.axes
            union.setdefault(one.mesh, set()).update(axes)
        # For each mesh the ranks that one collective goes over.
        peers = {mesh: _peers(mesh, axes) for mesh, axes in union.items()}
        slots: dict[DeviceMesh, list[Slot]] = {}
        for column, spread in enumerate(found):
            # Copies elsewhere are asked for the flags and the means alone.
            if spread is not None and (spread.shards > 1 or not self.is_uniform):
                mesh, slot = _slot_of(column, spread, peers)
                slots.setdefault(mesh, []).append(slot)
        slots = {mesh: own for mesh, own in slots.items() if len(peers[mesh]) > 1}
        self._groups = [_axes_group(mesh, union[mesh]) for mesh in slots]
        self._sizes = [len(peers[mesh]) for mesh in slots]
        last = [Slot(len(tensors) + k, 0, 1, 1.0) for k in range(flags)]
        self._slots = [[*own, *last] for own in slots.values()]
        # Weight of each tensor in the mean over each group; the last column is for those in none.
        self._shares = torch.zeros(len(tensors), len(slots) + 1, dtype=torch.float64, device="cpu")
        self._shares[:, -1] = 1.0
        for place, own in enumerate(slots.values()):
            for slot in own:
                self._shares[slot.column, [place, -1]] = torch.tensor(
                    [slot.share / slot.parts, 0.0], dtype=torch.float64
                )
        self._constants: dict[torch.device, tuple[list[tuple[Tensor, ...]], Tensor]] = {}

    @property
    def collectives(self) -> int:
        """Collectives of a call."""
        return len(self._groups)

    def __call__(self, columns: Tensor) -> Tensor:
        """Adds up columns with shape ``(k, tensors + flags)``, whose last axis goes by tensor."""
        if not self._groups:
            return columns
        return self.with_means(columns, columns[:0, : len(self._shares)])[0]

    def with_means(self, columns: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
        """Adds up columns, and sums over several tensors that all processes agree on.

        Plain tensors, and those on a part of the mesh, may differ from process to process, and so
        may sums over several tensors. Their mean over the processes is the same on all of these.

        Args:
            columns: Local values, with shape ``(k, tensors + flags)``.
            terms: Local terms of each sum, with shape ``(sums, tensors)``.

        Returns:
            The columns, and the means with shape ``(sums)``.
        """
        constants, weights = self._constants_on(columns.device)
        sums = terms @ weights.to(terms.dtype)
        for place, (index, offsets, shares) in enumerate(constants):
            packed = columns.new_zeros(len(columns), sum(s.parts for s in self._slots[place]))
            packed[:, offsets] = columns[:, index] * shares.to(columns.dtype)
            # Sums are added up over their own group; of the others it takes the mean.
            mean = sums / self._sizes[place]
            mean[:, place] = sums[:, place]
            sent = torch.cat([packed.flatten(), mean.to(packed).flatten()])
            dist.all_reduce(sent, group=self._groups[place])
            found = sent[: packed.numel()].view_as(packed)[:, offsets]
            columns = columns.index_copy(1, index, found)
            sums = sent[packed.numel() :].view_as(sums)
        return columns, sums.sum(1)

    def _constants_on(self, device: torch.device) -> tuple[list[tuple[Tensor, ...]], Tensor]:
        # Copied to the device once: such a copy waits for it.
        if device not in self._constants:
            constants = [_constants(slots, device) for slots in self._slots]
            self._constants[device] = constants, self._shares.to(device, exact(device))
        return self._constants[device]


def _spread(tensor: Tensor) -> Spread | None:
    """The processes that a tensor is spread over; None: it is plain, and nothing is known."""
    if not isinstance(tensor, DTensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise InputError(
            "Expected parameters that are sharded or replicated. Found a partial DTensor. "
            "Remedy: redistribute it before it is handed to an optimizer."
        )
    if mesh.get_coordinate() is None:
        raise InputError(
            "Expected this process to be part of its parameters' mesh. Found that it is not. "
            "Remedy: make optimizers only on the processes that hold the model."
        )
    sharded = {axis for axis, p in enumerate(placements) if not isinstance(p, Replicate)}
    shards = _size(mesh, sharded)
    holders = set(mesh.mesh.flatten().tolist())
    root, names = mesh._get_root_mesh(), mesh.mesh_dim_names
    if names is None or not set(names) <= set(root.mesh_dim_names or ()):
        return Spread(mesh, sharded, set(range(mesh.ndim)), shards, holders)
    places = [(root.mesh_dim_names or ()).index(name) for name in names]
    return Spread(root, {places[axis] for axis in sharded}, set(places), shards, holders)


def _size(mesh: DeviceMesh, axes: set[int]) -> int:
    return math.prod(mesh.size(axis) for axis in axes)


def _peers(mesh: DeviceMesh, axes: set[int]) -> tuple[int, ...]:
    """The processes that differ from this one along these axes only, by rank."""
    here = mesh.get_coordinate()
    assert here is not None  # As is checked of every tensor's mesh, a part of this one.
    places = tuple(slice(None) if axis in axes else here[axis] for axis in range(mesh.ndim))
    return tuple(mesh.mesh[places].flatten().tolist())


def _are_alike(spreads: Sequence[Spread], is_all: bool) -> bool:
    """Whether all tensors, on all processes that hold one of them, are spread alike."""
    kinds = list({(one.mesh, tuple(sorted(one.axes))): None for one in spreads})
    differs = len(kinds) > 1 or not is_all
    for mesh, axes in kinds:
        for axis in axes:
            if mesh.size(axis) > 1:
                # Once in an optimizer's life: another process may hold a plain tensor.
                flag = torch.tensor([float(differs)], device=mesh.device_type)
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.get_group(axis))
                differs = bool(flag.item())
    return not differs


class Slot(NamedTuple):
    """The room of a tensor's column in a collective.

    A group may consist of parts that hold different tensors; each part has a column of its own.

    Attributes:
        column: Place of the column among all columns.
        part: Part of the group that this process is in.
        parts: Number of parts.
        share: Factor on the local values, for copies.
    """

    column: int
    part: int
    parts: int
    share: float


def _slot_of(
    column: int, spread: Spread, peers: Mapping[DeviceMesh, tuple[int, ...]]
) -> tuple[DeviceMesh, Slot]:
    """A tensor's slot in the largest collective that its own peers take part in, and its mesh."""
    own = {*peers[spread.mesh]}
    found = []
    for mesh, group in peers.items():
        parts = _parts(spread.holders, group) if own <= {*group} else None
        if parts is not None:
            copies = len(group) // parts[1]
            found.append((len(group), mesh, Slot(column, *parts, spread.shards / copies)))
    _, mesh, slot = max(found, key=lambda one: one[0])
    return mesh, slot


def _parts(holders: set[int], group: tuple[int, ...]) -> tuple[int, int] | None:
    """The part of a group that holds a tensor, and the number of parts; None: they do not fill it.

    Parts of a mesh along some of its axes are the same pattern of ranks, moved.
    """
    places = [place for place, rank in enumerate(group) if rank in holders]
    pattern = [place - places[0] for place in places]
    starts, left = [], set(range(len(group)))
    while left:
        starts.append(min(left))
        part = {starts[-1] + place for place in pattern}
        if not part <= left:
            return None
        left -= part
    return (starts.index(places[0]), len(starts)) if places[0] in starts else None


def _constants(slots: Sequence[Slot], device: torch.device) -> tuple[Tensor, ...]:
    """Columns of a group, their places in its collective, and their shares."""
    firsts = accumulate((slot.parts for slot in slots), initial=0)
    places = [first + slot.part for first, slot in zip(firsts, slots, strict=False)]
    # A third in float32 is not one in float64.
    shares = torch.tensor([slot.share for slot in slots], dtype=exact(device), device=device)
    index = torch.tensor([slot.column for slot in slots], device=device)
    return index, torch.tensor(places, device=device), shares


# The world that a group was made in, and the group: another world needs another.
_GROUPS: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def _axes_group(mesh: DeviceMesh, axes: set[int]) -> dist.ProcessGroup:
    """The process group of this process and its peers."""
    if len(axes) == 1:
        return mesh.get_group(next(iter(axes)))
    world, ranks = _world_group(), _peers(mesh, axes)
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
