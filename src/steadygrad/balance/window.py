"""Norms of one optimizer step's micro-batches, and their average over steps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadygrad.averages import DoubleBuffers, MaskedAverages
from steadygrad.formulas.balance import norms_from_sums

__all__ = ["Changes", "Kind", "NormAverages", "commit"]

Changes = list[tuple[Tensor, Tensor]]


@torch.no_grad()
def commit(changes: Changes) -> None:
    """Gives each buffer its new value, now that nothing can fail any more."""
    for buffer, value in changes:
        buffer.copy_(value)


class Kind(NamedTuple):
    """Which norm is averaged; see :func:`steadygrad.formulas.balance.norms_from_sums`.

    Attributes:
        per_item: Whether items have norms of their own.
        batch_independent: Whether it is the norm of one item's loss.
    """

    per_item: bool
    batch_independent: bool

    def norms(self, sums: Tensor, items: Tensor, ranks: int) -> Tensor:
        """Norms from sums over items."""
        return norms_from_sums(
            sums,
            items,
            per_item=self.per_item,
            batch_independent=self.batch_independent,
            ranks=ranks,
        )


class NormAverages(DoubleBuffers):
    """Averages over steps of norms that are pooled over each step's micro-batches.

    A micro-batch sees the average as it would be if the step ended with it. So a step moves the
    average once, by the norm of all its micro-batches, however many there are. All of this is
    decided on the device: whether the step ends is a tensor like the rest.

    Args:
        count: Number of losses.
        kind: Which norm is averaged.

    Attributes:
        lag: Whether micro-batches see the average as it was before the step, if there is one.
    """

    sums: Tensor
    items: Tensor
    parts: Tensor
    position: Tensor
    spoiled: Tensor

    def __init__(self, count: int, kind: Kind) -> None:
        super().__init__()
        self.kind, self.lag = kind, False
        self.steps = MaskedAverages(0.0, count)
        for name in ("sums", "items", "parts"):
            self.register_buffer(name, torch.zeros(count, dtype=torch.float64))
        # Whether the pool may hold something: without micro-batches there is no need for one.
        self._open = False
        self.register_buffer("position", torch.zeros((), dtype=torch.float64))
        self.register_buffer("spoiled", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def preview(
        self,
        sums: Tensor,
        items: Tensor,
        active: Tensor,
        *,
        ranks: int,
        micro_batches: int,
        skipped: Tensor | None = None,
    ) -> tuple[Tensor, Changes]:
        """What one micro-batch makes of the averages; takes nothing in.

        Args:
            sums: What the norms are made of, with shape ``(K,)``.
            items: Number of items, with shape ``()``.
            active: Which losses have a norm, boolean with shape ``(K,)``.
            ranks: Number of processes behind ``sums``.
            micro_batches: How many micro-batches make a step.
            skipped: Whether this step's weights will not be updated, boolean with shape ``()``;
                then it moves no average, whatever its other micro-batches are. None: it is not.

        Returns:
            Averages to scale by, with shape ``(K,)``, NaN for losses that never had a norm; and
            what :func:`commit` takes in.
        """
        if micro_batches == 1 and not self._open:
            norms = self.kind.norms(sums, items, ranks)
            total, mass = self.steps.with_values(norms, active)
            where = None if skipped is None else skipped.logical_not()
            return self._seen(total, mass), self._ended(total, mass, where)
        # Not taken back should the micro-batch fail: an empty pool changes no number.
        self._open = True
        spoiled = self.spoiled if skipped is None else torch.maximum(self.spoiled, skipped.double())
        one = active.to(sums)
        pooled = self.sums + torch.where(active, sums, 0.0)
        counted, parts = self.items + items * one, self.parts + one
        norms = self.kind.norms(pooled / parts, counted / parts, ranks)
        total, mass = self.steps.with_values(norms, parts > 0)
        position = self.position + 1
        ended = position >= micro_batches
        pool = (
            (self.sums, pooled),
            (self.items, counted),
            (self.parts, parts),
            (self.position, position),
            (self.spoiled, spoiled),
        )
        going_on = ended.logical_not()
        changes = self._ended(total, mass, ended & (spoiled == 0))
        changes += [(buffer, value * going_on) for buffer, value in pool]
        return self._seen(total, mass), changes

    @torch.no_grad()
    def end_step(self, ranks: int) -> None:
        """Ends the step with the micro-batches there have been; without any, does nothing."""
        if not self._open:
            return
        there = self.parts > 0
        norms = self.kind.norms(self.sums / self.parts, self.items / self.parts, ranks)
        commit(self._ended(*self.steps.with_values(norms, there), self.spoiled == 0))
        for buffer in (self.sums, self.items, self.parts, self.position, self.spoiled):
            buffer.zero_()
        self._open = False

    def _ended(self, total: Tensor, mass: Tensor, where: Tensor | None) -> Changes:
        """A step's averages, where there is one to take in."""
        if where is not None:
            total = torch.where(where, total, self.steps.total)
            mass = torch.where(where, mass, self.steps.mass)
        return [(self.steps.total, total), (self.steps.mass, mass)]

    def _seen(self, total: Tensor, mass: Tensor) -> Tensor:
        """The averages that scales are made of, when they are about to become these."""
        if self.lag:
            return torch.where(self.steps.mass > 0, self.steps.value(), total / mass)
        return total / mass

    def _load_from_state_dict(self, *state: Any, **options: Any) -> None:
        super()._load_from_state_dict(*state, **options)
        self._open = True

    def reset_parameters(self) -> None:
        """Forgets every norm."""
        for buffer in self.buffers():
            buffer.zero_()
        self._open = False
