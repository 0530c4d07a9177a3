"""The computation that both ways of calling share: every loss's gradient in, balanced ones out."""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.balance.aggregators import Combiner
from steadygrad.balance.exchange import Exchange, GradientRow, JoinedSums
from steadygrad.balance.loss_context import BalancerOptions, LossContext
from steadygrad.balance.norm_averages import BufferUpdates
from steadygrad.balance.results import BalancedGradients, StepResult, angle_metrics, loss_metrics
from steadygrad.balance.state import BalancerState
from steadygrad.distributed import RankSum
from steadygrad.formulas.balance import (
    balanced_scales,
    gram,
    norm_sum,
    plain_sum,
    shares,
    weighted_sum,
)

__all__ = ["BalancerCore"]

T = TypeVar("T", Tensor, Tensor | None)


class BalancerCore(BalancerState):
    """Balances the gradients of one micro-batch, and computes its share of the new state."""

    def __init__(
        self, names: Sequence[str], options: BalancerOptions, combiner: Combiner, ranks: RankSum
    ) -> None:
        super().__init__(names, options)
        self.combiner, self.ranks = combiner, ranks
        self.exchange = Exchange(self.names, ranks)
        # Options as they were last put on the device.
        self._sent: tuple[object, dict[str, Tensor]] = None, {}

    def prepare(self, device: torch.device) -> None:
        """Creates the process group, which inside a backward pass could meet other collectives."""
        if self.ranks.size > 1:
            lengths = ("per_batch_item", "batch_independent", "monitor")
            options = {name: getattr(self.options, name) for name in lengths}
            text = f"losses {sorted(self.names)}, {options}, combine={self.combiner.name}"
            self.exchange.prepare(device, text)

    @torch.no_grad()
    def balance(
        self, rows: Mapping[str, GradientRow], items: int, context: LossContext
    ) -> BalancedGradients:
        """Balances one micro-batch's gradients; stores nothing.

        Args:
            rows: Gradients of each loss that is present, one for each tensor of the outputs.
            items: Number of items in this process's micro-batch.
            context: Loss scale and accumulation divisor of the losses.

        Raises:
            InputError: If a gradient is sparse, an aggregator returns another shape, or processes
                have different options, states or loss scales.
        """
        _check_dense(rows)
        joined = self._joined_sums(rows, items, context)
        result, updates = self._measure(joined, context)
        slots = self._slots(rows)
        if self.combiner.needs_gram and joined.products is not None:
            updates.append((self.draws, self.draws + 1))
            weights = self.combiner.weights(
                joined.products, result.active, result.scales, slots, seed=int(self.draws) + 1
            )
            result = result._replace(scales=result.scales * weights)
        columns = self._columns(rows)
        if self.combiner.needs_matrix:
            gradients = self.combiner(columns, result.scales, slots)
            if self.options.monitor:
                whole = norm_sum([g for g in gradients if g is not None], per_item=False).sqrt()
                result = result._replace(total=whole * context.unscaling)
            # Not before, because an aggregator may replace what is not finite.
            gradients = _spoil(result.overflowed, gradients)
        else:
            # NaN among the factors costs nothing and reaches every gradient.
            (scales,) = _spoil(result.overflowed, [result.scales])
            gradients = [weighted_sum(column, scales) for column in columns]
        return BalancedGradients(gradients, result, updates)

    @torch.no_grad()
    def head_gradients(
        self, rows: Mapping[str, GradientRow], result: StepResult
    ) -> list[Tensor | None]:
        """Sums the losses' gradients of head parameters, without losses that are left out."""
        sums = [plain_sum(column, result.finite) for column in self._columns(rows)]
        return _spoil(result.overflowed, sums)

    def metrics(self, result: StepResult) -> dict[str, Tensor]:
        """Names the numbers of one micro-batch; :attr:`LossBalancer.metrics` has the table."""
        norms = self.options.norms(result.joined.norms, result.joined.items, self.ranks.size)
        counts = {"nonfinite": self.nonfinite.clone(), "zero": self.zero.clone()}
        vectors = {**loss_metrics(norms, result), **counts}
        if self.combiner.needs_matrix:
            del vectors["share_after"]
        metrics = {
            f"{kind}_{name}": value
            for kind, vector in vectors.items()
            for name, value in zip(self.names, vector, strict=True)
        }
        if self.exchange.differs is not None:
            metrics["disagreement"] = self.exchange.differs
        return {**metrics, **angle_metrics(self.names, result)} if self.options.monitor else metrics

    def _joined_sums(
        self, rows: Mapping[str, GradientRow], items: int, context: LossContext
    ) -> JoinedSums:
        """Sums over all processes, of losses without loss scale and accumulation divisor."""
        options, factor, ranks = self.options, context.unscaling, self.ranks.size
        named = [rows.get(name) for name in self.names]
        present = [[g for g in row or () if g is not None] for row in named]
        # In float64, whatever a state was loaded as: processes without losses have nothing else.
        zero = torch.zeros((), dtype=torch.float64, device=self.weights.device)
        one, count = torch.ones_like(zero), len(named)
        norms = [norm_sum(row, per_item=options.per_batch_item) if row else zero for row in present]
        counts = [one if row else zero for row in present]
        products = None
        if options.monitor or self.combiner.needs_gram:
            products = gram(named) if any(present) else zero.new_zeros(count, count)
        all_items = torch.full_like(zero, items)
        sums = JoinedSums(torch.stack(norms), torch.stack(counts), all_items, products)
        if ranks > 1:
            sums = self.exchange(sums, self._agreed(context))
        if sums.products is not None:
            sums = sums._replace(products=sums.products * (factor / ranks) ** 2)
        return sums._replace(norms=sums.norms * (factor if options.per_batch_item else factor**2))

    def _agreed(self, context: LossContext) -> dict[str, Tensor]:
        """Collects the numbers that all processes should have in common, options first."""
        live = ("balance_grads", "total_norm", "ema_decay", "eps", "lag")
        options = {f"`{name}`": float(getattr(self.options, name)) for name in live}
        options["`accumulation_steps`"] = float(context.accumulation_steps)
        options["`grad_scale` being a scaler"] = float(context.skips)
        one = torch.ones((), dtype=torch.float64, device=self.weights.device)
        if self._sent[0] != (options, one.device):
            # Filled on the device: a copy from the host would wait.
            numbers = {name: torch.full_like(one, value) for name, value in options.items()}
            self._sent = (options, one.device), numbers
        agreed = {**self._sent[1], "`weights`": self.weights}
        agreed["loss scale"] = one * context.unscaling
        agreed.update(self.averages.named_buffers(prefix="averages"))
        return {**agreed, "draws": self.draws}

    def _measure(
        self, joined: JoinedSums, context: LossContext
    ) -> tuple[StepResult, BufferUpdates]:
        """Computes the factors of all losses, and the values of all buffers after this step."""
        options, present = self.options, joined.present > 0
        finite = present & torch.isfinite(joined.norms)
        active = finite & (joined.norms > 0)
        bad = present ^ finite
        # Most likely the loss scale is too large, which the gradient scaler must see.
        overflowed = (bad & (self.weights > 0)).any() if context.skips else None
        averages, updates = self.averages.preview(
            joined,
            active,
            ranks=self.ranks.size,
            micro_batches=context.accumulation_steps,
            skipped=overflowed,
        )
        updates.append((self.nonfinite, self.nonfinite + bad))
        updates.append((self.zero, self.zero + (finite ^ active)))
        targets = shares(self.weights, active)
        scales = torch.where(finite, self.weights, 0.0)
        if options.balance_grads:
            norm, eps = options.total_norm, options.eps
            scales = balanced_scales(averages, targets, total_norm=norm, eps=eps)
        return StepResult(joined, averages, scales, targets, active, finite, overflowed), updates

    def _slots(self, present: Container[str]) -> list[int]:
        """Finds the losses that may take part, as far as the host knows, sorted by name."""
        alone = self.ranks.size == 1
        weighted = sorted(name for name, weight in self.weights_by_name.items() if weight)
        return [self.names.index(name) for name in weighted if name in present or not alone]

    def _columns(self, rows: Mapping[str, GradientRow]) -> Iterator[list[Tensor | None]]:
        """Yields for each tensor the losses' gradients, in the order of the names."""
        width = max((len(row) for row in rows.values()), default=0)
        return ([rows[n][i] if n in rows else None for n in self.names] for i in range(width))


def _check_dense(rows: Mapping[str, GradientRow]) -> None:
    for name, row in rows.items():
        if any(g is not None and g.layout != torch.strided for g in row):
            raise InputError(
                f"Loss {name!r} should give `y` a dense gradient. Found a sparse one. Remedy: "
                "`sparse=False` where it looks rows up, or `y.clone()` before that."
            )


def _spoil(overflowed: Tensor | None, tensors: list[T]) -> list[T]:
    """Makes tensors NaN if a gradient overflowed, so that the scaler skips the step."""
    if overflowed is None:
        return tensors
    return [t if t is None else torch.where(overflowed, torch.nan, t) for t in tensors]
