"""Sums of the losses' norms over all processes, in one collective."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.formulas.balance import gram, norm_sum
from steadygrad.sharding import RankSum

__all__ = ["Exchange", "GradientRow", "JoinedSums"]

# A loss's gradients, one for each tensor of the outputs.
GradientRow = Sequence[Tensor | None]


class JoinedSums(NamedTuple):
    """Sums of one micro-batch over all processes.

    Attributes:
        sums: Sums of each loss's norms, with shape ``(K,)``.
        present: On how many processes each loss is present, with shape ``(K,)``.
        items: Number of items, with shape ``()``.
        products: Inner products of the gradients, with shape ``(K, K)``, or None.
    """

    sums: Tensor
    present: Tensor
    items: Tensor
    products: Tensor | None


class Exchange:
    """Measures each loss's gradients and sums the numbers over all processes.

    Args:
        names: The losses, in the order of all vectors. Processes may have another order each:
            vectors are sorted by name before they are sent.
        ranks: The processes that share each batch.

    Attributes:
        order: Places of the losses, sorted by name.
        differs: Whether the processes' options or states ever differed, boolean with shape
            ``()``; None before the first sum of several processes.
    """

    def __init__(self, names: Sequence[str], ranks: RankSum) -> None:
        self.ranks = ranks
        self.order = sorted(range(len(names)), key=names.__getitem__)
        self.differs: Tensor | None = None
        self._indices: tuple[Tensor, Tensor] | None = None

    def prepare(self, device: torch.device, options: str) -> None:
        """Creates the process group and what is needed on the device, once.

        Raises:
            InputError: If processes have other ``options`` each.
        """
        if self.ranks.size == 1:
            return
        self.ranks.prepare(device, options)
        if self._indices is None or self._indices[0].device != device:
            order = torch.tensor(self.order, device=device)
            self._indices = order, order.argsort()

    def __call__(
        self,
        rows: Sequence[GradientRow | None],
        items: int,
        agreed: Mapping[str, Tensor],
        *,
        per_item: bool,
        with_products: bool,
        device: torch.device,
    ) -> JoinedSums:
        """Sums over all processes.

        Args:
            rows: Each loss's gradients, None for a loss that is not present.
            items: Number of items in this process's micro-batch.
            agreed: Numbers that all processes should have in common: single ones and vectors with
                shape ``(K,)``, by the name for an error. Options come first, each as ```name```.
            per_item: Whether the norm is taken of each item.
            with_products: Whether to compute inner products.
            device: Device of the gradients.

        Raises:
            InputError: If the processes differ, on the CPU; elsewhere nobody waits to know.
        """
        # In float64, whatever a state was loaded as: processes without losses have nothing else.
        zero = torch.zeros((), dtype=torch.float64, device=device)
        one, count = torch.ones_like(zero), len(rows)
        present = [[g for g in row or () if g is not None] for row in rows]
        joined = JoinedSums(
            torch.stack([norm_sum(r, per_item=per_item) if r else zero for r in present]),
            torch.stack([one if r else zero for r in present]),
            torch.full_like(zero, items),
            None,
        )
        if with_products:
            products = gram(rows) if any(present) else zero.new_zeros(count, count)
            joined = joined._replace(products=products)
        return joined if self._indices is None else self._summed(joined, agreed, *self._indices)

    def _summed(
        self, own: JoinedSums, agreed: Mapping[str, Tensor], order: Tensor, place: Tensor
    ) -> JoinedSums:
        count = len(order)
        packed = [own.sums[order], own.present[order], own.items.reshape(1)]
        if own.products is not None:
            packed.append(own.products[order][:, order].flatten())
        alike = [x[order] if x.ndim else x.reshape(1) for x in agreed.values()]
        total, differs = self.ranks(torch.cat(packed), torch.cat([x.double() for x in alike]))
        self._note(differs, agreed)
        products = None
        if own.products is not None:
            products = total[2 * count + 1 :].view(count, count)[place][:, place]
        sums, present = total[: 2 * count].view(2, count)[:, place]
        return JoinedSums(sums, present, total[2 * count], products)

    def _note(self, differs: Tensor, agreed: Mapping[str, Tensor]) -> None:
        """Records whether processes differ, and raises where that is known without waiting."""
        now = differs.any()
        self.differs = now if self.differs is None else now | self.differs.to(now)
        if differs.device.type != "cpu" or not bool(now):
            return
        names = [name for name, value in agreed.items() for _ in range(value.numel())]
        name = names[differs.tolist().index(True)]
        if name.startswith("`"):
            raise InputError(
                f"Expected the same options on every process. Found that {name} differs; this one "
                f"has {agreed[name].tolist()}. Remedy: set it in the same way on all of them."
            )
        raise InputError(
            "Expected the same state and loss scale on every process. Found that they differ in "
            f"the {name}. Remedy: hand the same `grad_scale` to all of them, and load a state, "
            "`reset` and `end_step` on all of them or on none."
        )
