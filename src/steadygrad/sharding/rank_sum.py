"""Sums over data-parallel processes in the midst of a backward pass."""

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.sharding.groups import group_of

__all__ = ["RankSum"]

# Small enough for the sum of squares over 8192 processes to be exact.
SMALL = 2**20
# 2**63 divided by the golden ratio: its multiples, cut off, spread over all bits.
ODD = 0x4F1BBCDCBFA53E0B


class RankSum:
    """Adds up one small tensor over data-parallel processes, on a process group of its own.

    A backward pass that reduces gradients has collectives of its own under way, in an order that
    processes do not share with ours; one group for both could pair the wrong ones.

    Args:
        group: ``"all"`` for all processes, if there are several; None for this one alone; or the
            process group whose members see different samples.

    Attributes:
        members: The group, as it was handed in.
        differs: Whether processes ever had what they should have in common otherwise, boolean
            with shape ``()``; None before the first sum of several.

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
        self.differs: Tensor | None = None
        self._own: tuple[object, dist.ProcessGroup] | None = None

    @property
    def size(self) -> int:
        """Number of processes."""
        if self.members is None or not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group())

    def prepare(self, device: torch.device, common: str) -> None:
        """Makes the group, once; every member must get here. Afterwards calls are cheap.

        Args:
            device: Where the sums will be taken.
            common: What all processes must have alike for their sums to be of one length.

        Raises:
            InputError: If it is not the same on all of them; on each.
        """
        if self.size == 1:
            return
        world = dist.group.WORLD
        if self._own is None or self._own[0] is not world:
            ranks = dist.get_process_group_ranks(self._group())
            # Only members call this, so that balancers in other groups need not know of it.
            self._own = (world, group_of(ranks, [self._group()]))
            nothing = torch.empty(0, dtype=torch.float64, device=device)
            _, apart = self._reduce(nothing, common)
            if bool(apart.any()):
                self._own = None
                raise _other(common)

    def __call__(self, packed: Tensor, common: str, alike: Tensor | None = None) -> Tensor:
        """The sum over all processes, the same on each to the bit; one collective.

        Args:
            packed: Float64, with shape ``(n,)``, where :meth:`prepare` was told.
            common: What all processes should have alike in this call.
            alike: Float64 numbers that they should have alike to the bit, with shape ``(m,)``.

        Raises:
            InputError: If they differ in either and the sums are on the CPU; on each process.
                Elsewhere nobody waits to know: :attr:`differs` tells.
        """
        if self.size == 1:
            return packed
        summed, apart = self._reduce(packed, common, alike)
        differs = apart.any()
        self.differs = differs if self.differs is None else differs | self.differs.to(differs)
        if packed.device.type == "cpu" and bool(differs):
            raise _other(common) if bool(apart[0]) else _other_numbers()
        return summed

    def _reduce(
        self, packed: Tensor, common: str, alike: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The sum, and whether the processes' texts differ, and whether their numbers do."""
        text = packed.new_full((1,), float(zlib.crc32(common.encode()) % SMALL))
        marks = text if alike is None else torch.cat([text, _mark(alike)])
        summed = torch.cat([packed, marks, marks.square()])
        dist.all_reduce(summed, group=self._own[1] if self._own else None)
        mean, square = (summed[len(packed) :] / self.size).view(2, -1)
        # Numbers with this mean and this mean square are all this one.
        return summed[: len(packed)], (mean != marks) | (square != marks.square())

    def _group(self) -> "dist.ProcessGroup | None":
        return None if self.members == "all" else self.members  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, object]) -> "RankSum":
        """A process group cannot be copied, and a copy's members are the same."""
        return RankSum(self.members)

    def __reduce__(self) -> tuple[object, ...]:
        """Nor can it be saved: what is loaded belongs to all processes, or to one."""
        return RankSum, ("all" if self.members is not None else None,)


def _other(common: str) -> InputError:
    return InputError(
        "Expected the same options on every process. Found that they differ; this one has "
        f"{common}. Remedy: build the balancer, and change it, in the same way on all of them."
    )


def _other_numbers() -> InputError:
    return InputError(
        "Expected the same state and loss scale on every process. Found that they differ. Remedy: "
        "hand the same `grad_scale` to all of them, and load a state, `reset` and `end_step` on "
        "all of them or on none."
    )


def _mark(numbers: Tensor) -> Tensor:
    """A small whole number, with shape ``(1,)``, that tells these bits from most others."""
    # Zero has two signs, which are one number.
    bits = (numbers + 0.0).view(torch.int64)
    # The place is mixed in, so that numbers that have changed places are seen, too.
    mixed = bits + torch.arange(1, len(numbers) + 1, device=numbers.device) * ODD
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 29)) * ODD
    return (mixed >> 40).sum().remainder(SMALL).to(numbers).reshape(1)
