"""Sums over the shards of all parameters of an optimizer, in one collective."""

from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.numerics import exact
from steadygrad.sharding.shard_sum import ShardSum

__all__ = ["PackedSum"]


class PackedSum:
    """Sums over the shards of all parameters of an optimizer, and one flag, in one collective.

    The columns of all parameters travel in every call, those that nobody works on as zeros: so
    they have one length on all processes, whatever each of them works on.

    Args:
        params: The parameters, in an order that is the same on all processes.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._count, self._device = len(params), params[0].device
        self._total = ShardSum(params, flags=1)

    @property
    def collectives(self) -> int:
        """Collectives of a call."""
        return self._total.collectives

    @property
    def is_uniform(self) -> bool:
        """Whether all processes that share a parameter find the same sums."""
        return self._total.is_uniform

    def __call__(
        self,
        indices: Sequence[Tensor],
        columns: Sequence[Tensor],
        rows: int,
        flag: Tensor | None = None,
        terms: Sequence[tuple[int | slice, Tensor]] = (),
        count: int = 0,
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Adds up over shards.

        Args:
            indices: Indices of some parameters, one tensor for each of ``columns``.
            columns: Local sums of these parameters, each with shape ``(rows, len(index))``; none if
                this process works on nothing and others may.
            rows: Number of rows, the same on all processes.
            flag: What every process must know, with shape ``()``; None: nothing.
            terms: For each index the numbers of joint sums, and each parameter's parts of them,
                the last axis as long as the index.
            count: Number of joint sums.

        Returns:
            The sums, whether the flag is up on any process, and the joint sums: their means over
            all processes that share a parameter, with shape ``(count)``.
        """
        device = columns[0].device if columns else self._device
        # In the widest type, so that the order of processes costs no digits.
        packed = torch.zeros(rows, self._count + 1, dtype=exact(device), device=device)
        joint = torch.zeros(count, self._count, dtype=exact(device), device=device)
        places = [index.to(device) for index in indices]
        for place, own in zip(places, columns, strict=True):
            packed[:, place] = own.to(packed)
        for place, (row, own) in zip(places, terms, strict=False):
            joint[row, place] = own.to(joint)
        if flag is not None:
            packed[0, -1] = flag.to(packed)
        packed, means = self._total.with_means(packed, joint)
        found = [packed[:, p].to(own) for p, own in zip(places, columns, strict=True)]
        return found, packed[0, -1] != 0, means
