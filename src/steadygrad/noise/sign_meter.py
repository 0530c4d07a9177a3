"""The meter of sign-like updates: summed deviations against the descent of a sign step."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad.distributed import World
from steadygrad.formulas.noise_scale import SignalNoise, unbias_deviation
from steadygrad.noise.meters import Measured, Meter
from steadygrad.noise.norms import Moments, euclidean_norms, values_of
from steadygrad.noise.parts import Part, Step
from steadygrad.shards import local

__all__ = ["SignMeter"]


class SignMeter(Meter):
    r"""The noise scale of sign-like updates, in the geometry of their dual norm.

    The noise is :math:`\|\sigma\|_1`, from every coordinate's variance over this process's
    micro-batches (corrected by :math:`c_4`, exact for normal gradients). The signal is
    :math:`\langle \bar g, \mathrm{sign}(m) \rangle` with the optimizer's momentum ``m`` as it
    stands before the step: ``m`` is independent of :math:`\bar g`, so unlike
    :math:`\|\bar g\|_1` it holds no noise, and it is the descent that a sign step really makes, at
    most :math:`\|G\|_1`. Costs two float32 copies of the parameters.

    A variance is the parts' squares less their mean's, in float32, and counts as zero where
    rounding makes it negative. So deviations over parts below a thousandth of the gradient are
    biased: 1 % too small at 1e-3 of it, about 12 % at 3e-4, a third and more too large at 1e-4.

    Args:
        measured, groups, world, dtype, reduced: As of :class:`Meter`.
        optimizer: An optimizer whose state holds ``exp_avg`` or ``momentum_buffer``.

    References:
        | Adaptive Batch Sizes Using Non-Euclidean Gradient Noise Scales for Stochastic Sign and
        | Spectral Descent (2026), https://arxiv.org/abs/2602.03001
    """

    power = 2

    def __init__(
        self,
        measured: Sequence[Measured],
        groups: int,
        world: World,
        optimizer: Optimizer,
        dtype: torch.dtype,
        reduced: bool = False,
    ) -> None:
        self._moments = Moments(optimizer, ("exp_avg", "momentum_buffer"))
        shards = [local(m.parameter) for m in measured]
        self._first = [torch.zeros_like(p, dtype=torch.float32) for p in shards]
        self._second = [torch.zeros_like(p, dtype=torch.float32) for p in shards]
        super().__init__(measured, groups, world, euclidean_norms, dtype, reduced)

    def clear(self) -> None:
        """Starts a new step."""
        super().clear()
        self._loss_scale: Tensor | float = 1.0
        torch._foreach_zero_(self._first)
        torch._foreach_zero_(self._second)

    def see(self, slot: int, gradient: Tensor) -> None:
        """Takes the gradient that the open part adds to a parameter."""
        self.see_norm(slot, self._zero)
        gradient = values_of(gradient)
        if slot in self.witness.lines:
            self.witness.see(slot, gradient)
        # Added up at once, so that no part's gradient has to be kept.
        wide = gradient.to(torch.float32)
        self._first[slot].add_(wide)
        self._second[slot].addcmul_(wide, wide)

    def end_part(self, part: Part, loss_scale: Tensor | float) -> None:
        """Closes the open part; all parts of a step weigh the same and share the loss scale."""
        super().end_part(part, loss_scale)
        self._loss_scale = loss_scale

    def sums(self, gradients: Mapping[int, Tensor], step: Step, scale: Tensor | float) -> Tensor:
        """The weight of this process's parts, and deviation and descent of every group."""
        m = step.sums.parts
        # h_j = a g_j with a = A/m, for each of the m equal parts of n/m samples.
        weight = step.sums.a * step.factor
        variance_factor = (step.sums.samples / m) / ((m - 1) * (weight / m) ** 2)
        c4 = unbias_deviation(self._zero.new_full((), m - 1))
        deviation, descent = [], []
        for slot, measured in enumerate(self.measured):
            spread = self._second[slot] - self._first[slot] ** 2 / m
            sigma = (spread * variance_factor).clamp_(min=0).sqrt_().sum(dtype=self._zero.dtype)
            deviation.append(sigma / c4)
            descent.append(self._descent(measured.parameter, gradients.get(slot)))
        unscaled = torch.stack(deviation) / self._loss_scale
        columns = torch.stack([unscaled, torch.stack(descent) * step.multiple / scale])
        columns = columns * self._shares
        rows = columns.new_zeros(2, self.groups).index_add_(1, self._rows, columns)
        return torch.cat([(self._zero + weight * step.share)[None], rows.flatten()])

    def solve(self, sums: Tensor) -> SignalNoise:
        """Deviation and descent of every group, whose ratio's square is the noise scale."""
        deviation, descent = sums[1:].view(2, self.groups)
        return SignalNoise(descent / sums[0], deviation)

    def _descent(self, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            return self._zero
        momentum = self._moments.of(parameter)
        if momentum is None:
            return torch.full_like(self._zero, torch.nan)
        sign = torch.sign(momentum).to(torch.float32)
        return (gradient.to(torch.float32) * sign).sum(dtype=self._zero.dtype)
