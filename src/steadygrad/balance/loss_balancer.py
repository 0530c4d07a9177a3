"""Several losses, each with the share of the gradient that was asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_choice
from steadygrad.averages import WideBuffers
from steadygrad.balance import aggregators, equations, graphs
from steadygrad.balance.norms import GradientRow, JoinedSums, LossNumbers, LossState, StepResult
from steadygrad.balance.options import GradScale, LossScale, Options, check_weights
from steadygrad.distributed import RankSum

__all__ = ["LossBalancer"]

# Averages of one norm do not apply to another, and processes agree on them once.
FIXED = {"weights", "combine", "aggregator", "process_group"} | {f.name for f in fields(Options)}


class LossBalancer(WideBuffers):
    r"""Gives each of several losses the share of the gradient that its weight asks for.

    .. math:: G = \sum_k \frac{T}{\epsilon + \langle \lVert g_k \rVert \rangle}
              \frac{w_k}{\sum_j w_j}\, g_k, \qquad g_k = \frac{\partial \ell_k}{\partial y}

    ``y`` is the model's output, from which the losses are computed. With weights of 1 and 4 the
    second loss makes 80 % of the gradient's norms, whatever the losses' own scales. This is the
    rule of audiocraft's and EnCodec's balancer.

    .. code-block:: python

        balancer = LossBalancer({"l1": 1, "adv": 4})
        ys = balancer.fork(y)                       # one ordinary backward pass, in any trainer
        (l1_loss(ys["l1"]) + adv_loss(ys["adv"])).backward()
        balancer.backward({"l1": l1, "adv": adv}, y)        # or: as audiocraft has it

    A loss takes part in a step if it is present and its gradient is neither zero nor non-finite.
    Otherwise it is left out of the step and of its average, which :attr:`metrics` counts, and the
    others share the total norm. On several processes the norm is that of the joined batch: see
    :mod:`steadygrad.balance.equations`.

    All state is buffers, float64 if the model is cast, too; ``state_dict`` has it, the weights
    included. Options are fixed; only weights change, by :meth:`set_weights`. A copy of the model
    asks the same scaler. Nothing waits for the device, but an aggregator may. A call that raises
    has counted nothing.

    Args:
        weights: Weight of each loss, zero or more. A loss may be missing in a step, but no name can
            be added later.
        balance_grads: Whether to balance. If not, the gradient is :math:`\sum_k w_k g_k`.
        total_norm: :math:`T`, what the balanced norms sum to on average.
        ema_decay: Decay of the bias-corrected moving average of norms, in [0, 1]. 0 takes each
            step's own norm, 1 the mean over all steps.
        per_batch_item: Whether the norm is the mean over items of ``y`` (its first dimension) of
            each item's norm. If not, it is that of the whole batch.
        eps: :math:`\epsilon`; no loss is scaled by more than ``total_norm / eps``.
        batch_independent: Whether the norm is that of one item's loss, so that the model's
            gradient is a mean over items. By default, as in audiocraft, a batch twice as large
            has a gradient about twice as large.
        lag: Whether to scale by averages as they were before the step. Then micro-batches have
            one batch's scales, with ``batch_independent`` and from the second step on.
        monitor: Whether to measure the angles between gradients, for :attr:`metrics`.
        combine: An aggregator in place of the sum: one of TorchJD that weighs the gradients by
            their inner products, or its name. None: the sum.
        grad_scale: Loss scale that the losses carry: a number, a tensor, or a gradient scaler,
            which copies of the balancer share. Only a scaler is shown an overflow, by a gradient of
            NaN, and no average moves in that step.
        accumulation_steps: Number of micro-batches that the losses are divided by.
        process_group: The processes whose gradients are averaged: ``"all"`` if there are several,
            None for none, or a group.

    Raises:
        InputError: If an argument is out of its range, or no weight is positive.

    References:
        | High Fidelity Neural Audio Compression (Défossez et al., 2022), section 3.4
        | https://arxiv.org/abs/2210.13438
        | Jacobian Descent for Multi-Objective Optimization (Quinton and Rey, 2024)
        | https://arxiv.org/abs/2406.16232
    """

    aggregator: Any

    def __init__(
        self,
        weights: Mapping[str, float],
        balance_grads: bool = True,
        total_norm: float = 1.0,
        ema_decay: float = 0.999,
        per_batch_item: bool = True,
        eps: float = 1e-12,
        *,
        batch_independent: bool = False,
        lag: bool = False,
        monitor: bool = False,
        combine: Any = None,
        grad_scale: GradScale = None,
        accumulation_steps: int = 1,
        process_group: Any = "all",
    ) -> None:
        super().__init__()
        self.options = Options(
            balance_grads, total_norm, ema_decay, per_batch_item, eps, batch_independent, lag,
            monitor, accumulation_steps, grad_scale,
        )  # fmt: skip
        self.state = LossState(check_weights(weights))
        self.ranks = RankSum(process_group)
        super().__setattr__("aggregator", aggregators.load_aggregator(combine))
        # Of the last step, and whether processes ever differed.
        self._last: StepResult | None = None
        self._differed: Tensor | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to change an option."""
        if name in FIXED:
            raise InputError(
                f"Attribute `{name}` should be left as it was made. Remedy: `set_weights`, or a "
                "new balancer, which loads the state."
            )
        super().__setattr__(name, value)

    @graphs.eager
    def backward(
        self,
        losses: Mapping[str, Tensor | None],
        y: Any,
        *,
        grad_scale: GradScale = None,
        accumulation_steps: int | None = None,
        retain_graph: bool = False,
    ) -> Tensor:
        """Differentiates each loss, balances, and runs one backward pass through the model.

        Args:
            losses: Scalar losses by name. One that is missing in this step is left out, or None.
            y: The model's output that the losses depend on: a tensor, or a nest of tensors.
                Every gradient of the model's must come through it; for others, and for parameters
                between ``y`` and the losses, which get none here, there is `fork`.
            grad_scale: Loss scale in ``losses``. Default: the constructor's.
            accumulation_steps: Number of micro-batches they are divided by. Default: likewise.
            retain_graph: Whether to keep all graphs. If not, a loss's graph is kept only while
                another loss needs parts of it.

        Returns:
            The effective loss, each loss times its scale, without loss scale, on this process.

        Raises:
            InputError: If no loss has a weight, one is unknown, does not depend on ``y`` or reaches
                the model beside it too; a tensor of ``y`` is made from another; ``y`` is refused as
                by :meth:`fork`; ``combine`` returns a wrong shape; or processes differ in options,
                states or loss scales. Nothing has changed then.
        """
        present = self._present(losses)
        outputs = graphs.output_tensors(y)
        items = graphs.item_count(outputs, self.options)
        shared = graphs.check_losses(present, outputs, graphs.check_outputs(outputs))
        device = outputs[0].device
        loss_scale = self.options.loss_scale(grad_scale, accumulation_steps, device)
        self._prepare(device)
        partial = graphs.loss_gradients(present, shared, outputs, retain_graph=retain_graph)
        rows = [partial.get(name, []) for name in self.weights]
        gradients, result = self._balance(rows, items, loss_scale)
        pairs = zip(outputs, self._filled(gradients, outputs), strict=True)
        given = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
        if loss_scale.scaled is not None and loss_scale.scaled.requires_grad:
            given.append((loss_scale.scaled, torch.zeros_like(loss_scale.scaled)))
        tensors, grads = zip(*given, strict=True)
        torch.autograd.backward(tensors, grads, retain_graph=retain_graph)
        self.state.store(result.state)
        self._last = result
        return result.effective_loss(present, self.weights, loss_scale)

    @graphs.eager
    def fork(
        self, y: Any, *, grad_scale: GradScale = None, accumulation_steps: int | None = None
    ) -> dict[str, Any]:
        """Copies ``y`` once for each loss; where the copies meet, their gradients are balanced.

        Compute each loss from its own copy, add the losses up and call ``backward()`` on the sum
        as usual, in whatever trainer. Factors on single losses cancel. A copy that no loss uses
        counts as a missing loss. The copies share memory and must not be changed in place. One
        backward pass goes through one fork: a second one raises. Derivatives that a loss takes are
        outputs too: ``fork({"u": u, "u_xx": u_xx})``.

        Args:
            y: The model's output: a tensor, or a nest of tensors.
            grad_scale: Loss scale that the sum will carry. Default: the constructor's. A scaler
                is asked when gradients arrive.
            accumulation_steps: Number of micro-batches it will be divided by. Default: likewise.

        Returns:
            For each loss a nest like ``y``. Without gradients, as in evaluation, ``y`` itself.

        Raises:
            InputError: If no tensor of ``y`` requires a gradient though gradients are enabled, one
                is complex, a DTensor or in an object that cannot be taken apart, their first
                dimensions differ.
        """
        names = list(self.weights)
        if not torch.is_grad_enabled():
            return dict.fromkeys(names, y)
        outputs = graphs.output_tensors(y)
        items = graphs.item_count(outputs, self.options)
        device = outputs[0].device
        # Mistakes are reported here, not in the backward pass.
        self.options.loss_scale(grad_scale, accumulation_steps, device)
        self._prepare(device)
        # Without values, which the graph would keep alive.
        shapes = [output.detach().to("meta") for output in outputs]

        def join(rows: list[GradientRow]) -> Sequence[Tensor | None]:
            loss_scale = self.options.loss_scale(grad_scale, accumulation_steps, device)
            gradients, result = self._balance(rows, items, loss_scale)
            self.state.store(result.state)
            self._last = result
            return self._filled(gradients, shapes)

        return graphs.fork(join, y, outputs, names)

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each loss; :meth:`set_weights` changes them."""
        return MappingProxyType(self.state.weights)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes the weights of the losses named; the averages stay.

        Raises:
            InputError: If a name is unknown, a weight negative, or no positive one is left.
        """
        self.state.set_weights(check_weights(weights, self.weights))

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Numbers of the last step, as tensors with shape ``()``; empty before the first one.

        ====================== ================================================================
        ``ratio_NAME``         share of the averaged norms before balancing; audiocraft's metric
        ``share_before_NAME``  share of this step's norms before balancing
        ``share_after_NAME``   share of this step's norms after balancing, and after an aggregator
        ``target_NAME``        share asked for, among the losses that took part
        ``norm_NAME``          this step's norm
        ``average_NAME``       the average it was scaled by
        ``scale_NAME``         factor on the loss's gradient
        ``nonfinite_NAME``     micro-batches it was left out of for a gradient that was not finite
        ``zero_NAME``          micro-batches it was left out of for a gradient of zero
        ``total``              with ``monitor``: norm of the whole batch's balanced gradient
        ``cosine_NAME_NAME``   with ``monitor``: between two losses' gradients
        ``disagreement``       on several processes: whether their options ever differed
        ====================== ================================================================
        """
        if self._last is None:
            return {}
        metrics = self._last.metrics(list(self.weights), self.options)
        return metrics if self._differed is None else {**metrics, "disagreement": self._differed}

    def end_step(self) -> None:
        """Ends a step that has fewer micro-batches than usual; to be called on every process."""
        numbers = self.state.numbers()
        self.state.store(numbers.ended(numbers.position >= 0, self.options, self.ranks.size)[1])

    def reset(self) -> None:
        """Forgets averages and counts; weights stay. Fills buffers made by `to_empty`."""
        self.state.reset_parameters()

    def _present(self, losses: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Returns the losses that are not None; a single process must have one with a weight."""
        for name in losses:
            check_choice("losses", name, self.weights)
        present = {name: loss for name, loss in losses.items() if loss is not None}
        # Another process may have losses, and waits for this one.
        if self.ranks.size == 1 and not any(self.weights[name] for name in present):
            raise InputError(
                "Parameter `losses` should hold a loss with a positive weight. "
                f"Found {[*present]}. Remedy: a loss that was named when the balancer was made."
            )
        return present

    def _prepare(self, device: torch.device) -> None:
        """Moves the state to the gradients' device and creates the process group, once.

        A group made inside a backward pass could meet other collectives.
        """
        if self.state.rows()[0].device != device:
            self.to(device)
        if self.ranks.size > 1:
            name = type(self.aggregator).__name__
            text = f"losses {list(self.weights)}, {self.options}, combine={name}"
            self.ranks.prepare(device, text)

    @torch.no_grad()
    def _balance(
        self, rows: Sequence[GradientRow], items: int, loss_scale: LossScale
    ) -> tuple[list[Tensor | None], StepResult]:
        """Balances the gradients of one micro-batch, one for each output; stores nothing."""
        options, numbers = self.options, self.state.numbers()
        sums = self._joined(rows, items, loss_scale, numbers)
        overflowed = None
        if loss_scale.scaled is not None:
            # Most likely the loss scale is too large, which the gradient scaler must see.
            overflowed = ((sums.there ^ sums.finite) & (numbers.weight > 0)).any()
        averages, state = numbers.after(sums, overflowed, options, loss_scale.micro_batches)
        targets = equations.shares(numbers.weight, sums.active)
        scales = torch.where(sums.finite, numbers.weight, 0.0)
        if options.balance_grads:
            norm, eps = options.total_norm, options.eps
            scales = equations.balanced_scales(averages, targets, total_norm=norm, eps=eps)
        result = StepResult(sums, averages, scales, targets, state)
        if self.aggregator is not None:
            there = [bool(row) or sums.ranks > 1 for row in rows]
            chosen = aggregators.aggregator_rows(self.aggregator, self.weights, there)
            state = state._replace(seeds=state.seeds + 1)
            products, seed = sums.products_of_active(), int(state.seeds.max())
            weights = aggregators.gram_weights(self.aggregator, products, scales, chosen, seed)
            result = result._replace(scales=scales * weights, state=state)
        factors = result.scales
        if overflowed is not None:
            # NaN among the factors costs nothing, and reaches every gradient.
            factors = torch.where(overflowed, torch.nan, factors)
        width = max(len(row) for row in rows)
        columns = [[row[i] if row else None for row in rows] for i in range(width)]
        return [equations.weighted_sum(column, factors) for column in columns], result

    def _joined(
        self, rows: Sequence[GradientRow], items: int, scale: LossScale, numbers: LossNumbers
    ) -> JoinedSums:
        """Sums norms, and inner products if needed, over all processes in one collective."""
        options, ranks, size, like = self.options, self.ranks.size, len(rows), numbers.weight
        zero, per_item = like.new_zeros(()), options.per_batch_item
        there = [[g for g in row if g is not None] for row in rows]
        own = [equations.norm_sum(row, per_item=per_item) if row else zero for row in there]
        one = torch.ones_like(zero)
        counts = [one if row else zero for row in there]
        packed = torch.stack([*own, *counts, torch.full_like(zero, items)])
        if options.monitor or self.aggregator is not None:
            products = equations.gram(rows) if any(there) else like.new_zeros(size, size)
            packed = torch.cat([packed, products.flatten()])
        if ranks > 1:
            factors = scale.unscaling, scale.micro_batches, scale.scaled is not None
            alike = [*numbers, *(torch.ones_like(like[:1]) * factor for factor in factors)]
            packed, differs = self.ranks(packed, torch.cat(alike))
            self._note(differs)
        sums, present, count, products = packed.tensor_split([size, 2 * size, 2 * size + 1])
        sums = sums * (scale.unscaling if per_item else scale.unscaling**2)
        products = products.view(-1, size) * (scale.unscaling / ranks) ** 2
        present = present > 0
        finite = present & torch.isfinite(sums)
        return JoinedSums(sums, present, finite, finite & (sums > 0), count[0], products, ranks)

    def _note(self, differs: Tensor) -> None:
        """Records whether processes differ, and raises where that is known without waiting."""
        now = differs.any()
        self._differed = now if self._differed is None else now | self._differed.to(now)
        if differs.device.type == "cpu" and bool(now):
            kinds = LossNumbers._fields
            names = [f"{kind} of {name!r}" for kind in kinds for name in self.weights]
            names += ["loss scale", "`accumulation_steps`", "`grad_scale` being a scaler"]
            raise InputError(
                "Expected the same weights, state and loss scale on every process. Found another "
                f"{names[differs.tolist().index(True)]}. Remedy: the same `grad_scale` for all; "
                "`load_state_dict`, `set_weights`, `reset` and `end_step` on all or on none."
            )

    def _filled(
        self, gradients: Sequence[Tensor | None], outputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Fills in zeros for missing gradients, if other processes may have one to reduce."""
        if self.ranks.size == 1:
            return list(gradients)
        device = self.state.rows()[0].device
        pairs = zip(gradients or [None] * len(outputs), outputs, strict=True)
        return [torch.zeros_like(t, device=device) if g is None else g for g, t in pairs]
