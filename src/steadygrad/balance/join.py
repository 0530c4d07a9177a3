"""From every loss's gradient to the one that is handed on: what both ways of calling share."""

import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.balance.combine import Combiner
from steadygrad.balance.exchange import Exchange, Row
from steadygrad.balance.state import State
from steadygrad.balance.told import Told
from steadygrad.balance.weights import check_pairs
from steadygrad.balance.window import Changes, NormAverages, commit
from steadygrad.formulas.balance import (
    balanced_scales,
    norm_sum,
    plain_sum,
    shares,
)
from steadygrad.sharding import RankSum

__all__ = ["Join", "Joined", "Outcome", "effective_loss"]


class Outcome(NamedTuple):
    """What one micro-batch gave; vectors with shape ``(K,)``.

    Attributes:
        sums: What the micro-batch's norms are made of.
        items: Its number of items, with shape ``()``.
        averages: The averages used.
        scales: Factors on the gradients.
        targets: Shares asked for, among the losses that took part.
        active: Which losses took part.
        finite: Which losses were there, with finite gradients.
        overflowed: Whether a loss with a weight had a gradient that is not finite, boolean with
            shape ``()``; None without a scaler that would skip the step.
        products: Inner products of the gradients, with shape ``(K, K)``, or None.
        handed_on: Norm of what an aggregator of whole gradients made, with shape ``()``, or None.
    """

    sums: Tensor
    items: Tensor
    averages: Tensor
    scales: Tensor
    targets: Tensor
    active: Tensor
    finite: Tensor
    overflowed: Tensor | None
    products: Tensor | None
    handed_on: Tensor | None = None


class Joined(NamedTuple):
    """A micro-batch's gradients, before anything has been taken in.

    Attributes:
        gradients: One gradient for each tensor of the outputs, None where no loss has one.
        outcome: What they were made by.
        changes: What the micro-batch makes of the state.
    """

    gradients: list[Tensor | None]
    outcome: Outcome
    changes: Changes


