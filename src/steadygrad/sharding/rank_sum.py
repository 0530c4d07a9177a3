"""Sums over data-parallel processes in a backward pass, and checks that they agree."""

import torch
import torch.distributed as dist
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.sharding.groups import group_of
from steadygrad.sharding.worlds import World, gather_json

__all__ = ["RankSum"]


class RankSum:
    """Sums a small vector over data-parallel processes and compares another, in one collective.

    It uses a process group of its own: a backward pass that reduces gradients has collectives
    under way, in an order that processes do not share with ours.

    Args:
        group: ``"all"`` for all processes, if there are several; None for this one alone; or the
            process group whose members see different samples.

    Attributes:
        members: The group, as it was handed in.

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
        self.members = group
        self._own: tuple[object, dist.ProcessGroup] | None = None

    @property
    def size(self) -> int:
        """Number of processes."""
        if self.members is None or not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group())

    def prepare(self, device: torch.device, options: str) -> None:
        """Creates the process group, once; every member must call this. Later calls are cheap.

        Args:
            device: Device of the sums.
            options: Text that must be the same everywhere for all vectors to have one length.

        Raises:
            InputError: If it differs; on every process.
        """
        if self.size == 1:
            return
        world = dist.group.WORLD
        if self._own is None or self._own[0] is not world:
            ranks = dist.get_process_group_ranks(self._group())
            # Only members call this, so that balancers in other groups need not know of it.
            own = group_of(ranks, [self._group()])
            texts = gather_json(options, World("all", own, len(ranks)), device)
            if any(text != options for text in texts):
                raise InputError(
                    "Expected the same options on every process. Found that they differ; this one "
                    f"has {options}. Remedy: build the balancer in the same way on all of them."
                )
            self._own = world, own

    def __call__(self, packed: Tensor, agreed: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers both vectors of all processes.

        Args:
            packed: Numbers to sum, float64 with shape ``(n,)``, on the device of :meth:`prepare`.
            agreed: Numbers that should be the same on all processes, float64 with shape ``(m,)``.

        Returns:
            The sum, and which of ``agreed`` differ, boolean with shape ``(m,)``; both the same on
            every process, bit for bit.
        """
        if self.size == 1:
            return packed, torch.zeros_like(agreed, dtype=torch.bool)
        # Adding zero turns -0.0 into 0.0, which the comparison of bits needs.
        row = torch.cat([packed, agreed + 0.0])
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, group=self._own[1] if self._own else None)
        # Summed here and not by an all-reduce: then the comparison needs no collective of its own.
        table = torch.stack(rows)
        # As integers, because NaN differs from itself.
        bits = table[:, len(packed) :].view(torch.int64)
        return table[:, : len(packed)].sum(0), (bits != bits[0]).any(0)

    def _group(self) -> "dist.ProcessGroup | None":
        return None if self.members == "all" else self.members  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, object]) -> "RankSum":
        """Shares the members: a process group cannot be copied."""
        return RankSum(self.members)

    def __reduce__(self) -> tuple[object, ...]:
        """Saves whether there was a group; the group itself cannot be saved."""
        return RankSum, ("all" if self.members is not None else None,)
