"""Moving averages over steps of norms that are pooled over each step's micro-batches."""

from typing import Any

import torch
from torch import Tensor

from steadygrad.averages import DoubleBuffers, MaskedAverages
from steadygrad.balance.exchange import JoinedSums
from steadygrad.balance.loss_context import BalancerOptions

__all__ = ["BufferUpdates", "NormAverages", "commit"]

# Buffers, each with its new value.
BufferUpdates = list[tuple[Tensor, Tensor]]


@torch.no_grad()
def commit(updates: BufferUpdates) -> None:
    """Writes new values into buffers, once nothing can fail any more."""
    for buffer, value in updates:
        buffer.copy_(value)


class NormAverages(DoubleBuffers):
    """Averages over steps of ``count`` norms, pooled over each step's micro-batches.

    A micro-batch sees the average as it would be if the step ended with it. So a step moves the
    average once, by the norm of all its micro-batches, however many there are. Whether the step
    ends is decided on the device.
    """

    sums: Tensor
    items: Tensor
    parts: Tensor
    position: Tensor
    spoiled: Tensor

    def __init__(self, count: int, options: BalancerOptions) -> None:
        super().__init__()
        self.options = options
        self.steps = MaskedAverages(count)
        for name in ("sums", "items", "parts"):
            self.register_buffer(name, torch.zeros(count, dtype=torch.float64))
        for name in ("position", "spoiled"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        # Whether the pool may hold a micro-batch. Without accumulation it is never used.
        self._pooling = False

    @torch.no_grad()
    def preview(
        self,
        joined: JoinedSums,
        active: Tensor,
        *,
        ranks: int,
        micro_batches: int,
        skipped: Tensor | None = None,
    ) -> tuple[Tensor, BufferUpdates]:
        """Computes the averages that one micro-batch leads to, without storing them.

        Args:
            joined: Sums of the micro-batch.
            active: Which losses have a norm, boolean with shape ``(K,)``.
            ranks: Number of processes.
            micro_batches: Number of micro-batches in a step.
            skipped: Whether the scaler will skip this step, boolean with shape ``()``; then no
                average moves in it, whatever its other micro-batches are. None: it will not.

        Returns:
            Averages to scale by, with shape ``(K,)``, NaN for losses that never had a norm; and
            what :func:`commit` has to write.
        """
        sums, items = joined.norms, joined.items
        if micro_batches == 1 and not self._pooling:
            norms = self.options.norms(sums, items, ranks)
            total, mass = self.steps.with_values(norms, active, self.options.ema_decay)
            where = None if skipped is None else skipped.logical_not()
            return self._used(total, mass), self._step_updates(total, mass, where)
        # Stays set if the micro-batch fails: an empty pool changes no number.
        self._pooling = True
        counted = active.to(sums)
        pooled = self.sums + torch.where(active, sums, 0.0)
        pooled_items, parts = self.items + items * counted, self.parts + counted
        position = self.position + 1
        spoiled = self.spoiled if skipped is None else torch.maximum(self.spoiled, skipped.double())
        norms = self.options.norms(pooled / parts, pooled_items / parts, ranks)
        total, mass = self.steps.with_values(norms, parts > 0, self.options.ema_decay)
        going_on = position < micro_batches
        updates = self._step_updates(total, mass, ~going_on & (spoiled == 0))
        pool = (pooled, pooled_items, parts, position, spoiled)
        updates += [(b, value * going_on) for b, value in zip(self._pool(), pool, strict=True)]
        return self._used(total, mass), updates

    @torch.no_grad()
    def end_step(self, ranks: int) -> None:
        """Ends the step with the micro-batches so far; does nothing without any."""
        if not self._pooling:
            return
        norms = self.options.norms(self.sums / self.parts, self.items / self.parts, ranks)
        total, mass = self.steps.with_values(norms, self.parts > 0, self.options.ema_decay)
        commit(self._step_updates(total, mass, self.spoiled == 0))
        self._clear_pool()

    def _pool(self) -> tuple[Tensor, ...]:
        return self.sums, self.items, self.parts, self.position, self.spoiled

    def _clear_pool(self) -> None:
        for buffer in self._pool():
            buffer.zero_()
        self._pooling = False

    def _step_updates(self, total: Tensor, mass: Tensor, where: Tensor | None) -> BufferUpdates:
        if where is not None:
            total = torch.where(where, total, self.steps.total)
            mass = torch.where(where, mass, self.steps.mass)
        return [(self.steps.total, total), (self.steps.mass, mass)]

    def _used(self, total: Tensor, mass: Tensor) -> Tensor:
        """Returns the averages to scale by, when the stored ones are about to become these."""
        if self.options.lag:
            return torch.where(self.steps.mass > 0, self.steps.value(), total / mass)
        return total / mass

    def _load_from_state_dict(self, *state: Any, **options: Any) -> None:
        super()._load_from_state_dict(*state, **options)
        self._pooling = True

    def reset_parameters(self) -> None:
        """Forgets every norm."""
        self.steps.reset()
        self._clear_pool()
