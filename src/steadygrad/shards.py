"""This process's parts of tensors, and sums over the parts of all processes, packed together."""

import copy
import io
import math
import pickle
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from steadygrad._checks import InputError, shown
from steadygrad._files import read_file
from steadygrad.distributed import Group, World, add_up, new_group
from steadygrad.numerics import exact

# What torch's own pickle of a checkpoint's layout is made of, beside types of numbers.
LAYOUT = {
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata "
    "MetadataIndex StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",
}
_WHOLE = checkpoints.StateDictOptions(full_state_dict=True)
# Axes of a mesh.
Axes = tuple[int, ...]
# A column, its place in a collective, its share of the sum there, and in how many shards it lies.
Slot = tuple[int, int, float, int]


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which this process holds a part."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: its shard if it is a DTensor, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FirstShard(NamedTuple):
    """Shape of the rows of a tensor that lie in its first shard, and whether they are here."""

    shape: tuple[int, ...]
    here: bool


def first_shard(tensor: Tensor) -> FirstShard | None:
    """The first rows of a tensor, which lie alike in its whole; None if its columns are sharded."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor) or not isinstance(tensor.placements[-1], Shard):
        return FirstShard(shape, True)
    if tensor.placements[-1].dim != 0:
        return None
    rows, coordinate = tensor.device_mesh.size(-1), tensor.device_mesh.get_coordinate()
    return FirstShard((-(-shape[0] // rows), *shape[1:]), (coordinate or [-1])[-1] == 0)


def first_row(tensor: Tensor) -> int | None:
    """Place in the whole tensor of the first row here; None if its rows are cut, or cut twice."""
    if not isinstance(tensor, DTensor):
        return 0
    split = [i for i, p in enumerate(tensor.placements) if type(p) is not Replicate]
    if not split:
        return 0
    kind = tensor.placements[split[0]]
    if len(split) > 1 or type(kind) is not Shard or kind.dim:
        return None
    mesh, rows = tensor.device_mesh, len(tensor)
    return min(rows, -(-rows // mesh.size(split[0])) * mesh.get_local_rank(split[0]))


def offsets(tensor: Tensor) -> tuple[int, ...]:
    """Place in the whole tensor of the first element here, by dimension."""
    place: tuple[int, ...] = ()
    if isinstance(tensor, DTensor):
        given = tensor.shape, tensor.device_mesh, tensor.placements
        place = compute_local_shape_and_global_offset(*given)[1]
    return place or (0,) * tensor.ndim


def is_copy(tensor: Tensor, rank: int) -> bool:
    """Whether the part here lies on a process before this one, too."""
    if not isinstance(tensor, DTensor):
        return rank > 0
    here = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return any(place and isinstance(kind, Replicate) for place, kind in here)


def replicas(tensor: Tensor, world: World) -> int:
    """On how many processes a tensor's local part lies: a sum over ``world`` counts it so often."""
    if not isinstance(tensor, DTensor):
        return world.size
    pairs = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in pairs if isinstance(placement, Replicate))


def aligned(tensor: Tensor, like: Tensor) -> Tensor:
    """A gradient laid out as its parameter is; communicates only where it was not."""
    if not isinstance(like, DTensor) or not isinstance(tensor, DTensor):
        return tensor
    same = tensor.placements == like.placements
    return tensor if same else tensor.redistribute(placements=like.placements)


def shared_out(tensor: Tensor, like: Tensor) -> Tensor:
    """:func:`aligned`, or a part of a plain tensor, which is whole and alike on every process."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return aligned(tensor, like)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def as_shard(part: Tensor, like: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor of some shape of which this is this process's part, laid out as another is."""
    if not isinstance(like, DTensor):
        return part
    mesh, placements = like.device_mesh, like.placements
    whole = torch.empty(shape, device="meta")
    found: Tensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return found


