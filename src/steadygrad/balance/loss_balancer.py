"""Several losses, each with the share of the gradient that was asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.balance.base import BalancerBase
from steadygrad.balance.fork import Fork, GradientRows, branches, eager
from steadygrad.balance.graphs import check_losses, check_outputs, item_count, output_tensors
from steadygrad.balance.head_gradients import HeadParameters, head_parameters_of, loss_gradients
from steadygrad.balance.loss_context import GradScale, LossContext, present_losses
from steadygrad.balance.norm_averages import commit
from steadygrad.balance.results import BalancedGradients, effective_loss

__all__ = ["LossBalancer"]


class LossBalancer(BalancerBase):
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
    Otherwise it is left out of the step and of its average, which is counted in
    :attr:`left_out`, and the others share the total norm. On several processes the norm is that
    of the joined batch: see :mod:`steadygrad.formulas.balance`.

    All state is buffers: ``state_dict`` has it, the weights included. Averages and weights stay
    float64 if the model is cast; a copy of the model asks the same scaler. Nothing waits for the
    device, but an aggregator may. A call that raises has counted nothing.

    The arguments are attributes that may be set between steps, on all processes alike; but
    ``weights`` (see :meth:`set_weights`), ``per_batch_item``, ``batch_independent``, ``combine``
    and ``process_group`` raise when they are set.

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
        combine: An aggregator in place of the sum: one of TorchJD or its name, or a function of a
            matrix with one gradient a row. None: the sum.
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

    @eager
    def backward(
        self,
        losses: Mapping[str, Tensor | None],
        y: Any,
        *,
        head_parameters: HeadParameters = (),
        grad_scale: GradScale = None,
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
            accumulation_steps: Number of micro-batches they are divided by. Default: likewise.
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
        core = self.core
        present = present_losses(losses, self.weights, core.ranks.size)
        outputs = output_tensors(y)
        heads = head_parameters_of(head_parameters)
        upstream = check_outputs(outputs, heads)
        items = item_count(outputs, core.options)
        overlaps = check_losses(present, outputs, upstream)
        context = self._context(grad_scale, accumulation_steps, outputs[0].device)
        self._prepare(outputs[0].device)
        partial = loss_gradients(present, overlaps, outputs, heads, retain_graph=retain_graph)
        balanced = core.balance(partial.outputs, items, context)
        of_heads = core.head_gradients(partial.heads, balanced.result) or [None] * len(heads)
        of_outputs = self._filled(balanced.gradients, outputs, outputs[0].device)
        pairs = zip([*outputs, *heads], [*of_outputs, *of_heads], strict=True)
        given = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
        if context.scaled is not None and context.scaled.requires_grad:
            given.append((context.scaled, torch.zeros_like(context.scaled)))
        tensors, gradients = zip(*given, strict=True)
        torch.autograd.backward(tensors, gradients, retain_graph=retain_graph)
        self._commit(balanced)
        return effective_loss(present, core.names, balanced.result, context)

    @eager
    def fork(
        self,
        y: Any,
        *,
        grad_scale: GradScale = None,
        accumulation_steps: int | None = None,
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
                is complex, a DTensor or in an object that cannot be taken apart, or their first
                dimensions differ; if ``grad_scale`` or ``accumulation_steps`` is out of its range;
                or if ``combine`` uses whole gradients and there are several processes.
        """
        names = self.core.names
        if not torch.is_grad_enabled():
            return dict.fromkeys(names, y)
        outputs = output_tensors(y)
        items = item_count(outputs, self.core.options)
        device = outputs[0].device
        # Mistakes are reported here, not in the backward pass.
        self._context(grad_scale, accumulation_steps, device)
        self._prepare(device)
        # Without values, which the graph would keep alive.
        metas = [output.detach().to("meta") for output in outputs]

        def join(rows: GradientRows) -> Sequence[Tensor | None]:
            present = {n: row for n, row in zip(names, rows, strict=True) if row}
            context = self._context(grad_scale, accumulation_steps, device)
            balanced = self.core.balance(present, items, context)
            self._commit(balanced)
            return self._filled(balanced.gradients, metas, device)

        copies = iter(Fork.apply(join, len(names), *outputs))  # type: ignore[no-untyped-call]
        return branches(y, outputs, names, copies)

    def _context(
        self, grad_scale: GradScale, accumulation_steps: int | None, device: torch.device
    ) -> LossContext:
        scale = self.grad_scale if grad_scale is None else grad_scale
        steps = self.accumulation_steps if accumulation_steps is None else accumulation_steps
        return LossContext.read(scale, steps, device)

    def _prepare(self, device: torch.device) -> None:
        """Moves the state to the gradients' device and creates the process group, once."""
        self.core.combiner.check(self.core.ranks.size)
        if self.core.weights.is_meta and device.type != "meta":
            raise InputError(
                "Expected a balancer with state. Found it on `meta`, as it was built. Remedy: "
                f"`balancer.to_empty(device={str(device)!r})`, then `reset_parameters()` or a "
                "state dict."
            )
        if self.core.weights.device != device:
            _check_float64(device)
            self.to(device)
        self.core.prepare(device)

    def _filled(
        self, gradients: Sequence[Tensor | None], like: Sequence[Tensor], device: torch.device
    ) -> list[Tensor | None]:
        """Fills in zeros for missing gradients, if other processes may have one to reduce."""
        if self.core.ranks.size == 1:
            return list(gradients)
        pairs = zip(gradients or [None] * len(like), like, strict=True)
        return [torch.zeros_like(t, device=device) if g is None else g for g, t in pairs]

    def _commit(self, balanced: BalancedGradients) -> None:
        commit(balanced.updates)
        self._last = balanced.result


def _check_float64(device: torch.device) -> None:
    """Refuses a device without float64, as Apple's GPUs are: averages need its digits."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"Expected a device with float64. Found {str(device)!r}, which has none ({error}). "
            "Remedy: `y.cpu()` before the losses."
        ) from error
