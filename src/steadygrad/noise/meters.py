r"""What is measured of each gradient: its norm in some geometry.

A meter sees the gradients of the parts of one step (micro-batches, ranks or examples), then the
whole step's gradient, and solves for signal and noise. With :math:`h_j = a_j g_j` what part ``j``
adds to ``.grad``, all that is needed of the parts are sums,

.. math:: A = \sum a_j, \quad B = \sum |h_j|^2 / a_j, \quad C = \sum a_j / n_j, \quad
          D = \sum a_j^2 / n_j,

so the contributions of all processes add up in one collective. Then, with :math:`w_j = a_j / A`,
the equations of :mod:`steadygrad.formulas.noise_scale` apply.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.formulas.noise_scale import SignalNoise, from_part_sums
from steadygrad.sharding import World, local, replicas

__all__ = [
    "Measured",
    "Meter",
    "Norm",
    "PartSums",
    "Step",
    "euclidean_norm",
    "preconditioned_norm",
]

Norm = Callable[[nn.Parameter, Tensor], Tensor]


@dataclass(frozen=True)
class Measured:
    """One measured parameter: its name, itself, and the index of its group."""

    name: str
    parameter: nn.Parameter
    group: int


@dataclass
class PartSums:
    """Sums over the parts of one step on this process: plain numbers, known without the device.

    Attributes:
        a: :math:`A`, the weights.
        c: :math:`C`.
        d: :math:`D`.
        parts: Number of parts.
        samples: Number of samples.
    """

    a: float = 0.0
    c: float = 0.0
    d: float = 0.0
    parts: int = 0
    samples: int = 0

    def add(self, weight: float, samples: int, parts: int) -> None:
        """Adds ``parts`` equal parts that share this weight and these samples."""
        self.a += weight
        self.c += weight * parts / samples
        self.d += weight * weight / samples
        self.parts += parts
        self.samples += samples

    def scaled(self, factor: float) -> "PartSums":
        """The sums when every weight is ``factor`` times as large."""
        return PartSums(
            self.a * factor, self.c * factor, self.d * factor**2, self.parts, self.samples
        )


@dataclass(frozen=True)
class Step:
    """What one process knows of a step.

    Attributes:
        sums: The parts, with provisional weights.
        factor: True weight over provisional weight.
        share: Part of ``sums`` that is this process's own: 1, or one over the number of
            processes when all of them saw the same parts.
        multiple: Gradient summed over what the processes saw, over ``.grad``.
    """

    sums: PartSums
    factor: float
    share: float
    multiple: float


def euclidean_norm(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """The ordinary norm, with shape ``()``, added up in float32 at least."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=_wide(gradient))
    return norm


def preconditioned_norm(optimizer: Optimizer) -> Norm:
    r"""The norm :math:`\sqrt{g^\top P^{-1} g}` with :math:`P = \sqrt{\hat v} + \epsilon`.

    For updates :math:`P^{-1} g` and a curvature that looks like ``P``, the noise scale becomes
    :math:`\mathrm{tr}(P^{-1}\Sigma) / G^\top P^{-1} G`. ``P`` is the optimizer's second moment as
    it stands before the step, so it is independent of the gradients measured with it; until it
    exists the norm is NaN, and the measurement is left out.

    Args:
        optimizer: An optimizer whose state holds ``exp_avg_sq`` (Adam and its kin) or
            ``square_avg`` (RMSprop).

    Returns:
        The norm as a function of a parameter and its gradient.

    References:
        | An Empirical Model of Large-Batch Training (McCandlish et al., 2018), appendix A.1
        | https://arxiv.org/abs/1812.06162
    """
    options = {p: group for group in optimizer.param_groups for p in group["params"]}

    def norm(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        state = optimizer.state.get(parameter, {})
        second = state.get("exp_avg_sq", state.get("square_avg"))
        if second is None:
            return torch.full((), torch.nan, device=gradient.device)
        second = local(second).to(_wide(gradient))
        if "exp_avg_sq" in state and "betas" in options[parameter]:
            step = torch.as_tensor(state["step"], device=second.device)
            # 1 - beta^t, without the cancellation that float32 step counts would suffer.
            second = second / -torch.expm1(step * math.log(options[parameter]["betas"][1]))
        inverse = torch.rsqrt(second.sqrt() + options[parameter].get("eps", 1e-8))
        return euclidean_norm(parameter, gradient.to(inverse) * inverse)

    return norm


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)