class Join(State):
    """Balances gradients, and keeps what is known of every loss.

    Args:
        names: The losses, in the order of all vectors.
        averages: The norms' averages.
        combiner: What makes one gradient of several.
        ranks: The processes that share each batch.

    Attributes:
        balance: Whether to balance, or only to weigh.
        total_norm: What the scaled norms sum to.
        eps: Added to every average.
    """

    def __init__(
        self, names: Sequence[str], averages: NormAverages, combiner: Combiner, ranks: RankSum
    ) -> None:
        super().__init__(names)
        self.balance, self.total_norm, self.eps, self._monitor = True, 1.0, 0.0, False
        self.averages, self.combiner, self.ranks = averages, combiner, ranks
        self.exchange = Exchange(self.names, averages.kind, ranks)

    @property
    def monitor(self) -> bool:
        """Whether to compute inner products though nothing needs them."""
        return self._monitor

    @monitor.setter
    def monitor(self, value: bool) -> None:
        if value:
            check_pairs(self.names)
        self._monitor = value

    def prepare(self, device: torch.device) -> None:
        """Makes the process group, which inside a backward pass could meet other collectives."""
        self.ranks.prepare(
            device,
            f"losses {sorted(self.names)}, monitor={self.monitor}, {self.averages.kind}, "
            f"combine={self.combiner.name}",
        )

    @torch.no_grad()
    def join(self, rows: Mapping[str, Row], items: int, told: Told) -> Joined:
        """Balances one micro-batch's gradients; :meth:`commit` takes it in.

        Args:
            rows: For each loss that is there its gradients, one for each tensor of the outputs.
            items: Items in this process's micro-batch.
            told: What the losses carry.

        Raises:
            InputError: If an aggregator returns something of another shape, a gradient is
                sparse, or processes have different options, states or loss scales.
        """
        _check_dense(rows)
        outcome, changes = self._measure([rows.get(name) for name in self.names], items, told)
        gradients = self._combined(rows, outcome)
        if self.monitor and self.combiner.needs_matrix:
            whole = norm_sum([g for g in gradients if g is not None], per_item=False).sqrt()
            outcome = outcome._replace(handed_on=whole * told.factor)
        return Joined(gradients, outcome, changes)

    def _combined(self, rows: Mapping[str, Row], outcome: Outcome) -> list[Tensor | None]:
        columns, slots = self._columns(rows), self._slots(rows)
        if not self.combiner.needs_matrix:
            # NaN among the factors costs nothing and reaches every gradient.
            return self.combiner(columns, _pass_on(outcome.overflowed, outcome.scales), slots)
        found = self.combiner(columns, outcome.scales, slots)
        if outcome.overflowed is None:
            return found
        # Afterwards, because an aggregator may clean what is not finite away.
        one = _pass_on(outcome.overflowed, outcome.scales.new_ones(()))
        return [None if g is None else g * one.to(g) for g in found]

    def commit(self, joined: Joined) -> None:
        """Takes a micro-batch in."""
        commit(joined.changes)
        self.host_draws += self.combiner.needs_gram

    @torch.no_grad()
    def head_gradients(self, rows: Mapping[str, Row], outcome: Outcome) -> list[Tensor | None]:
        """Sums of the losses' gradients for parameters of their own, but for those left out."""
        sums = (plain_sum(column, outcome.finite) for column in self._columns(rows))
        one = _pass_on(outcome.overflowed, outcome.scales.new_ones(()))
        return [g if g is None or outcome.overflowed is None else (g * one).to(g) for g in sums]

    def _slots(self, there: Container[str]) -> list[int]:
        """The losses that may take part, as far as the host knows, in the order of sorted names."""
        alone = self.ranks.size == 1
        return [
            k
            for k in self.exchange.order
            if self.host_weights[k] and (self.names[k] in there or not alone)
        ]

    def _columns(self, rows: Mapping[str, Row]) -> Iterator[list[Tensor | None]]:
        """For each tensor the losses' gradients, in the order of the names."""
        width = max((len(row) for row in rows.values()), default=0)
        return ([rows[n][i] if n in rows else None for n in self.names] for i in range(width))

    def _measure(
        self, rows: Sequence[Row | None], items: int, told: Told
    ) -> tuple[Outcome, Changes]:
        sums, present, items_of_all, products = self.exchange(
            rows,
            items,
            told.factor,
            with_products=self.monitor or self.combiner.needs_gram,
            common=self._common(told),
            alike=self._alike(told),
            like=self.weights,
        )
        there = present > 0
        finite = there & torch.isfinite(sums)
        active = finite & (sums > 0)
        bad = there ^ finite
        # Most likely the loss scale is too large. Whoever chose it must see that.
        overflowed = (bad & (self.weights > 0)).any() if told.skips else None
        averages, changes = self.averages.preview(
            sums,
            items_of_all,
            active,
            ranks=self.ranks.size,
            micro_batches=told.accumulation_steps,
            skipped=overflowed,
        )
        changes.append((self.nonfinite, self.nonfinite + bad))
        changes.append((self.zero, self.zero + (finite ^ active)))
        targets = shares(self.weights, active)
        if self.balance:
            scales = balanced_scales(averages, targets, total_norm=self.total_norm, eps=self.eps)
        else:
            scales = torch.where(finite, self.weights, 0.0)
        if self.combiner.needs_gram and products is not None:
            changes.append((self.draws, self.draws + 1))
            scales = scales * self._resolve(rows, scales, active, products)
        return Outcome(
            sums, items_of_all, averages, scales, targets, active, finite, overflowed, products
        ), changes

    def _resolve(
        self, rows: Sequence[Row | None], scales: Tensor, active: Tensor, products: Tensor
    ) -> Tensor:
        """The aggregator's weights of the scaled gradients."""
        masked = torch.where(active[:, None] & active, products, 0.0)
        scaled = scales[:, None] * masked * scales
        slots = self._slots([n for n, row in zip(self.names, rows, strict=True) if row])
        counted = active & (scales > 0)
        seed = self.host_draws + 1
        return self.combiner.weights(scaled, counted, slots=slots, seed=seed).to(scales)

    def _common(self, told: Told) -> str:
        """What must be alike on all processes for their states to stay alike."""
        if self.ranks.size == 1:
            return ""
        weights = dict(sorted(zip(self.names, self.host_weights, strict=True)))
        return (
            f"weights {weights}, balance_grads={self.balance}, "
            f"total_norm={float(self.total_norm)}, ema_decay={float(self.averages.steps.decay)}, "
            f"eps={float(self.eps)}, lag={self.averages.lag}, "
            f"accumulation_steps={told.accumulation_steps}, "
            f"grad_scale is a scaler={told.skips}"
        )

    def _alike(self, told: Told) -> list[Tensor]:
        """Numbers that must be alike as well, of which most are on the device."""
        if self.ranks.size == 1:
            return []
        a, steps = self.averages, self.averages.steps
        factor = told.factor
        if not isinstance(factor, Tensor):
            # Filled on the device: a copy from the host would wait.
            factor = torch.full_like(steps.mass[0], factor)
        pool = [a.sums, a.items, a.parts, a.position, a.spoiled]
        return [factor, steps.total, steps.mass, *pool, self.draws]


def effective_loss(
    losses: Mapping[str, Tensor], names: Sequence[str], outcome: Outcome, told: Told
) -> Tensor:
    """Each loss times its scale, without what it carries."""
    if not losses:
        return outcome.scales.new_zeros((), dtype=torch.float32)
    dtype = functools.reduce(torch.promote_types, (v.dtype for v in losses.values()), torch.float32)
    slots = [slot for slot, name in enumerate(names) if name in losses]
    values = torch.stack([losses[name].detach().reshape(()) for name in names if name in losses])
    vectors = (outcome.scales, outcome.finite, outcome.active)
    if len(slots) < len(outcome.scales):
        vectors = tuple(torch.stack([x[slot] for slot in slots]) for x in vectors)  # type: ignore[assignment]
    scales, finite, active = vectors
    # A loss that took no part can have any value, and its factor of zero would keep a NaN.
    counted = finite & (scales != 0) & (active | torch.isfinite(values))
    total = torch.where(counted, scales * values, 0.0).sum(dtype=dtype)
    if told.grad_scale is None:
        return total * told.accumulation_steps if told.accumulation_steps > 1 else total
    return (total * told.accumulation_steps / told.grad_scale).to(dtype)


def _check_dense(rows: Mapping[str, Row]) -> None:
    for name, row in rows.items():
        if any(g is not None and g.layout != torch.strided for g in row):
            raise InputError(
                f"Loss {name!r} should give `y` a dense gradient. Found a sparse one. Remedy: "
                "`sparse=False` where it looks rows up, or `y.clone()` before that."
            )


def _pass_on(overflowed: Tensor | None, factors: Tensor) -> Tensor:
    """Makes every factor NaN if a gradient overflowed, so that the scaler skips the step."""
    if overflowed is None:
        return factors
    return torch.where(overflowed, torch.full_like(factors, torch.nan), factors)
