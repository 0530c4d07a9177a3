"""Sums of the losses' norms over all processes, in one collective."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.distributed import RankSum

__all__ = ["Exchange", "GradientRow", "JoinedSums"]

# A loss's gradients, one for each tensor of the outputs.
GradientRow = Sequence[Tensor | None]


class JoinedSums(NamedTuple):
    """Sums of one micro-batch.

    Attributes:
        norms: Sums of each loss's norms, with shape ``(K,)``.
        present: On how many processes each loss is present, with shape ``(K,)``.
        items: Number of items, with shape ``()``.
        products: Inner products of the gradients, with shape ``(K, K)``, or None.
    """

    norms: Tensor
    present: Tensor
    items: Tensor
    products: Tensor | None


class Exchange:
    """Sums over all processes, and checks that they agree.

    Processes may have the losses in another order each: vectors are sent sorted by name.

    Attributes:
        differs: Whether the processes' options or states ever differed, boolean with shape
            ``()``; None before the first sum of several processes.
    """

    def __init__(self, names: Sequence[str], ranks: RankSum) -> None:
        self.ranks = ranks
        self.differs: Tensor | None = None
        self._order = torch.tensor(sorted(range(len(names)), key=names.__getitem__), device="cpu")
        self._place = self._order.argsort()

    def prepare(self, device: torch.device, options: str) -> None:
        """Creates the process group, once, and refuses processes with other ``options`` each."""
        self.ranks.prepare(device, options)
        # Once, because copying from the host waits for the device.
        self._order, self._place = self._order.to(device), self._place.to(device)

    def __call__(self, own: JoinedSums, agreed: Mapping[str, Tensor]) -> JoinedSums:
        """Sums over all processes.

        Args:
            own: Sums of this process.
            agreed: Numbers that all processes should have in common: single ones and vectors with
                shape ``(K,)``. The names of options, which come first, are in backquotes.

        Raises:
            InputError: If the processes differ, on the CPU; on devices that would take a wait.
        """
        count, order, place = len(self._order), self._order, self._place
        packed = [own.norms[order], own.present[order], own.items.reshape(1)]
        if own.products is not None:
            packed.append(own.products[order][:, order].flatten())
        alike = [(x[order] if x.ndim else x.reshape(1)).double() for x in agreed.values()]
        total, differs = self.ranks(torch.cat(packed), torch.cat(alike))
        self._note(differs, agreed)
        norms, present = total[: 2 * count].view(2, count)[:, place]
        products = None
        if own.products is not None:
            products = total[2 * count + 1 :].view(count, count)[place][:, place]
        return JoinedSums(norms, present, total[2 * count], products)

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
            "Expected the same state and loss scale on every process. Found that they differ, "
            f"first in `{name}`. Remedy: hand the same `grad_scale` to all of them, and load a "
            "state, `reset` and `end_step` on all of them or on none."
        )