class PackedSum:
    """Sums over the shards of all parameters of an optimizer, and one flag, in one collective.

    Parameters whose processes are among another's travel with it; unrelated meshes make a
    collective each. Copies count with a share of the value. Processes that are not known to hold
    the same tensor (other experts, on another part of the mesh) have columns of their own.

    The columns of all parameters travel in every call, those that nobody works on as zeros: so they
    have one length on all processes of a mesh, which all make the same calls. Where processes may
    have different tensors (plain ones, whose columns stay as they are, or on parts of a mesh),
    replicas take part, too: a flag from one tensor must reach all replicas of the others.

    Args:
        params: The parameters, in an order that is the same on all processes.

    Attributes:
        is_uniform: Whether all processes that share a parameter find the same sums.
        collectives: Number of collectives of a call.

    Raises:
        InputError: If a DTensor is a partial sum, or this process is not part of its mesh.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        split = {i: _split(p) for i, p in enumerate(params) if isinstance(p, DTensor)}
        axes: dict[DeviceMesh, set[int]] = defaultdict(set)
        for mesh, some in split.values():
            axes[mesh].update(some)
        self.is_uniform = _are_alike([*axes], len(split) == len(params))
        if not self.is_uniform:
            axes = {mesh: {*range(mesh.ndim)} for mesh in axes}
        # For each mesh the ranks that one collective goes over.
        peers = {mesh: _peers(mesh, some) for mesh, some in axes.items()}
        widest = {mesh: _widest(ranks, peers) for mesh, ranks in peers.items()}
        slots: dict[DeviceMesh, list[Slot]] = defaultdict(list)
        widths: dict[DeviceMesh, int] = defaultdict(int)
        for column, (mesh, some) in split.items():
            shards = math.prod(mesh.size(axis) for axis in some)
            joined, part, parts = widest[mesh]
            # Parts may hold different tensors: each has its own place.
            share = shards * parts / len(peers[joined])
            slots[joined].append((column, widths[joined] + part, share, shards))
            widths[joined] += parts
        device = next((params[i].device for i in split), torch.device("cpu"))
        # Of each parameter in the joint sums, which all collectives add up one after the other.
        self._weights = torch.ones(len(params), dtype=exact(device), device=device)
        self._lanes: list[tuple[Group, Tensor, Tensor, int]] = []
        for mesh, own in slots.items():
            if (size := len(peers[mesh])) > 1:
                factors = [1 / size] * len(params)
                for column, _, _, shards in own:
                    factors[column] = shards / size
                self._weights *= self._weights.new_tensor(factors)
                group = _group(mesh, tuple(sorted(axes[mesh])), dist.group.WORLD)
                own.append((len(params), widths[mesh], 1.0, 1))  # the flag
                index = torch.tensor([slot[:2] for slot in own], device=device).T
                # A third in float32 is not one in float64.
                shares = self._weights.new_tensor([slot[2] for slot in own])
                self._lanes.append((group, index, shares, widths[mesh] + 1))
        self.collectives = len(self._lanes)

    def of_all(self, columns: Tensor) -> Tensor:
        """Adds up columns of all parameters, with shape ``(k, params)``."""
        if not self._lanes:
            return columns
        return self([torch.arange(len(self._weights))], [columns], len(columns))[0][0]

    def __call__(
        self,
        indices: Sequence[Tensor],
        columns: Sequence[Tensor],
        rows: int,
        flag: Tensor | None = None,
        terms: Sequence[tuple[int | slice, Tensor]] = (),
        count: int = 0,
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Adds up local sums over shards: columns ``(rows, len(index))``, for each of the indices.

        There are none if this process works on nothing and others may. ``flag``, ``()``, is what
        every process must know. ``terms`` are, for each index, the numbers of joint sums, of which
        there are ``count``, and each parameter's parts of them.

        Returned are the sums; whether the flag is up on any process; and the joint sums, with shape
        ``(count)``: their means over all processes that share a parameter.
        """
        # In the widest type, so that the order of processes costs no digits.
        packed = self._weights.new_zeros(rows, len(self._weights) + 1)
        joint = self._weights.new_zeros(count, len(self._weights))
        places = [index.to(packed.device) for index in indices]
        for place, own in zip(places, columns, strict=True):
            packed[:, place] = own.to(packed)
        for place, (row, own) in zip(places, terms, strict=False):
            joint[row, place] = own.to(joint)
        if flag is not None:
            packed[0, -1] = flag.to(packed)
        means = joint @ self._weights
        for group, (own, slots), shares, width in self._lanes:
            sent = packed.new_zeros(rows, width)
            sent[:, slots] = packed[:, own] * shares
            flat = add_up(torch.cat([sent.flatten(), means]), [group])
            packed[:, own] = flat[: sent.numel()].view_as(sent)[:, slots]
            means = flat[sent.numel() :]
        totals = [packed[:, place].to(own) for place, own in zip(places, columns, strict=True)]
        return totals, packed[0, -1] != 0, means


