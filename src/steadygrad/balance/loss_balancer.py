"""Several losses, each with the share of the gradient that was asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.balance.eager import eager
from steadygrad.balance.fork import Fork, Gradients
from steadygrad.balance.graphs import check_leaves, check_losses
from steadygrad.balance.join import Joined, effective_loss
from steadygrad.balance.ledger import Ledger
from steadygrad.balance.nests import Outline, branches, differentiable, item_count, outlines
from steadygrad.balance.partials import Heads, parameters_of, part_gradients
from steadygrad.balance.told import GradScale, Told
from steadygrad.balance.weights import check_named, check_present

__all__ = ["LossBalancer"]


class LossBalancer(Ledger):
    r"""Gives each of several losses the share of the gradient that its weight asks for.

    .. math:: G = \sum_k \frac{T}{\epsilon + \langle \lVert g_k \rVert \rangle}
              \frac{w_k}{\sum_j w_j}\, g_k, \qquad g_k = \frac{\partial \ell_k}{\partial y}

    ``y`` is what the model puts out and the losses look at. With weights of 1 and 4 the second
    loss makes 80 % of the gradient's norms, whatever the losses' own scales. This is the rule of
    audiocraft's and EnCodec's balancer.

    .. code-block:: python

        balancer = LossBalancer({"l1": 1, "adv": 4})
        ys = balancer.fork(y)                       # one ordinary backward pass, in any trainer
        (l1_loss(ys["l1"]) + adv_loss(ys["adv"])).backward()
        balancer.backward({"l1": l1, "adv": adv}, y)        # or: as audiocraft has it

    A loss takes part in a step if it is there and its gradient is neither zero nor non-finite.
    Otherwise it is left out of the step and of its average, which is counted in
    :attr:`left_out`, and the others share the total norm. On several processes the norm is that
    of the joined batch: see :mod:`steadygrad.formulas.balance`.

    All state is buffers: ``state_dict`` has it, the weights included. Averages and weights stay
    float64 if the model is cast; a copy of the model asks the same scaler. Nothing waits for the
    device, but an aggregator may. A call that raises has counted nothing.

    The arguments are attributes. ``balance_grads``, ``total_norm``, ``ema_decay``, ``eps``,
    ``lag``, ``monitor``, ``grad_scale`` and ``accumulation_steps`` may be set between steps, on all
    processes alike; :meth:`set_weights` changes weights; ``weights``, ``per_batch_item``,
    ``batch_independent``, ``combine`` and ``process_group`` raise when they are set.

    Args:
        weights: Weight of each loss, zero or more. Losses may come and go, but not be others.
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
        combine: What takes the place of the sum: an aggregator of TorchJD or its name, or a
            function of a matrix with one gradient a row. None: the sum.
        grad_scale: Loss scale that the losses carry: a number, a tensor, or a gradient scaler,
            which copies of the balancer share. Only a scaler is shown an overflow, by a gradient of
            NaN, and no average moves in that step.
        accumulation_steps: By how many micro-batches the losses are divided.
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

    @eager
    def backward(
        self,
        losses: Mapping[str, Tensor | None],
        y: Any,
        *,
        head_parameters: Heads = (),
        grad_scale: GradScale | None = None,
        accumulation_steps: int | None = None,
        retain_graph: bool = False,
    ) -> Tensor:
        """Differentiates each loss, balances, and runs one backward pass through the model.

        Args:
            losses: Scalar losses by name. One that is missing in this step is left out, or None.
            y: The model's output that the losses depend on: a tensor, or a nest of tensors.
                Every gradient of the model's must come through it; for others there is `fork`.
            head_parameters: Parameters between ``y`` and the losses: a module, parameters, or
                pairs as from ``named_parameters()``. Each gets the gradient of the plain sum of
                losses as it is, overflows included, but for losses left out as not finite.
            grad_scale: Loss scale in ``losses``. Default: the constructor's.
            accumulation_steps: By how many micro-batches they are divided. Default: likewise.
            retain_graph: Whether to keep all graphs. If not, a loss's graph is kept only while
                another loss needs parts of it.

        Returns:
            The effective loss, each loss times its scale, without loss scale, on this process.

        Raises:
            InputError: If there is no loss with a weight; one is unknown, no real scalar, does not
                depend on ``y``, reaches the model beside it too, gives it a sparse gradient, goes
                through a reentrant checkpoint, or shares a compiled head or ``y``'s own graph;
                ``y`` is refused as by :meth:`fork`, or one of its tensors is made from another;
                ``head_parameters`` are none, or ``y`` is made from one of them; processes have
                other options, states or loss scales each; or ``combine`` returns a wrong shape.
                Nothing has changed then.
        """
        there = check_named(losses, self.core.names)
        check_present(list(there), self.weights, self.core.ranks.size)
        leaves = differentiable(y)
        heads = parameters_of(head_parameters)
        upstream = check_leaves(leaves, heads)
        items = item_count(leaves, self.core.averages.kind)
        overlaps = check_losses(there, leaves, upstream)
        told = self._told(grad_scale, accumulation_steps, leaves[0].device)
        self._follow(leaves[0].device)
        parts = part_gradients(there, overlaps, leaves, heads, retain_graph=retain_graph)
        joined = self.core.join(parts.outputs, items, told)
        of_heads = self.core.head_gradients(parts.heads, joined.outcome) or [None] * len(heads)
        of_leaves = self._completed(joined.gradients, outlines(leaves))
        pairs = zip([*leaves, *heads], [*of_leaves, *of_heads], strict=True)
        tensors, gradients = zip(*((t, g) for t, g in pairs if g is not None), strict=True)
        torch.autograd.backward(tensors, gradients, retain_graph=retain_graph)
        self._commit(joined)
        return effective_loss(there, self.core.names, joined.outcome, told)

    @eager
    def fork(
        self,
        y: Any,
        *,
        grad_scale: GradScale | None = None,
        accumulation_steps: int | None = None,
    ) -> dict[str, Any]:
        """Copies of ``y``, one for each loss, whose gradients are balanced where they meet.

        Compute each loss from its own copy, add the losses up and call ``backward()`` on the sum
        as usual, in whatever trainer. Factors on single losses cancel. A copy that no loss uses
        counts as a missing loss. The copies share memory and must not be changed in place. One
        backward pass goes through one fork: a second one raises.

        Args:
            y: The model's output: a tensor, or a nest of tensors.
            grad_scale: Loss scale that the sum will carry. Default: the constructor's. A scaler
                is asked when gradients arrive.
            accumulation_steps: By how many micro-batches it will be divided. Default: likewise.

        Returns:
            For each loss a nest like ``y``. Without gradients, as in evaluation, ``y`` itself.

        Raises:
            InputError: If no tensor of ``y`` requires a gradient though gradients are enabled, one
                is complex, a DTensor or in a container that torch does not know, or their first
                dimensions differ; if ``grad_scale`` or ``accumulation_steps`` is out of its range;
                or if ``combine`` looks at whole gradients and there are several processes.
        """
        if not torch.is_grad_enabled():
            return dict.fromkeys(self.core.names, y)
        leaves = differentiable(y)
        items = item_count(leaves, self.core.averages.kind)
        device = leaves[0].device
        # Mistakes are reported here, not in the backward pass.
        self._told(grad_scale, accumulation_steps, device)
        self._follow(device)
        shapes = outlines(leaves)

        def join(rows: Gradients) -> Sequence[Tensor | None]:
            named = {n: row for n, row in zip(self.core.names, rows, strict=True) if row}
            told = self._told(grad_scale, accumulation_steps, device)
            joined = self.core.join(named, items, told)
            self._commit(joined)
            return self._completed(joined.gradients, shapes)

        copies = iter(Fork.apply(join, len(self.core.names), *leaves))  # type: ignore[no-untyped-call]
        return branches(y, leaves, self.core.names, copies)

    def _completed(
        self, gradients: Sequence[Tensor | None], shapes: Sequence[Outline]
    ) -> list[Tensor | None]:
        """Zeros for tensors without a gradient, if other processes may have one to reduce."""
        if self.core.ranks.size == 1:
            return list(gradients)
        found = gradients or [None] * len(shapes)
        return [o.zeros() if g is None else g for g, o in zip(found, shapes, strict=True)]

    def _commit(self, joined: Joined) -> None:
        self.core.commit(joined)
        self._last = joined.outcome

    def _told(
        self, grad_scale: GradScale | None, accumulation_steps: int | None, device: torch.device
    ) -> Told:
        scale = self.grad_scale if grad_scale is None else grad_scale
        steps = self.accumulation_steps if accumulation_steps is None else accumulation_steps
        return Told.read(scale, steps, device)

    def _follow(self, device: torch.device) -> None:
        """Moves to where the gradients are, once, and meets the other processes."""
        self.core.combiner.check(self.core.ranks.size)
        if self.core.weights.is_meta and device.type != "meta":
            raise InputError(
                "Expected a balancer with state. Found it on `meta`, as it was built. Remedy: "
                f"`balancer.to_empty(device={str(device)!r})`, then `reset_parameters()` or a "
                "state dict."
            )
        if self.core.weights.device != device:
            self.to(device)
        self.core.prepare(device)
