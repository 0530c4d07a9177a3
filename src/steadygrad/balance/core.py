"""The computation that both ways of calling share: every loss's gradient in, balanced ones out."""

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.balance.aggregators import Combiner
from steadygrad.balance.exchange import Exchange, GradientRow, JoinedSums
from steadygrad.balance.loss_context import LossContext
from steadygrad.balance.norm_averages import BufferUpdates
from steadygrad.balance.options import BalancerOptions
from steadygrad.balance.results import (
    BalancedGradients,
    StepResult,
    angle_metrics,
    loss_metrics,
)
from steadygrad.balance.state import BalancerState
from steadygrad.formulas.balance import balanced_scales, norm_sum, plain_sum, shares
from steadygrad.sharding import RankSum

__all__ = ["BalancerCore"]

# Options that may be set between steps, on all processes alike; the last two come with a call.
SHARED = (
    "`balance_grads`", "`total_norm`", "`ema_decay`", "`eps`", "`lag`", "`accumulation_steps`",
    "`grad_scale` being a scaler",
)  # fmt: skip


class BalancerCore(BalancerState):
    """Balances the gradients of one micro-batch, and computes what it adds to the state.

    Args:
        names: The losses, in the order of all vectors.
        options: Options of the balancer.
        combiner: Sum or aggregator that makes one gradient of several.
        ranks: The processes that share each batch.
    """

    def __init__(
        self, names: Sequence[str], options: BalancerOptions, combiner: Combiner, ranks: RankSum
    ) -> None:
        super().__init__(names, options)
        self.combiner, self.ranks = combiner, ranks
        self.exchange = Exchange(self.names, ranks)
        self._sent: tuple[object, Tensor] | None = None

    def prepare(self, device: torch.device) -> None:
        """Creates the process group, which inside a backward pass could meet other collectives."""
        options = self.options
        self.exchange.prepare(
            device,
            f"losses {sorted(self.names)}, monitor={options.monitor}, "
            f"per_batch_item={options.per_batch_item}, "
            f"batch_independent={options.batch_independent}, combine={self.combiner.name}",
        )

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
        result, updates = self._measure(rows, joined, context)
        gradients = self._combine(rows, result)
        if self.options.monitor and self.combiner.needs_matrix:
            whole = norm_sum([g for g in gradients if g is not None], per_item=False).sqrt()
            result = result._replace(total=whole * context.unscaling)
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
        joined = result.joined
        norms = self.options.norms(joined.sums, joined.items, self.ranks.size)
        metrics = loss_metrics(self.names, norms, result)
        for kind, counts in (("nonfinite", self.nonfinite), ("zero", self.zero)):
            for name, count in zip(self.names, counts.clone(), strict=True):
                metrics[f"{kind}_{name}"] = count
        if self.combiner.needs_matrix:
            metrics = {k: v for k, v in metrics.items() if not k.startswith("share_after_")}
        if self.exchange.differs is not None:
            metrics["disagreement"] = self.exchange.differs
        return {**metrics, **angle_metrics(self.names, result)} if self.options.monitor else metrics

    def _joined_sums(
        self, rows: Mapping[str, GradientRow], items: int, context: LossContext
    ) -> JoinedSums:
        """Sums over all processes, of losses without loss scale and accumulation divisor."""
        device, per_item = self.weights.device, self.options.per_batch_item
        sums, present, all_items, products = self.exchange(
            [rows.get(name) for name in self.names],
            items,
            self._agreed(context) if self.ranks.size > 1 else {},
            per_item=per_item,
            with_products=self.options.monitor or self.combiner.needs_gram,
            device=device,
        )
        factor = context.unscaling
        if products is not None:
            products = products * (factor / self.ranks.size) ** 2
        return JoinedSums(sums * (factor if per_item else factor**2), present, all_items, products)

    def _agreed(self, context: LossContext) -> dict[str, Tensor]:
        """Collects the numbers that all processes should have in common, options first."""
        options, device = self.options, self.weights.device
        values = (
            options.balance_grads, options.total_norm, self.averages.steps.decay, options.eps,
            options.lag, context.accumulation_steps, context.skips,
        )  # fmt: skip
        if self._sent is None or self._sent[0] != (values, device):
            # Filled on the device: a copy from the host would wait.
            like = {"dtype": torch.float64, "device": device}
            numbers = [torch.full((), float(value), **like) for value in values]  # type: ignore[call-overload]
            self._sent = (values, device), torch.stack(numbers)
        factor = context.unscaling
        if not isinstance(factor, Tensor):
            factor = torch.full_like(self.averages.position, factor)
        shared = dict(zip(SHARED, self._sent[1].unbind(), strict=True))
        state = {**self.averages.shared_state(), "number of draws": self.draws}
        return {**shared, "`weights`": self.weights, "loss scale": factor, **state}

    def _measure(
        self, rows: Mapping[str, GradientRow], joined: JoinedSums, context: LossContext
    ) -> tuple[StepResult, BufferUpdates]:
        """Computes the factors of all losses, and the values of all buffers after this step."""
        options, present = self.options, joined.present > 0
        finite = present & torch.isfinite(joined.sums)
        active = finite & (joined.sums > 0)
        bad = present ^ finite
        # Most likely the loss scale is too large. Whoever chose it must see that.
        overflowed = (bad & (self.weights > 0)).any() if context.skips else None
        averages, updates = self.averages.preview(
            joined.sums,
            joined.items,
            active,
            ranks=self.ranks.size,
            micro_batches=context.accumulation_steps,
            skipped=overflowed,
        )
        updates.append((self.nonfinite, self.nonfinite + bad))
        updates.append((self.zero, self.zero + (finite ^ active)))
        targets = shares(self.weights, active)
        if options.balance_grads:
            scales = balanced_scales(
                averages, targets, total_norm=options.total_norm, eps=options.eps
            )
        else:
            scales = torch.where(finite, self.weights, 0.0)
        if self.combiner.needs_gram and joined.products is not None:
            updates.append((self.draws, self.draws + 1))
            scales = scales * self._row_weights(rows, scales, active, joined.products)
        return StepResult(joined, averages, scales, targets, active, finite, overflowed), updates

    def _row_weights(
        self, rows: Container[str], scales: Tensor, active: Tensor, products: Tensor
    ) -> Tensor:
        """Asks the aggregator for its weights of the scaled gradients."""
        masked = torch.where(active[:, None] & active, products, 0.0)
        scaled = scales[:, None] * masked * scales
        weights = self.combiner.weights(
            scaled, active & (scales > 0), slots=self._slots(rows), seed=int(self.draws) + 1
        )
        return weights.to(scales)

    def _combine(self, rows: Mapping[str, GradientRow], result: StepResult) -> list[Tensor | None]:
        columns, slots = self._columns(rows), self._slots(rows)
        if not self.combiner.needs_matrix:
            # NaN among the factors costs nothing and reaches every gradient.
            (scales,) = _spoil(result.overflowed, [result.scales])
            return self.combiner(columns, scales, slots)  # type: ignore[arg-type]
        # Afterwards, because an aggregator may replace what is not finite.
        return _spoil(result.overflowed, self.combiner(columns, result.scales, slots))

    def _slots(self, present: Container[str]) -> list[int]:
        """Finds the losses that may take part, as far as the host knows, sorted by name."""
        alone = self.ranks.size == 1
        return [
            k
            for k in self.exchange.order
            if self.host_weights[k] and (self.names[k] in present or not alone)
        ]

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


def _spoil(overflowed: Tensor | None, tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Makes tensors NaN if a gradient overflowed, so that the scaler skips the step."""
    if overflowed is None:
        return tensors
    return [None if t is None else torch.where(overflowed, torch.nan, t) for t in tensors]
