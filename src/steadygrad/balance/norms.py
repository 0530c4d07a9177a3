"""The losses' norms: summed over processes, averaged over steps, saved by the losses' names."""

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadygrad.averages import DoubleBuffers
from steadygrad.balance.equations import shares
from steadygrad.balance.options import LossScale, Options, check_weights

__all__ = ["GradientRow", "JoinedSums", "LossNumbers", "LossState", "StepResult"]

# A loss's gradients, one for each tensor of the outputs; empty for one that is missing.
GradientRow = Sequence[Tensor | None]


class JoinedSums(NamedTuple):
    """Sums over all processes, of losses without loss scale and accumulation divisor.

    Vectors have an entry for each loss, shape ``(K,)``.
    """

    norms: Tensor  # what the norms are computed from
    there: Tensor  # which losses are there, boolean
    finite: Tensor  # which of these have finite gradients
    active: Tensor  # which of these take part: their gradient is not zero
    items: Tensor  # number of items, with shape ()
    products: Tensor  # inner products of the gradients, with shape (K, K); empty if not wanted
    ranks: int  # number of processes

    def products_of_active(self) -> Tensor:
        """The inner products, zero for losses that take no part, with shape ``(K, K)``."""
        return torch.where(self.active[:, None] & self.active, self.products, 0.0)


class LossNumbers(NamedTuple):
    """The numbers in a loss's row of the state; here vectors of all losses, shape ``(K,)``."""

    weight: Tensor
    total: Tensor  # numerator of the average norm, over steps
    mass: Tensor  # its denominator; zero before the first norm
    nonfinite: Tensor  # micro-batches left out for a non-finite gradient
    zero: Tensor  # micro-batches left out for a gradient of zero
    seeds: Tensor  # number of seeds that an aggregator was given
    # Of the step that has not ended:
    pooled: Tensor  # sum over micro-batches of what the norm is computed from
    items: Tensor  # number of items in these micro-batches
    parts: Tensor  # number of these micro-batches
    position: Tensor  # number of micro-batches, also of those without this loss
    skipped: Tensor  # whether one of them overflowed, so that the gradient scaler skips the step

    def after(
        self, sums: JoinedSums, overflowed: Tensor | None, options: Options, micro_batches: int
    ) -> tuple[Tensor, "LossNumbers"]:
        """Computes the averages after one micro-batch of a step, without storing them.

        A micro-batch sees the average as it would be if the step ended with it. So a step moves
        the average once, by the norm of all its micro-batches. Whether the step ends is decided
        on the device. If one of them ``overflowed`` in a loss scale, no average moves.

        Returns the averages to scale by, NaN for losses that never had a norm, and what
        :meth:`LossState.store` has to write.
        """
        pool = self._replace(
            nonfinite=self.nonfinite + (sums.there ^ sums.finite),
            zero=self.zero + (sums.finite ^ sums.active),
            pooled=self.pooled + torch.where(sums.active, sums.norms, 0.0),
            items=self.items + sums.items * sums.active,
            parts=self.parts + sums.active,
            position=self.position + 1,
        )
        if overflowed is not None:
            pool = pool._replace(skipped=torch.maximum(self.skipped, overflowed.double()))
        averages, new = pool.ended(pool.position >= micro_batches, options, sums.ranks)
        if options.lag:
            averages = torch.where(self.mass > 0, self.total / self.mass, averages)
        return averages, new

    def ended(self, ends: Tensor, options: Options, ranks: int) -> tuple[Tensor, "LossNumbers"]:
        """Averages as if the step ended here; and the numbers afterwards, if it ``ends`` or not."""
        norms = options.norms(self.pooled / self.parts, self.items / self.parts, ranks)
        total = torch.where(self.parts > 0, self.total * options.ema_decay + norms, self.total)
        mass = torch.where(self.parts > 0, self.mass * options.ema_decay + 1, self.mass)
        moves, goes_on = ends & (self.skipped == 0), ~ends
        moved = {
            "total": torch.where(moves, total, self.total),
            "mass": torch.where(moves, mass, self.mass),
        }
        names = ("pooled", "items", "parts", "position", "skipped")
        pool = {name: getattr(self, name) * goes_on for name in names}
        return total / mass, self._replace(**moved, **pool)