def _split(tensor: DTensor) -> tuple[DeviceMesh, Axes]:
    """The mesh of a tensor, and the axes that split it."""
    mesh, placements = tensor.device_mesh, tensor.placements
    here = mesh.get_coordinate()
    if here is None or any(isinstance(placement, Partial) for placement in placements):
        raise InputError(
            "Expected parameters that are sharded or replicated over this process and others. "
            f"Found {placements} on a mesh where this process is at {here}. Remedy: redistribute "
            "partial sums, and make optimizers only on the processes that hold the model."
        )
    return mesh, tuple(i for i, p in enumerate(placements) if not isinstance(p, Replicate))


def _peers(mesh: DeviceMesh, axes: Collection[int]) -> tuple[int, ...]:
    """The processes that differ from this one along these axes only, by rank."""
    here = mesh.get_coordinate() or ()
    places = tuple(slice(None) if axis in axes else here[axis] for axis in range(mesh.ndim))
    return tuple(mesh.mesh[places].flatten().tolist())


def _along(mesh: DeviceMesh, axes: Collection[int]) -> list[Group]:
    """The groups along each of some axes."""
    return [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]


@cache
def _group(mesh: DeviceMesh, axes: Axes, world: object) -> Group:
    """The group of this process and its peers; made once in a world, by its members alone."""
    if len(axes) == 1:
        return mesh.get_group(*axes)
    ranks, device = _peers(mesh, axes), torch.device(mesh.device_type)
    everybody = len(ranks) == dist.get_world_size()
    return None if everybody else new_group(ranks, _along(mesh, axes), device)


def _are_alike(meshes: Sequence[DeviceMesh], is_all: bool) -> bool:
    """Whether all tensors, on all processes that hold one of them, lie on one mesh."""
    differs = len(meshes) > 1 or not is_all
    for mesh in meshes:
        # Once in an optimizer's life: another process may hold a plain tensor.
        flag = torch.tensor([int(differs)], device=mesh.device_type)
        differs = bool(add_up(flag, _along(mesh, range(mesh.ndim))))
    return not differs


def _widest(
    own: tuple[int, ...], peers: Mapping[DeviceMesh, tuple[int, ...]]
) -> tuple[DeviceMesh, int, int]:
    """The mesh of the largest collective that some ranks take part in, their part and the parts.

    Parts of a mesh are the same pattern of ranks, moved; they have to fill it.
    """
    found = []
    for mesh, ranks in peers.items():
        places = [place for place, rank in enumerate(ranks) if rank in own]
        parts, left = list[list[int]](), [*range(len(ranks))]
        while left and len(places) == len(own):
            parts.append([left[0] + place - places[0] for place in places])
            left = [place for place in left if place not in parts[-1]]
        if sorted(chain(*parts)) == [*range(len(ranks))] and places in parts:
            found.append((len(ranks), mesh, parts.index(places), len(parts)))
    return max(found, key=lambda one: one[0])[1:]


