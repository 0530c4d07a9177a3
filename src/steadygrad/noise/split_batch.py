"""The gradient noise scale from one tensor of per-sample losses, by splitting the batch."""

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from steadygrad._checks import InputError, check_choice, check_number, check_type
from steadygrad.averages import MovingAverage, WideBuffers
from steadygrad.noise.equations import from_halves, from_nested
from steadygrad.noise.estimate import (
    NoiseEstimate,
    default_capacity,
    empty_ring,
    estimate_from,
    push,
)
from steadygrad.numerics import inner_products, wide

__all__ = ["SplitBatchNoiseScale"]


class SplitBatchNoiseScale(WideBuffers):
    r"""Estimates the noise scale from the gradients of two random parts of each batch.

    ``"alternative"`` halves the batch (:func:`~steadygrad.noise.equations.from_halves`; an odd one
    unequally) and has the smaller variance. ``"paper"`` compares two batch sizes
    (:func:`~steadygrad.noise.equations.from_nested`). Averages first, and divides once.

    Each call runs two backward passes through the graph. The two parts together are the batch,
    so their weighted mean is the gradient of ``per_sample_loss.mean()``: with ``fill_grad=True``
    it is added to ``.grad``, and training needs no third pass.

    Args:
        mode: ``"alternative"`` or ``"paper"``.
        batch_size_ratio: For ``"paper"``: the small part's share of the batch, in (0, 0.5).
        update_rate: Weight of a new batch in the averages, in (0, 1].
        gradient_norm_clip: Bound on the gradients' norm, against outliers. ``alternative`` clips
            each half by itself, as the original does; this biases the estimate once it is at work.
            ``paper`` scales both parts by one factor, so that a batch's ratio survives. None: no
            bound.
        negative: What to return while the averages' ratio is negative, when the batches have not
            resolved it: ``"unresolved"`` gives NaN; ``"last_valid"`` repeats the last
            non-negative value (at first 0), as the original does.
        generator: Source of the random split. None: torch's global one, on the CPU.
        level: Probability with which the interval should cover the truth.

    Attributes:
        resolved: Whether the last value came from positive averages, a boolean tensor. It says
            nothing of precision: that is what :meth:`estimate` is for.
        skipped: Number of batches left out because a gradient was not finite, a tensor.

    References:
        | An Empirical Model of Large-Batch Training (McCandlish et al., 2018), appendix A.1
        | https://arxiv.org/abs/1812.06162
    """

    ring: Tensor
    pushed: Tensor
    resolved: Tensor
    skipped: Tensor
    last_valid: Tensor

    def __init__(
        self,
        mode: str = "alternative",
        batch_size_ratio: float = 0.1,
        update_rate: float = 0.001,
        gradient_norm_clip: float | None = None,
        negative: str = "unresolved",
        generator: torch.Generator | None = None,
        *,
        level: float = 0.95,
    ) -> None:
        super().__init__()
        self.mode = check_choice("mode", mode, ("alternative", "paper"))
        self.negative = check_choice("negative", negative, ("unresolved", "last_valid"))
        self.batch_size_ratio = check_number(
            "batch_size_ratio", batch_size_ratio, low=0, high=0.5, low_open=True, high_open=True
        )
        if gradient_norm_clip is not None:
            check_number("gradient_norm_clip", gradient_norm_clip, low=0, low_open=True)
        self.gradient_norm_clip = gradient_norm_clip
        self.generator = generator
        self.signal = MovingAverage(update_rate)
        self.noise = MovingAverage(update_rate)
        self.level = check_number("level", level, low=0, high=1, low_open=True, high_open=True)
        # The newest batches, of which the interval is made, until the weight left out is 0.1 %.
        ring, pushed = empty_ring(default_capacity(1 - update_rate, 8192), 1, torch.device("cpu"))
        self.register_buffer("ring", ring)
        self.register_buffer("pushed", pushed)
        self.register_buffer("resolved", torch.zeros((), dtype=torch.bool))
        self.register_buffer("skipped", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last_valid", torch.zeros((), dtype=torch.float64))

    def forward(
        self,
        per_sample_loss: Tensor,
        tensors: Any,
        *,
        fill_grad: bool = False,
        loss_scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Takes in one batch and returns the estimate so far.

        Args:
            per_sample_loss: One loss a sample, before any mean, with shape ``(B)`` or ``(T, B)``;
                then a sample is a column.
            tensors: Any nest of the tensors whose gradients count, or a module for its parameters;
                unused ones count as zero.
            fill_grad: Whether to add the gradient of ``per_sample_loss.mean() * loss_scale`` to
                each tensor's ``.grad``. This frees the graph; otherwise the graph is kept.
            loss_scale: Factor on the losses while they are differentiated, against underflow in
                float16. No estimate carries it; what ``fill_grad`` adds does, as after
                ``scaler.scale(loss).backward()``.

        Returns:
            The noise scale in samples, with shape ``()``.

        Raises:
            InputError: If the loss has another shape or fewer than two samples, or nothing in
                ``tensors`` requires a gradient.
        """
        check_type("per_sample_loss", per_sample_loss, Tensor, "torch.stack(losses)")
        if per_sample_loss.ndim not in (1, 2) or per_sample_loss.shape[-1] < 2:
            raise InputError(
                "Parameter `per_sample_loss` should have shape (B) or (T, B) with B >= 2. Found "
                f"{tuple(per_sample_loss.shape)}. Remedy: use reduction='none', then average over "
                "all dimensions except the samples'."
            )
        leaves = _leaves(tensors, fill_grad)
        batch = per_sample_loss.shape[-1]
        small = max(1, int(batch * (0.5 if self.mode == "alternative" else self.batch_size_ratio)))
        order = torch.randperm(batch, generator=self.generator)
        if per_sample_loss.is_cuda:
            # From pinned memory the copy waits for nothing.
            order = order.pin_memory().to(per_sample_loss.device, non_blocking=True)
        shuffled = per_sample_loss[..., order.to(per_sample_loss.device)] * loss_scale
        big_grads = _gradients(shuffled[..., small:].mean(), leaves, keep_graph=True)
        small_grads = _gradients(shuffled[..., :small].mean(), leaves, keep_graph=not fill_grad)
        if fill_grad:
            _add_to_grad(leaves, big_grads, small_grads, small / batch)
        self._take_in(big_grads, small_grads, batch - small, small, loss_scale)
        return self._value().to(wide(per_sample_loss.dtype))

    def estimate(self) -> NoiseEstimate:
        """The noise scale with its interval, in samples; nothing waits for the device.

        It is NaN where the averages are not positive, and of the newest batches alone where it
        drifts. With ``gradient_norm_clip`` at work the interval is one for what the averages
        converge to, not for the noise scale itself.
        """
        decay = 1 - self.signal.update_rate
        return estimate_from(self.ring, self.pushed, decay, self.level, skipped=self.skipped)

    @torch.no_grad()
    def _take_in(
        self, big: list[Tensor], small: list[Tensor], n_big: int, n_small: int, scale: Any
    ) -> None:
        """Averages one batch's estimates; leaves it out where they are not finite."""

        def inner(first: list[Tensor], second: list[Tensor]) -> Tensor:
            # Each tensor's sum in float32 at least, and the sum of sums in float64.
            dtype = reduce(torch.promote_types, (x.dtype for x in first), torch.float32)
            product = inner_products(first, second, dtype).to(torch.float64).sum()
            return product / scale / scale  # type: ignore[no-any-return]

        sq_big, sq_small = inner(big, big), inner(small, small)
        bound = self.gradient_norm_clip or math.inf
        f_big, f_small = ((bound / x.sqrt()).clamp(max=1.0) for x in (sq_big, sq_small))
        if self.mode == "alternative":
            dot = inner(big, small) * f_big * f_small
            distance = sq_big * f_big**2 + sq_small * f_small**2 - 2 * dot
            measured = from_halves(dot, distance, n_1=n_big, n_2=n_small)
        elif n_big == n_small:
            # Two samples leave two equal parts, which the two-size equations cannot tell apart.
            measured = sq_big * torch.nan, sq_small * torch.nan
        else:
            # The big part's factor for both: clipping each to one norm would erase the noise.
            squares = sq_small * f_big**2, sq_big * f_big**2
            measured = from_nested(*squares, b_small=n_small, b_big=n_big)
        signal, noise = measured
        finite = torch.isfinite(signal) & torch.isfinite(noise)
        self.signal.update(signal, where=finite)
        self.noise.update(noise, where=finite)
        push(self.ring, self.pushed, measured, where=finite)
        self.skipped += ~finite

    def _value(self) -> Tensor:
        signal, noise = self.signal.value(), self.noise.value()
        ratio = noise / signal
        self.resolved.copy_((signal > 0) & (noise >= 0))
        if self.negative == "unresolved":
            return torch.where(self.resolved, ratio, torch.nan)
        valid = torch.isfinite(ratio) & (ratio >= 0)
        self.last_valid.copy_(torch.where(valid, ratio, self.last_valid))
        return self.last_valid.clone()


def _leaves(tensors: Any, fill_grad: bool) -> list[Tensor]:
    """Tensors that require a gradient, each once."""
    tensors = tensors.parameters() if isinstance(tensors, nn.Module) else tensors
    tensors = list(tensors) if isinstance(tensors, Iterator) else tensors
    every = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
    # By identity: a tied parameter is one parameter, wherever it appears in the nest.
    leaves = list({id(leaf): leaf for leaf in every if leaf.requires_grad}.values())
    if not leaves:
        raise InputError(
            "Parameter `tensors` should hold a tensor that requires a gradient. Found none among "
            f"{len(every)} tensors. Remedy: hand in the model, or its trainable parameters."
        )
    if fill_grad and not all(leaf.is_leaf for leaf in leaves):
        raise InputError(
            "Parameter `tensors` should hold leaves with fill_grad=True. Found one that was "
            "computed. Remedy: hand in the parameters, or fill_grad=False."
        )
    return leaves


def _gradients(loss: Tensor, leaves: list[Tensor], *, keep_graph: bool) -> list[Tensor]:
    grads = torch.autograd.grad(loss, leaves, retain_graph=keep_graph, materialize_grads=True)
    return [grad.to_dense() if grad.is_sparse else grad for grad in grads]


@torch.no_grad()
def _add_to_grad(
    leaves: list[Tensor], big: list[Tensor], small: list[Tensor], share: float
) -> None:
    for leaf, a, b in zip(leaves, big, small, strict=True):
        mean = torch.lerp(a, b, share)
        leaf.grad = mean if leaf.grad is None else leaf.grad + mean
