"""Sums over data-parallel processes in the midst of a backward pass."""

import torch.distributed as dist
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.sharding.groups import group_of

__all__ = ["RankSum"]


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
            self._own = (world, group_of(ranks, [self._group()]))

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