class PartialGradients:
    """Adds up gradients that are partial sums: one collective for all of one type.

    Sequence parallelism leaves the gradients of whole parameters, a norm's gain, as partial sums.
    Before the first step all processes of a mesh agree on which these are: from then on a process
    without such a gradient adds zeros. One that is partial later must be so on all of them.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._layout = _layout(params)
        # Axes to add up over, of each gradient that is partial on any process.
        self._known: dict[int, Axes] | None = None

    def is_of(self, params: Sequence[Tensor]) -> bool:
        """Whether these parameters are sharded as the ones that it was made for."""
        return self._layout == _layout(params)

    def __call__(
        self, gradients: Sequence[Tensor | None], params: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Lays gradients, None where this process has none, out as their parameters are.

        Returned are this process's parts, and whether any process has the gradient, of partial ones
        only, boolean with shape ``(params)``; None: none is partial.
        """
        axes = [_partial_axes(g, p) for g, p in zip(gradients, params, strict=True)]
        if self._known is None:
            self._known = _agreed(axes, params)
        self._known |= {i: own for i, own in enumerate(axes) if own}
        found = [
            g if g is None else local(g if own else aligned(g, p))
            for g, p, own in zip(gradients, params, axes, strict=True)
        ]
        kinds: dict[Any, dict[int, Tensor]] = defaultdict(dict)
        for i, own in sorted(self._known.items()):
            g, p = found[i], params[i]
            here = local(p.detach()) if g is None else g
            # One that is whole already stays as it is, on all processes.
            part = here if axes[i] else torch.zeros_like(here)
            kinds[p.device_mesh, own, here.dtype][i] = part  # type: ignore[attr-defined]
        anywhere: dict[int, Tensor] = {}
        for (mesh, own, _), parts in kinds.items():
            yes = next(iter(parts.values())).new_ones(1)
            # Not copied from the host, which would wait for the device.
            flags = [yes if axes[i] else yes - 1 for i in parts]
            sent = torch.cat([*(part.reshape(-1) for part in parts.values()), *flags])
            add_up(sent, [mesh.get_group(axis) for axis in own])
            *totals, counts = sent.split([*(part.numel() for part in parts.values()), len(parts)])
            for (i, part), total, count in zip(parts.items(), totals, counts, strict=True):
                anywhere[i] = count > 0
                if axes[i] or found[i] is None:
                    found[i] = total.view(part.shape)
        if not anywhere:
            return found, None
        no = torch.zeros_like(next(iter(anywhere.values())))
        return found, torch.stack([anywhere.get(i, no).to(no.device) for i in range(len(params))])


def _layout(params: Sequence[Tensor]) -> list[Any]:
    """Mesh and placements of each parameter."""
    return [(getattr(p, "device_mesh", None), getattr(p, "placements", None)) for p in params]


def _partial_axes(gradient: Tensor | None, parameter: Tensor) -> Axes:
    """The axes to add a gradient up over, where that is all it needs."""
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return ()
    pairs = [*zip(gradient.placements, parameter.placements, strict=True)]
    axes = tuple(axis for axis, (own, wanted) in enumerate(pairs) if own != wanted)
    return axes if all(pairs[axis] == (Partial("sum"), Replicate()) for axis in axes) else ()


def _agreed(axes: Sequence[Axes], params: Sequence[Tensor]) -> dict[int, Axes]:
    """Axes of each gradient that is partial on any process; once in an optimizer's life."""
    copied: dict[DeviceMesh, list[int]] = defaultdict(list)
    for i, p in enumerate(params):
        if isinstance(p, DTensor) and any(isinstance(place, Replicate) for place in p.placements):
            copied[p.device_mesh].append(i)
    known = {}
    for mesh, places in copied.items():
        flags = [[int(axis in axes[i]) for axis in range(mesh.ndim)] for i in places]
        counts = torch.tensor(flags, device=mesh.device_type)
        add_up(counts, _along(mesh, range(mesh.ndim)))
        for i, row in zip(places, counts.tolist(), strict=True):
            if any(row):
                known[i] = tuple(axis for axis, count in enumerate(row) if count)
    return known


