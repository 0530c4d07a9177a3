"""From every loss's gradient to the one that is handed on: what both ways of calling share."""

import functools
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.averages import WideBuffers
from steadygrad.balance.combine import Combiner
from steadygrad.balance.told import Told
from steadygrad.balance.window import Kind, NormAverages
from steadygrad.formulas.balance import balanced_scales, gram, norm_sum, shares, weighted_sum
from steadygrad.sharding import RankSum

__all__ = ["Join", "Outcome", "effective_loss"]


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


class Join(WideBuffers):
    """Balances gradients, and keeps what is known of every loss.

    Args:
        names: The losses, in the order of all vectors.
        balance: Whether to balance, or only to weigh.
        total_norm: What the scaled norms sum to.
        eps: Added to every average.
        averages: The norms' averages.
        combiner: What makes one gradient of several.
        monitor: Whether to compute inner products though nothing needs them.
        ranks: The processes that share each batch.
    """

    weights: Tensor
    nonfinite: Tensor
    zero: Tensor
    draws: Tensor
    names_json: Tensor

    def __init__(
        self,
        names: Sequence[str],
        *,
        balance: bool,
        total_norm: float,
        eps: float,
        averages: NormAverages,
        combiner: Combiner,
        monitor: bool,
        ranks: RankSum,
    ) -> None:
        super().__init__()
        self.names, self.balance = tuple(names), balance
        self.total_norm, self.eps = total_norm, eps
        self.averages, self.combiner, self.ranks = averages, combiner, ranks
        self.monitor = monitor
        self.wants_products = monitor or combiner.needs_gram
        count = len(self.names)
        self.host_weights = (0.0,) * count
        self.register_buffer("weights", torch.zeros(count, dtype=torch.float64))
        self.register_buffer("nonfinite", torch.zeros(count, dtype=torch.int64))
        self.register_buffer("zero", torch.zeros(count, dtype=torch.int64))
        # Seeds of aggregators that draw numbers; the host counts along, to wait for nothing.
        self.host_draws = 0
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        # As a tensor, because then the whole state is tensors, which every format can hold.
        self.register_buffer("names_json", _as_bytes(self.names))

    def set_weights(self, weights: Sequence[float]) -> None:
        """Takes new weights, in the order of the names."""
        self.host_weights = tuple(weights)
        for slot, weight in enumerate(weights):
            # Filling waits for nothing, copying from the host would.
            self.weights[slot].fill_(weight)

    @torch.no_grad()
    def join(
        self, rows: Mapping[str, Sequence[Tensor | None]], items: int, told: Told
    ) -> tuple[list[Tensor | None], Outcome]:
        """Takes in one micro-batch's gradients.

        Args:
            rows: For each loss that is there its gradients, one for each tensor of the outputs.
            items: Items in this process's micro-batch.
            told: What the losses carry.

        Returns:
            One gradient for each tensor, None where no loss has one; and what it was made by.
        """
        outcome = self._measure([rows.get(name) for name in self.names], items, told)
        scales = _pass_on(outcome.overflowed, outcome.scales)
        joined = self.combiner(self._columns(rows), scales, self._slots(rows))
        if self.monitor and self.combiner.needs_matrix:
            whole = norm_sum([g for g in joined if g is not None], per_item=False).sqrt()
            outcome = outcome._replace(handed_on=whole * told.factor)
        return joined, outcome

    @torch.no_grad()
    def head_gradients(
        self, rows: Mapping[str, Sequence[Tensor | None]], outcome: Outcome
    ) -> list[Tensor | None]:
        """Sums of the losses' gradients for parameters of their own, but for those left out."""
        ones = _pass_on(outcome.overflowed, outcome.finite.to(outcome.scales))
        return [weighted_sum(column, ones) for column in self._columns(rows)]

    def _slots(self, there: Container[str]) -> list[int]:
        """The losses that may take part, as far as the host knows, in the order of sorted names."""
        alone = self.ranks.size == 1
        return [
            k
            for k in self._sorted()
            if self.host_weights[k] and (self.names[k] in there or not alone)
        ]

    def _sorted(self) -> list[int]:
        """Places of the names when sorted: each process may have them in an order of its own."""
        return sorted(range(len(self.names)), key=self.names.__getitem__)

    def _columns(
        self, rows: Mapping[str, Sequence[Tensor | None]]
    ) -> Iterator[list[Tensor | None]]:
        """For each tensor the losses' gradients, in the order of the names."""
        width = max((len(row) for row in rows.values()), default=0)
        return ([rows[n][i] if n in rows else None for n in self.names] for i in range(width))

    def _measure(
        self, rows: Sequence[Sequence[Tensor | None] | None], items: int, told: Told
    ) -> Outcome:
        kind = self.averages.kind
        sums, present, total_items, products = self._sums_of_ranks(rows, items, told, kind)
        there = present > 0
        finite = there & torch.isfinite(sums)
        active = finite & (sums > 0)
        bad = there ^ finite
        self.nonfinite.add_(bad)
        self.zero.add_(finite ^ active)
        # Most likely the loss scale is too large. Whoever chose it must see that.
        overflowed = (bad & (self.weights > 0)).any() if told.skips else None
        averages = self.averages.update(
            sums,
            total_items,
            active,
            ranks=self.ranks.size,
            micro_batches=told.accumulation_steps,
            skipped=overflowed,
        )
        targets = shares(self.weights, active)
        if self.balance:
            scales = balanced_scales(averages, targets, total_norm=self.total_norm, eps=self.eps)
        else:
            scales = torch.where(finite, self.weights, 0.0)
        if self.combiner.needs_gram and products is not None:
            scales = scales * self._resolve(rows, scales, active, products)
        return Outcome(
            sums, total_items, averages, scales, targets, active, finite, overflowed, products
        )

    def _resolve(
        self,
        rows: Sequence[Sequence[Tensor | None] | None],
        scales: Tensor,
        active: Tensor,
        products: Tensor,
    ) -> Tensor:
        """The aggregator's weights of the scaled gradients."""
        self.host_draws += 1
        self.draws.add_(1)
        masked = torch.where(active[:, None] & active, products, 0.0)
        scaled = scales[:, None] * masked * scales
        slots = self._slots([n for n, row in zip(self.names, rows, strict=True) if row])
        counted = active & (scales > 0)
        weights = self.combiner.weights(scaled, counted, slots=slots, seed=self.host_draws)
        return weights.to(scales)

    def _sums_of_ranks(
        self,
        rows: Sequence[Sequence[Tensor | None] | None],
        items: int,
        told: Told,
        kind: Kind,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Everything that processes share, in one collective, in the order of sorted names."""
        order = self._sorted()
        place = sorted(range(len(rows)), key=order.__getitem__)
        zero, one = self.weights.new_zeros(()), self.weights.new_ones(())
        there = [[g for g in rows[k] or () if g is not None] for k in order]
        sums = [norm_sum(row, per_item=kind.per_item) if row else zero for row in there]
        count = len(rows)
        packed = [*sums, *(one if row else zero for row in there), torch.full_like(zero, items)]
        if self.wants_products:
            found = gram([rows[k] for k in order]) if any(there) else zero.new_zeros(count, count)
            packed += list(found.flatten())
        summed = self.ranks(torch.stack(packed))
        total = summed[: 2 * count + 1].unbind()
        factor = told.factor
        norms = torch.stack([total[k] for k in place])
        sums_of_all = norms * (factor if kind.per_item else factor**2)
        products = None
        if self.wants_products:
            rows_of_all = summed[2 * count + 1 :].view(count, count)
            rows_of_all = torch.stack([rows_of_all[k] for k in place])
            products = torch.stack([rows_of_all[:, k] for k in place], dim=1)
            products = products * (factor / self.ranks.size) ** 2
        present = torch.stack([total[count + k] for k in place])
        return sums_of_all, present, total[2 * count], products

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **options: Any
    ) -> None:
        """Takes each loss's numbers by its name, in whatever order they were saved."""
        saved = state_dict.get(prefix + "names_json")
        if saved is not None:
            names = json.loads(bytes(saved.tolist()))
            if sorted(names) != sorted(self.names):
                raise InputError(
                    f"Expected the state of losses {sorted(self.names)}. Found that of "
                    f"{sorted(names)}. Remedy: a balancer with the names of old, or a fresh start."
                )
            order = [names.index(name) for name in self.names]
            for key, value in state_dict.items():
                if key.startswith(prefix) and value.shape == (len(names),):
                    state_dict[key] = value[order]
            state_dict[prefix + "names_json"] = _as_bytes(self.names)
        super()._load_from_state_dict(state_dict, prefix, *rest, **options)
        self.host_weights = tuple(self.weights.tolist())
        self.host_draws = int(self.draws)


def effective_loss(
    losses: Mapping[str, Tensor], names: Sequence[str], outcome: Outcome, told: Told
) -> Tensor:
    """Each loss times its scale, without what it carries."""
    if not losses:
        return outcome.scales.new_zeros((), dtype=torch.float32)
    dtype = functools.reduce(torch.promote_types, (v.dtype for v in losses.values()), torch.float32)
    slots = [slot for slot, name in enumerate(names) if name in losses]
    values = torch.stack([losses[name].detach().reshape(()) for name in names if name in losses])
    scales, finite = outcome.scales, outcome.finite
    if len(slots) < len(scales):
        scales, finite = (torch.stack([x[slot] for slot in slots]) for x in (scales, finite))
    total = torch.where(finite, scales * values, 0.0).sum(dtype=dtype)
    if told.grad_scale is None:
        return total * told.accumulation_steps if told.accumulation_steps > 1 else total
    return (total * told.accumulation_steps / told.grad_scale).to(dtype)


def _pass_on(overflowed: Tensor | None, factors: Tensor) -> Tensor:
    """Makes every factor NaN if a gradient overflowed, so that the scaler skips the step."""
    if overflowed is None:
        return factors
    return torch.where(overflowed, torch.full_like(factors, torch.nan), factors)


def _as_bytes(names: Sequence[str]) -> Tensor:
    return torch.tensor(list(json.dumps(list(names)).encode()), dtype=torch.uint8)
