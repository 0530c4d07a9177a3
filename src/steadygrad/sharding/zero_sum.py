"""Sums over the ranks of torch's ZeroRedundancyOptimizer, which share the parameters out."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steadygrad.numerics import exact

__all__ = ["ZeroSum"]

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


class ZeroSum:
    """What :class:`PackedSum` is where every parameter lies whole on one rank of a group.

    A parameter's own sums are known to its rank, and nobody else needs them: what travels are the
    flag and the joint sums.

    Args:
        owner: The ``ZeroRedundancyOptimizer``.
    """

    collectives = 1
    is_uniform = False

    def __init__(self, owner: Any) -> None:
        self._group, self._device = owner.join_process_group, owner.join_device

    @classmethod
    def of_caller(cls) -> "ZeroSum | None":
        """That of the ``ZeroRedundancyOptimizer`` that is making an optimizer now, if one is.

        It tells the optimizer nothing of itself, so the calls under way are looked at.
        """
        kind: Any = getattr(sys.modules.get(_MODULE), "ZeroRedundancyOptimizer", None)
        frame = None if kind is None else sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, kind):
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
            dist.all_reduce(packed, group=self._group)
        return list(columns), packed[-1] != 0, packed[:-1]
