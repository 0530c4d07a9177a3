"""What processes tell each other of a micro-batch, in one collective."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad.balance.window import Kind
from steadygrad.formulas.balance import gram, norm_sum
from steadygrad.sharding import RankSum

__all__ = ["Exchange", "Exchanged", "Row"]

Row = Sequence[Tensor | None]


class Exchanged(NamedTuple):
    """What all processes' losses come to, without what they carry; vectors with shape ``(K,)``.

    Attributes:
        sums: What the micro-batch's norms are made of.
        present: On how many processes each loss is there.
        items: Number of items, with shape ``()``.
        products: Inner products of the gradients, with shape ``(K, K)``, or None.
    """

    sums: Tensor
    present: Tensor
    items: Tensor
    products: Tensor | None


class Exchange:
    """Packs each loss's numbers, and unpacks those of all processes.

    Args:
        names: The losses, in the order of all vectors. Processes may each have their own order:
            what is exchanged is sorted by name.
        kind: Which norm is taken.
        ranks: The processes that share each batch.
    """

    def __init__(self, names: Sequence[str], kind: Kind, ranks: RankSum) -> None:
        self.kind, self.ranks = kind, ranks
        self.order = sorted(range(len(names)), key=names.__getitem__)
        self.place = sorted(range(len(names)), key=self.order.__getitem__)

    def __call__(
        self,
        rows: Sequence[Row | None],
        items: int,
        factor: Tensor | float,
        *,
        with_products: bool,
        common: str,
        alike: Sequence[Tensor],
        like: Tensor,
    ) -> Exchanged:
        """Sums over all processes.

        Args:
            rows: Each loss's gradients, None for one that is not there.
            items: Items in this process's micro-batch.
            factor: What a gradient is multiplied by to be one of losses that carry nothing.
            with_products: Whether to take inner products.
            common: What all processes should have alike, as a text.
            alike: Numbers that all processes should have alike: one, or one a loss.
            like: A tensor on the device.

        Raises:
            InputError: If they do not have that alike.
        """
        # In float64, whatever a state was loaded as: processes without losses have nothing else.
        zero = torch.zeros((), dtype=torch.float64, device=like.device)
        one, count = torch.ones_like(zero), len(rows)
        there = [[g for g in rows[k] or () if g is not None] for k in self.order]
        sums = [norm_sum(row, per_item=self.kind.per_item) if row else zero for row in there]
        packed = [*sums, *(one if row else zero for row in there), torch.full_like(zero, items)]
        if with_products:
            found = zero.new_zeros(count, count)
            if any(there):
                found = gram([rows[k] for k in self.order])
            packed += list(found.flatten())
        summed = self.ranks(torch.stack(packed), common, self._sorted(alike, zero))
        total = summed[: 2 * count + 1].unbind()
        norms = self._placed(total[:count])
        products = None
        if with_products:
            lines = summed[2 * count + 1 :].view(count, count)
            lines = self._placed(self._placed(lines.unbind()).unbind(1)).T
            products = lines * (factor / self.ranks.size) ** 2
        return Exchanged(
            norms * (factor if self.kind.per_item else factor**2),
            self._placed(total[count : 2 * count]),
            total[2 * count],
            products,
        )

    def _sorted(self, alike: Sequence[Tensor], zero: Tensor) -> Tensor:
        """Numbers in a line, those of the losses by name; none if there is nobody to compare."""
        if self.ranks.size == 1:
            return zero.new_zeros(0)
        rows = [x.unbind() if x.ndim else [x] for x in alike]
        picked = [[row[k] for k in self.order] if len(row) > 1 else row for row in rows]
        return torch.stack([x.to(zero) for row in picked for x in row])

    def _placed(self, sorted_by_name: Sequence[Tensor]) -> Tensor:
        """In the order of the names as they were given."""
        # Picked one by one: a list as an index is copied to the device.
        return torch.stack([sorted_by_name[k] for k in self.place])