class LossState(DoubleBuffers):
    """A buffer ``loss_NAME`` for each loss, float64 with shape ``(11,)``: :class:`LossNumbers`."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        # In the order of all vectors; as numbers, because reading buffers would wait.
        self.weights = dict(weights)
        for name in self.weights:
            row = torch.zeros(len(LossNumbers._fields), dtype=torch.float64)
            self.register_buffer(f"loss_{name}", row)
        self.set_weights(self.weights)

    def rows(self) -> list[Tensor]:
        """The losses' buffers."""
        return [self.get_buffer(f"loss_{name}") for name in self.weights]

    def numbers(self) -> LossNumbers:
        """A copy of all rows; float64, whatever a state was loaded as."""
        return LossNumbers(*torch.stack(self.rows()).double().unbind(1))

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Sets all weights."""
        self.weights.update(weights)
        for row, weight in zip(self.rows(), self.weights.values(), strict=True):
            # Filling waits for nothing, copying from the host would.
            row[0].fill_(weight)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forgets all but the weights; fills buffers made by `to_empty`."""
        for row in self.rows():
            row.zero_()
        self.set_weights(self.weights)

    @torch.no_grad()
    def store(self, numbers: LossNumbers) -> None:
        """Writes new values into the buffers, once nothing can fail any more."""
        torch._foreach_copy_(self.rows(), list(torch.stack(numbers, dim=1).unbind()))

    @property
    def bounds(self) -> Mapping[str, tuple[float, float]]:  # type: ignore[override]
        """None of the numbers is negative."""
        return dict.fromkeys(self._buffers, (0.0, sys.float_info.max))

    def check_buffers(self, state: Mapping[str, Any], prefix: str) -> None:
        """The rows can be losses' own, and leave one with a weight."""
        super().check_buffers(state, prefix)
        rows = {name: state.get(f"{prefix}loss_{name}") for name in self.weights}
        found = {n: row[0].item() for n, row in rows.items() if row is not None and not row.is_meta}
        check_weights(found, self.weights)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        for name, row in zip(self.weights, self.rows(), strict=True):
            if not row.is_meta:
                self.weights[name] = row[0].item()


class StepResult(NamedTuple):
    """Numbers of one micro-batch; vectors with shape ``(K,)``."""

    sums: JoinedSums
    averages: Tensor  # which the scales were computed from
    scales: Tensor  # factors on the gradients
    targets: Tensor  # shares asked for, among the losses that took part
    state: LossNumbers  # afterwards

    def metrics(self, names: Sequence[str], options: Options) -> dict[str, Tensor]:
        """Names the numbers as :attr:`LossBalancer.metrics` does."""
        active = self.sums.active
        norms = options.norms(self.sums.norms, self.sums.items, self.sums.ranks)
        vectors = {
            "ratio": shares(self.averages, active),
            "share_before": shares(norms, active),
            # An aggregator's weights may be negative.
            "share_after": shares((norms * self.scales).abs(), active),
            "target": self.targets,
            "norm": norms,
            "average": self.averages,
            "scale": self.scales,
            "nonfinite": self.state.nonfinite,
            "zero": self.state.zero,
        }
        named = {
            f"{kind}_{name}": value
            for kind, vector in vectors.items()
            for name, value in zip(names, vector, strict=True)
        }
        if not options.monitor:
            return named
        products = self.sums.products_of_active()
        named["total"] = (self.scales @ products @ self.scales).clamp_min(0).sqrt()
        lengths = self.sums.products.diagonal().sqrt()
        cosines = self.sums.products / (lengths[:, None] * lengths)
        pairs = combinations(range(len(names)), 2)
        return named | {f"cosine_{names[i]}_{names[j]}": cosines[i, j] for i, j in pairs}

    def effective_loss(
        self, losses: Mapping[str, Tensor], names: Iterable[str], scale: LossScale
    ) -> Tensor:
        """Sums the losses times their scales, unscaled, in their widest type, float32 at least."""
        dtypes = (loss.dtype for loss in losses.values())
        dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        zero = self.scales.new_zeros((), dtype=dtype)
        there = (losses.get(name, zero) for name in names)
        values = torch.stack([loss.detach().reshape(()).to(dtype) for loss in there])
        # A loss that took no part can have any value, and its factor of zero would keep a NaN.
        known = self.sums.active | torch.isfinite(values)
        counted = self.sums.finite & (self.scales != 0) & known
        total = torch.where(counted, self.scales * values, 0.0).sum(dtype=dtype)
        return (total * scale.unscaling).to(dtype)
