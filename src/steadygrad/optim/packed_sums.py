"""Sums over shards, packed into one collective."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.sharding import ShardSum, is_sharded

__all__ = ["PackedSums"]


class PackedSums:
    """Adds up what processes have of their shards; keeps the groups while the layout stays."""

    def __init__(self) -> None:
        self._known: tuple[Any, ShardSum] | None = None

    def over(
        self, params: list[Tensor], groups: Sequence[Mapping[str, Any]]
    ) -> Callable[[list[Tensor]], list[Tensor]]:
        """What adds up columns of sums over shards.

        Args:
            params: The parameters, in the columns' order.
            groups: The optimizer's groups, whose order is the same on all processes.

        Returns:
            A function of a list of sums, each with shape ``(k, some parameters)``, that returns
            them over all shards; one collective, none where nothing is sharded.
        """
        if not any(map(is_sharded, params)):
            return lambda columns: columns
        order = list(range(len(params)))
        if all(p.device.type == "cpu" for p in params):
            # Who is for compiled loops may differ from process to process: by the groups' order.
            known = (p for group in groups for p in group["params"])
            places = {id(p): i for i, p in enumerate(known)}
            order.sort(key=lambda i: places[id(params[i])])
            params = [params[i] for i in order]
        layout = [(getattr(p, "device_mesh", None), getattr(p, "placements", None)) for p in params]
        if self._known is None or self._known[0] != layout:
            self._known = (layout, ShardSum(params))
        total = self._known[1]

        def over_shards(columns: list[Tensor]) -> list[Tensor]:
            if not total.collectives:
                return columns
            # In float64, so that the sum's order among processes costs no digits.
            packed = torch.cat([c.to(columns[0].device, torch.float64) for c in columns], dim=1)
            if order != sorted(order):
                packed = total(packed[:, order])[:, _inverse(order)]
            else:
                packed = total(packed)
            parts = packed.split([c.shape[1] for c in columns], dim=1)
            return [part.to(c) for part, c in zip(parts, columns, strict=True)]

        return over_shards


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
