"""The processes that work together: joining them, adding up over them, comparing what they have.

Everything here also works without a process group, where a sum over processes is the value itself.
"""

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import DDP, replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from steadygrad._checks import InputError, launched

T = TypeVar("T")
# None is the default group.
Group = dist.ProcessGroup | None


def join_processes(device: torch.device) -> tuple[int, int, torch.device]:
    """Joins the processes that ``torchrun`` started, and returns rank, size and own device."""
    _, size = launched()
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


def check_gloo() -> None:
    """Adds a number over a gloo group of this process alone; torch's error where gloo cannot."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        add_up(torch.ones(()), [None])
    finally:
        leave_processes()


def add_up(packed: Tensor, groups: Sequence[Group]) -> Tensor:
    """Adds up a tensor in place over groups, one after the other."""
    for group in groups:
        dist.all_reduce(packed, group=group)
    return packed


def new_group(ranks: Sequence[int], spanning: Sequence[Group], device: torch.device) -> Group:
    """Makes a process group; all of its members call this, and no other process.

    torch names it by its ranks and by the number of groups that a process is in, which no public
    function tells. Where members differ in that (a group for rank 0 alone, the stages of a
    pipeline), each would wait for the others under a name of its own, for good. So they agree on
    the greatest number, over groups that together span them, and who is in fewer makes some alone.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    greatest = torch.tensor([count], device=device)
    for group in spanning:
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
    for _ in range(int(greatest) - count):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return dist.new_group(list(ranks), use_local_synchronization=True)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class World:
    """The processes that train one model together."""

    kind: str = "single"  # how gradients are reduced: also "ddp" and "fsdp"; or "all"
    group: Group = None
    size: int = 1

    @property
    def rank(self) -> int:
        """This process's place among them."""
        return dist.get_rank(self.group) if self.size > 1 else 0

    def sum(self, packed: Tensor) -> Tensor:
        """Adds up one tensor over all processes, in one collective."""
        return add_up(packed.clone(), [self.group]) if self.size > 1 else packed

    def gather(self, row: Tensor) -> Tensor:
        """One row from each process, in order, with shape ``(size, len(row))``."""
        if self.size == 1:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, group=self.group)
        return torch.stack(rows)


def gather_json(value: T, world: World, device: torch.device) -> list[T]:
    """One JSON-like value from each process, in order, on every process."""
    if world.size == 1:
        return [value]
    # JSON, not torch's object collectives: those unpickle what a peer sends.
    text = json.dumps(value).encode()
    longest = int(world.gather(torch.tensor([len(text)], device=device)).max())
    # JSON takes no notice of spaces at the end.
    row = torch.tensor([*text.ljust(longest)], dtype=torch.uint8, device=device)
    return [json.loads(bytes(row)) for row in world.gather(row).tolist()]


def process_world(group: Group | str = "all") -> World:
    """The processes that take steps together: ``"all"``, this one (None), or a process group."""
    if not (group is None or group == "all" or isinstance(group, dist.ProcessGroup)):
        raise InputError(
            "Parameter `process_group` should be 'all', None or a process group. Found "
            f"{group!r}. Remedy: `mesh.get_group('name')` for one dimension of a device mesh."
        )
    if group is None or not dist.is_initialized():
        return World()
    members = None if isinstance(group, str) else group
    return World("all", members, dist.get_world_size(members))


class RankSum:
    """Sums a small vector over processes (as of :func:`process_world`) and compares another.

    It uses a process group of its own: a backward pass that reduces gradients has collectives
    under way, in an order that processes do not share with ours.
    """

    def __init__(self, group: Group | str = "all") -> None:
        process_world(group)  # refuses what is none
        self.members = group
        # The default group beside which its own was made, and this one.
        self._own: tuple[object, World] = object(), World()

    @property
    def size(self) -> int:
        """Number of processes."""
        return process_world(self.members).size

    def prepare(self, device: torch.device, options: str) -> None:
        """Creates the process group for sums on a device, once; every member must call this.

        ``options`` settle the vectors' lengths, and must not differ.
        """
        world = process_world(self.members)
        if world.size == 1 or self._own[0] is dist.group.WORLD:
            return
        # Only members call this, so that balancers in other groups need not know of it.
        group = new_group(dist.get_process_group_ranks(world.group), [world.group], device)
        own = World("all", group, world.size)
        if any(text != options for text in gather_json(options, own, device)):
            raise InputError(
                "Expected the same options on every process. Found that they differ; this one "
                f"has {options}. Remedy: build the balancer in the same way on all of them."
            )
        self._own = dist.group.WORLD, own

    def __call__(self, packed: Tensor, agreed: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of ``packed``, and where ``agreed`` differs; both alike everywhere, to the bit.

        Both are float64 vectors.
        """
        made_in, own = self._own
        world = own if made_in is dist.group.WORLD else process_world(self.members)
        # Summed here and not by an all-reduce: then the comparison needs no collective of its own.
        # Adding zero turns -0.0 into 0.0, which the comparison of bits needs.
        table = world.gather(torch.cat([packed, agreed + 0.0]))
        # As integers, because NaN differs from itself.
        bits = table[:, len(packed) :].view(torch.int64)
        return table[:, : len(packed)].sum(0), (bits != bits[0]).any(0)

    def __deepcopy__(self, memo: dict[int, object]) -> "RankSum":
        """Shares the members: a process group cannot be copied."""
        return RankSum(self.members)

    def __reduce__(self) -> tuple[object, ...]:
        """Saves whether there was a group; the group itself cannot be saved."""
        return RankSum, ("all" if self.members is not None else None,)


def fsdp_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model`` that ``fully_shard`` was applied to, outermost first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def data_parallel_world(model: nn.Module) -> World:
    """The processes that see different samples of a model: alone, DDP, or FSDP2 (HSDP included).

    Warns of several processes and a model that is neither. Wrappers may lie in any order.

    Raises:
        InputError: If a parameter is sharded over a mesh that `fully_shard` alone did not set up
            (tensor parallelism), or over only a part of the processes.
    """
    if not dist.is_initialized():
        return World()
    sharded = next(fsdp_modules(model), None) is not None
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        # FSDP2 shards the last dimension of its mesh; HSDP replicates over one before it.
        *before, last = parameter.placements
        by_samples = isinstance(last, Shard) and all(isinstance(p, Replicate) for p in before)
        whole = parameter.device_mesh.size() == dist.get_world_size()
        if not (sharded and by_samples and len(before) <= 1 and whole):
            raise InputError(
                "Expected parameters sharded by fully_shard alone, over all "
                f"{dist.get_world_size()} processes. Found {name!r} with {parameter.placements} on "
                f"a mesh of {tuple(parameter.device_mesh.shape)}. Remedy: tensor parallelism is "
                "not supported here; measure a copy of the run without it."
            )
    for module in model.modules():
        if (group := _replicated_over(module)) is not None:
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


def _replicated_over(module: nn.Module) -> Group:
    """The group of DDP, or of torch's composable DDP, `replicate`, as OLMo-core uses it."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module.process_group
    if not isinstance(module, DDP):
        return None
    state = replicate.state(module)
    if state.has_initialized:
        return state._ddp.process_group
    # It makes its DistributedDataParallel in the first forward pass, and no child of it.
    mesh = state._init_kwargs.get("device_mesh")
    group = mesh.get_group() if mesh is not None else state._init_kwargs.get("process_group")
    return group or dist.group.WORLD
