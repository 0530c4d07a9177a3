"""Norms of one optimizer step's micro-batches, and their average over steps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadygrad.averages import MaskedAverages, WideBuffers
from steadygrad.formulas.balance import norms_from_sums

__all__ = ["Kind", "NormAverages"]


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


class NormAverages(WideBuffers):
    """Averages over steps of norms that are pooled over each step's micro-batches.

    A micro-batch sees the average as it would be if the step ended with it. So a step moves the
    average once, by the norm of all its micro-batches, however many there are. All of this is
    decided on the device: whether the step ends is a tensor like the rest.

    Args:
        decay: Weight of the average so far, in [0, 1].
        count: Number of losses.
        kind: Which norm is averaged.
        lag: Whether micro-batches see the average as it was before the step, if there is one.
    """

    sums: Tensor
    items: Tensor
    parts: Tensor
    position: Tensor
    spoiled: Tensor

    def __init__(self, decay: float, count: int, kind: Kind, lag: bool) -> None:
        super().__init__()
        self.kind, self.lag = kind, lag
        self.steps = MaskedAverages(decay, count)
        for name in ("sums", "items", "parts"):
            self.register_buffer(name, torch.zeros(count, dtype=torch.float64))
        # Whether the pool may hold something: without micro-batches there is no need for one.
        self._open = False
        self.register_buffer("position", torch.zeros((), dtype=torch.float64))
        self.register_buffer("spoiled", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(
        self,
        sums: Tensor,
        items: Tensor,
        active: Tensor,
        *,
        ranks: int,
        micro_batches: int,
        skipped: Tensor | None = None,
    ) -> Tensor:
        """Takes in one micro-batch and returns the averages to scale it by.

        Args:
            sums: What the norms are made of, with shape ``(K,)``.
            items: Number of items, with shape ``()``.
            active: Which losses have a norm, boolean with shape ``(K,)``.
            ranks: Number of processes behind ``sums``.
            micro_batches: How many micro-batches make a step.
            skipped: Whether this step's weights will not be updated, boolean with shape ``()``;
                then it moves no average, whatever its other micro-batches are. None: it is not.

        Returns:
            Averages with shape ``(K,)``; NaN for losses that never had a norm.
        """
        if micro_batches == 1 and not self._open:
            norms = self.kind.norms(sums, items, ranks)
            total, mass = self.steps.with_values(norms, active)
            averages = self._seen(total, mass)
            self._end(total, mass, None if skipped is None else skipped.logical_not())
            return averages
        self._open = True
        spoiled = self.spoiled if skipped is None else torch.maximum(self.spoiled, skipped.double())
        one = active.to(sums)
        pooled = self.sums + torch.where(active, sums, 0.0)
        counted, parts = self.items + items * one, self.parts + one
        norms = self.kind.norms(pooled / parts, counted / parts, ranks)
        total, mass = self.steps.with_values(norms, parts > 0)
        averages = self._seen(total, mass)
        position = self.position + 1
        ended = position >= micro_batches
        self._end(total, mass, ended & (spoiled == 0))
        going_on = ended.logical_not()
        for buffer, value in (
            (self.sums, pooled),
            (self.items, counted),
            (self.parts, parts),
            (self.position, position),
            (self.spoiled, spoiled),
        ):
            torch.mul(value, going_on, out=buffer)
        return averages

    @torch.no_grad()
    def end_step(self, ranks: int) -> None:
        """Ends the step with the micro-batches there have been; without any, does nothing."""
        if not self._open:
            return
        there = self.parts > 0
        norms = self.kind.norms(self.sums / self.parts, self.items / self.parts, ranks)
        self._end(*self.steps.with_values(norms, there), self.spoiled == 0)
        for buffer in (self.sums, self.items, self.parts, self.position, self.spoiled):
            buffer.zero_()
        self._open = False

    def _end(self, total: Tensor, mass: Tensor, where: Tensor | None) -> None:
        """Takes over a step's averages, where there is one to take over."""
        if where is not None:
            total = torch.where(where, total, self.steps.total)
            mass = torch.where(where, mass, self.steps.mass)
        self.steps.set(total, mass)

    def _seen(self, total: Tensor, mass: Tensor) -> Tensor:
        """The averages that scales are made of, when they are about to become these."""
        if self.lag:
            return torch.where(self.steps.mass > 0, self.steps.value(), total / mass)
        return total / mass

    def _load_from_state_dict(self, *state: Any, **options: Any) -> None:
        super()._load_from_state_dict(*state, **options)
        self._open = True

    def reset(self) -> None:
        """Forgets every norm."""
        for buffer in self.buffers():
            buffer.zero_()
        self._open = False