class Meter:
    """Signal and noise of one step from norms of gradients.

    Args:
        measured: The measured parameters; a slot is an index into them.
        groups: Number of groups.
        world: The processes that train together.
        norm: Norm of a parameter's gradient.
        dtype: Type of the sums.
    """

    power = 1

    def __init__(
        self,
        measured: Sequence[Measured],
        groups: int,
        world: World,
        norm: Norm,
        dtype: torch.dtype,
    ) -> None:
        self.measured, self.groups, self.world, self.norm = measured, groups, world, norm
        device = measured[0].parameter.device
        self._rows = torch.tensor([m.group for m in measured], device=device)
        self._zero = torch.zeros((), dtype=dtype, device=device)
        self.clear()

    def clear(self) -> None:
        """Starts a new step."""
        self.is_empty = True
        self._parts = self._zero.new_zeros(self.groups)
        self._norms: list[Tensor | None] = [None] * len(self.measured)

    def see(self, slot: int, gradient: Tensor) -> None:
        """Takes the gradient that the open part adds to a parameter."""
        # A reduced shard is seen by every process that holds a copy of it; a local gradient by one.
        copies = replicas(gradient, self.world) if isinstance(gradient, DTensor) else 1
        norm = self.norm(self.measured[slot].parameter, local(gradient))
        self.see_norm(slot, norm if copies == 1 else norm / copies**0.5)

    def see_norm(self, slot: int, norm: Tensor) -> None:
        """Takes its norm."""
        if self._norms[slot] is not None:
            raise InputError(
                f"Expected one gradient of {self.measured[slot].name!r} a micro-batch. Found two: "
                "several backward passes, or a reentrant checkpoint of a reused layer. Remedy: "
                "NoiseScale(source='accumulated'), or checkpoint(..., use_reentrant=False)."
            )
        self._norms[slot] = norm

    def end_part(self, weight: float, loss_scale: Tensor | float) -> None:
        """Closes the open part, or open examples, of which each had this weight."""
        squares = self._by_group(self._norms) / (loss_scale * loss_scale) / weight
        self._parts = self._parts + squares
        self.is_empty = False
        self._norms = [None] * len(self.measured)

    def _by_group(self, norms: Sequence[Tensor | None]) -> Tensor:
        column = torch.stack([self._zero if n is None else n.to(self._zero) for n in norms])
        return self._zero.new_zeros(self.groups).index_add_(0, self._rows, column * column)

    def pack(self, step: "Step", scale: Tensor | float) -> Tensor:
        """This process's contribution to the step, to be added up over all processes.

        Args:
            step: The step's parts and how its gradients were reduced.
            scale: Loss scale that is still in ``.grad``.
        """
        sums = step.sums.scaled(step.factor)
        numbers = [torch.full_like(self._zero, x * step.share) for x in (sums.a, sums.c, sums.d)]
        whole = [self._whole(m, step.multiple) for m in self.measured]
        total = self._by_group(whole) / (scale * scale)
        return torch.cat([torch.stack(numbers), self._parts / step.factor, total])

    def _whole(self, measured: Measured, multiple: float) -> Tensor | None:
        gradient = measured.parameter.grad
        if gradient is None:
            return None
        copies = replicas(gradient, self.world)
        norm = self.norm(measured.parameter, local(gradient))
        return norm.mul(multiple / copies**0.5)

    def solve(self, packed: Tensor) -> SignalNoise:
        """Signal and noise of every group from the sum of all contributions."""
        a, c, d = packed[:3]
        parts, total = packed[3:].view(2, self.groups)
        return from_part_sums(parts / a, total / a**2, c / a, d / a**2)