class ZeroSum:
    """Joint sums under ``ZeroRedundancyOptimizer``, which shares parameters out to processes.

    A parameter's rank alone needs its sums: what travels are the flag and the joint sums.
    """

    collectives, is_uniform = 1, False

    def __init__(self, owner: Any) -> None:
        self._group, self._device = owner.join_process_group, owner.join_device

    @classmethod
    def of_caller(cls) -> "ZeroSum | None":
        """The sum for the ``ZeroRedundancyOptimizer`` that is making an optimizer now, if one is.

        It tells the optimizer nothing of itself, so the calls under way are looked at.
        """
        module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
        frame = None if module is None else sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, module.ZeroRedundancyOptimizer):  # type: ignore[union-attr]
                return cls(owner) if owner.world_size > 1 else None
            frame = frame.f_back
        return None

    def __call__(
        self,
        indices: Sequence[Tensor],
        columns: Sequence[Tensor],
        rows: int,
        flag: Tensor | None = None,
        terms: Sequence[tuple[int | slice, Tensor]] = (),
        count: int = 0,
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """The columns as they are; the flag and the joint sums over all ranks."""
        packed = torch.zeros(count + 1, dtype=exact(self._device), device=self._device)
        for row, own in terms:
            packed[row] += own.to(packed).sum(-1)
        if flag is not None:
            packed[-1] = flag.to(packed)
            add_up(packed, [self._group])
        return list(columns), packed[-1] != 0, packed[:-1]


def shard_model(model: nn.Module) -> None:
    """Shards a model over all processes by FSDP2, in place: block by block, and then the rest."""
    blocks = [*model.children()]
    for block in blocks:
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            # FSDP2 refuses containers without a forward pass.
            blocks += block.children()
        elif next(block.parameters(), None) is not None:
            fully_shard(block)
    fully_shard(model)


def whole_states(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dicts of a sharded model and its optimizer with whole tensors, on every rank."""
    return checkpoints.get_state_dict(model, optimizer, options=_WHOLE)


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Loads a state dict with whole tensors into a sharded model; the state is not changed."""
    checkpoints.set_model_state_dict(model, copy.deepcopy(state), options=_WHOLE)


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads a state dict with whole tensors into a sharded model's optimizer."""
    checkpoints.set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=_WHOLE)


def read_layout(path: Path) -> Any:
    """The layout of a checkpoint of torch.distributed; UnpicklingError if it needs more pickle."""
    return _Layout(io.BytesIO(read_file(path, most=1 << 32))).load()


def read_checkpoint(folder: Path) -> dict[Any, Any]:
    """A folder of torch.distributed.checkpoint in plain memory, lists as dicts by their numbers."""
    layout = read_layout(folder / ".metadata")
    places = [(one.relative_path, one.offset) for one in layout.storage_data.values()]
    if len({*places}) < len(places):
        raise ValueError("two values in one place of a file")
    saved: dict[Any, Any] = {}
    for key, kind in layout.state_dict_metadata.items():
        *path, last = (layout.planner_data or {}).get(key, (key,))
        inner = saved
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = _value(folder, layout.storage_data, key, kind)
    return saved


def _value(folder: Path, stored: Mapping[MetadataIndex, Any], key: str, kind: Any) -> Any:
    """A value that is no tensor, or a tensor from its chunks."""
    if not isinstance(kind, TensorStorageMetadata):
        return _read(folder, stored[MetadataIndex(key)])
    parts = [(x, _read(folder, stored[MetadataIndex(key, x.offsets)])) for x in kind.chunks]
    size, dtype = torch.Size(kind.size), kind.properties.dtype
    wrong = ValueError(f"{shown(key)} in chunks that are not each of its elements, once")
    # A size that is made up would take all memory.
    if size.numel() * dtype.itemsize > sum(x.untyped_storage().nbytes() for _, x in parts):
        raise wrong
    whole, seen = torch.empty(size, dtype=dtype), torch.zeros(size, dtype=torch.bool)
    for chunk, part in parts:
        starts = zip(chunk.offsets, chunk.sizes, strict=True)
        place = tuple(slice(first, first + count) for first, count in starts)
        if (part.shape, part.dtype) != (whole[place].shape, dtype) or seen[place].any():
            raise wrong
        whole[place], seen[place] = part.detach(), True
    if not seen.all():
        raise wrong
    return whole


def _read(folder: Path, part: Any) -> Any:
    with open(folder / part.relative_path, "rb") as file:
        file.seek(part.offset)
        # Less than no byte would mean all of them.
        data = io.BytesIO(file.read(max(0, part.length)))
    return torch.load(data, map_location="cpu", weights_only=True)


class _Layout(pickle.Unpickler):
    """Reads a checkpoint's layout, and nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        """A class of ``LAYOUT``, or a type of numbers."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in LAYOUT.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {module}.{name}")
