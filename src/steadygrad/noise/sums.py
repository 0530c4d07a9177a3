r"""Sums over the parts of one step, in several geometries.

With :math:`h_j = a_j g_j` what part ``j`` (a micro-batch, a rank or an example) adds to ``.grad``,
all that is needed of the parts is

.. math:: A = \sum a_j, \quad B = \sum |h_j|^2 / a_j, \quad C = \sum a_j / n_j, \quad
          D = \sum a_j^2 / n_j,

so the contributions of all processes add up in one collective. Then, with :math:`w_j = a_j / A`,
:mod:`steadygrad.noise.equations` apply.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.distributed import World
from steadygrad.noise.equations import SignalNoise, from_part_sums, unbias_deviation
from steadygrad.noise.witness import Witness
from steadygrad.numerics import exact, wide
from steadygrad.shards import local, replicas

Norms = Callable[[Sequence[nn.Parameter], Sequence[Tensor]], Sequence[Tensor]]

# Gradients with fewer elements are held until the part is over, and measured in one call: on small
# layers the calls are what a measurement costs. Larger ones are measured while they are at hand.
_SMALL = 2**16


def values_of(gradient: Tensor) -> Tensor:
    """This process's part of a gradient; dense, as every row counts and none is waited for."""
    here = gradient if type(gradient) is Tensor else local(gradient)
    return here.to_dense() if here.layout is not torch.strided else here


def euclidean_norms(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The ordinary norms, each with shape ``()``, added up in float32 at least."""
    kinds = {(gradient.dtype, gradient.device) for gradient in gradients}
    if len(kinds) == 1:
        return torch._foreach_norm(list(gradients), 2, dtype=wide(gradients[0].dtype))
    return [torch.linalg.vector_norm(each, dtype=wide(each.dtype)) for each in gradients]


def moment_of(
    optimizer: Optimizer, names: Sequence[str]
) -> Callable[[nn.Parameter], Tensor | None]:
    """This process's part of an optimizer's average, by one of these names; None before it is.

    An optimizer that has taken a step and keeps none is refused.
    """
    stepped = False

    def note_step(*_: object) -> None:
        nonlocal stepped
        stepped = True

    optimizer.register_step_post_hook(note_step)

    def moment(parameter: nn.Parameter) -> Tensor | None:
        state = optimizer.state.get(parameter, {})
        for name in names:
            if state.get(name) is not None:
                return local(state[name])
        states = optimizer.state.values()
        if stepped and all(state.get(name) is None for state in states for name in names):
            raise InputError(
                f"Expected `optimizer` to keep {' or '.join(names)}. Found "
                f"{type(optimizer).__name__}, which has taken a step without. "
                "Remedy: metric='euclidean'."
            )
        return None

    return moment


def preconditioned_norms(optimizer: Optimizer) -> Norms:
    r"""The norm :math:`\sqrt{g^\top P^{-1} g}` with :math:`P = \sqrt{\hat v} + \epsilon`.

    For updates :math:`P^{-1} g` and a curvature that looks like ``P``, the noise scale becomes
    :math:`\mathrm{tr}(P^{-1}\Sigma) / G^\top P^{-1} G` (McCandlish et al., 2018, appendix A.1).
    ``P`` is the second moment of Adam and its kin, or RMSprop, as it stands before the step, so it
    is independent of the gradients measured with it; until it exists the norm is NaN.
    """
    options = {p: group for group in optimizer.param_groups for p in group["params"]}
    # AMSGrad divides by the largest.
    moment = moment_of(optimizer, ("max_exp_avg_sq", "exp_avg_sq", "square_avg"))

    def norm(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        dtype, kept = wide(gradient.dtype), moment(parameter)
        if kept is None:
            return gradient.new_full((), torch.nan, dtype=dtype)
        second, group, state = kept.to(dtype), options[parameter], optimizer.state[parameter]
        betas: Any = group.get("betas")
        step = state.get("step", group.get("step"))
        averaged = betas is not None and "exp_avg_sq" in state
        odd = (betas is not None and len(betas) != 2) or (averaged and step is None)
        if odd or second.shape != gradient.shape:
            raise InputError(
                "Expected `optimizer` with two betas, `step`, and a second moment of each element, "
                f"for metric='preconditioned'. Found {type(optimizer).__name__} with betas={betas},"
                f" step={step} and a second moment of shape {tuple(second.shape)}. "
                "Remedy: metric='l1' or 'euclidean'."
            )
        if averaged:
            step = torch.as_tensor(step).to(exact(second.device))
            second = second / -torch.expm1(step * math.log(betas[1]))
        inverse = torch.rsqrt(second.sqrt() + group.get("eps", 1e-8))
        return torch.linalg.vector_norm(gradient.to(inverse) * inverse)  # type: ignore[no-any-return]

    return lambda parameters, gradients: [*map(norm, parameters, gradients)]


class Sums:
    """Sums over the parts of one step, on this process and over all processes.

    A slot is an index into the measured parameters; ``groups`` has each slot's. Without an
    ``optimizer`` norms are euclidean. ``reduced`` gradients are those of all processes, sharded
    like the parameters. Weights may be off by one factor until the step is over; ``broken`` steps
    cannot be measured. ``alike``: each process needs two parts, and all of them equal. The noise
    scale is noise over signal to the ``power``.
    """

    power = 1
    alike = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Sequence[int],
        world: World,
        optimizer: Optimizer | None,
        *,
        reduced: bool,
    ) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.world = world
        self.norms: Norms = euclidean_norms
        self.together = world.size if reduced else 1
        device = self.parameters[0].device
        self._zero = torch.zeros((), dtype=exact(device), device=device)
        self._groups, self._rows = max(groups) + 1, torch.tensor(groups, device=device)
        # A reduced gradient is seen by every process that holds a copy; it must count once.
        self._shares = self._zero.new_tensor([1 / replicas(p, world) for p in self.parameters])
        self._part_shares = self._shares if reduced else torch.ones_like(self._shares)
        self.witness = Witness(self.parameters, world, self._zero, reduced)
        if optimizer is not None:
            self._use(optimizer)
        self.clear()

    def _use(self, optimizer: Optimizer) -> None:
        self.norms = preconditioned_norms(optimizer)

    def clear(self) -> None:
        """Starts a new step."""
        # Folded as parts come, so that passes without a step hold no memory.
        self._squares = torch.zeros_like(self._shares)
        self.a: Tensor | float = 0.0
        self.c: Tensor | float = 0.0
        self.d: Tensor | float = 0.0
        self.parts = self.samples = 0
        self.broken = False
        self.witness.clear()
        self.drop_part()

    def drop_part(self) -> None:
        """Forgets the open part."""
        self._held: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self.witness.drop_part()

    def see(self, slot: int, gradient: Tensor) -> None:
        """Takes the gradient that the open part adds to a parameter, dense, as it is here."""
        self.witness.see(slot, gradient)
        if gradient.numel() < _SMALL:
            self._refuse_second(slot)
            self._held[slot] = gradient
        else:
            self.see_norm(slot, self.norms([self.parameters[slot]], [gradient])[0])

    def see_norm(self, slot: int, norm: Tensor) -> None:
        """Takes its norm."""
        self._refuse_second(slot)
        self._norms[slot] = norm

    def _refuse_second(self, slot: int) -> None:
        if slot in self._norms or slot in self._held:
            raise InputError(
                f"Expected one gradient of {self.names[slot]!r} a micro-batch. Found two: "
                "several backward passes, or a reentrant checkpoint of a reused layer. Remedy: "
                "NoiseScale(source='accumulated'), or checkpoint(..., use_reentrant=False)."
            )

    def end_part(
        self, weight: Tensor | float, samples: int, parts: int, loss_scale: Tensor | float
    ) -> None:
        """Closes the open part, which is made of equal ones.

        Its weight is the factor between its mean loss and what ``backward`` was called on, its loss
        scale one for all, or for each slot.
        """
        scaled = self._column(self._norms, self._held) / loss_scale
        self._squares.addcmul_(scaled, scaled * _inverse(weight / parts))
        self.witness.end_part(weight, samples, loss_scale)
        self.drop_part()
        samples *= self.together
        self.a = self.a + weight
        self.c = self.c + weight * (parts / samples)
        self.d = self.d + weight * weight / samples
        self.parts += parts
        self.samples += samples

    def _column(self, norms: Mapping[int, Tensor], gradients: Mapping[int, Tensor]) -> Tensor:
        """Norms by slot, known or to be taken of gradients; zero for the others."""
        slots = sorted(gradients)
        parameters = [self.parameters[slot] for slot in slots]
        column = self.norms(parameters, [gradients[slot] for slot in slots]) if slots else []
        if len(column) < len(self.parameters):
            known = {**norms, **dict(zip(slots, column, strict=True))}
            column = [known.get(slot, self._zero) for slot in range(len(self.parameters))]
        there = self._zero.device
        return torch.stack([n if n.device == there else n.to(there) for n in column]).to(self._zero)

    def measure(self, factor: float, scale: Tensor | float) -> SignalNoise:
        """Signal and noise of every group, each with shape ``(groups,)``; one collective.

        They are NaN where a gradient is not finite or ``.grad`` is anything but the sum of the
        parts, and infinite where a process had no step. ``factor`` is true weights over those that
        the parts came with, ``scale`` the loss scale still in ``.grad``, one or each slot's.
        """
        if self.broken:
            # Through the collective it reaches every process, and all leave the step out.
            self.a, self.parts, self.samples = math.nan, 2, 2
        grads = enumerate(p.grad for p in self.parameters)
        gradients = {slot: values_of(grad) for slot, grad in grads if grad is not None}
        # Gradient summed over what the processes saw, over `.grad`.
        multiple = self.world.size / self.together
        here = self._here(gradients, factor, multiple, scale)
        packed = torch.cat([here, self.witness.column(gradients, multiple, scale)])
        sums, seen = self.world.sum(packed).tensor_split([len(here)])
        kept = self.witness.judge(seen, torch.isfinite(sums).all())
        left_out = torch.where(torch.isfinite(sums[0]), torch.nan, torch.inf)
        return tuple(torch.where(kept, x, left_out) for x in self._solve(sums))

    def _here(
        self, gradients: Mapping[int, Tensor], factor: float, multiple: float, scale: Tensor | float
    ) -> Tensor:
        """``A``, ``C``, ``D`` of this process, every group's ``B`` and squared norm of the whole.

        The first is NaN if, and only if, the step is broken.
        """
        facts = [self.a * factor, self.c * factor, self.d * factor**2]
        whole = self._column({}, gradients) * multiple / scale
        rows = [self._squares / factor * self._part_shares, whole * whole * self._shares]
        return self._packed([x * (1 / self.together) for x in facts], rows)

    def _packed(self, facts: Sequence[Tensor | float], rows: Sequence[Tensor]) -> Tensor:
        """Facts of the step, then each row added up by groups."""
        zeros = self._zero.new_zeros(len(rows), self._groups)
        by_group = zeros.index_add_(1, self._rows, torch.stack([*rows]))
        return torch.cat([torch.stack([self._zero + x for x in facts]), by_group.flatten()])

    def _solve(self, sums: Tensor) -> SignalNoise:
        """Signal and noise from the sums over all processes."""
        a, c, d = sums[:3]
        parts, whole = sums[3:].view(2, self._groups)
        return from_part_sums(parts / a, whole / (a * a), c / a, d / (a * a))


class SignSums(Sums):
    r"""Sums for sign-like updates, in the geometry of their dual norm.

    The noise is :math:`\|\sigma\|_1`, from every coordinate's variance over this process's
    micro-batches (corrected by :math:`c_4`, exact for normal gradients). The signal is
    :math:`\langle \bar g, \mathrm{sign}(m) \rangle` with the optimizer's momentum ``m`` as it
    stands before the step: ``m`` is independent of :math:`\bar g`, so unlike
    :math:`\|\bar g\|_1` it holds no noise, and it is the descent that a sign step really makes, at
    most :math:`\|G\|_1`. Costs two float32 copies of the parameters, in which deviations over parts
    below a thousandth of the gradient are biased: 1 % too small at 1e-3 of it, 12 % at 3e-4.

    References:
        | Adaptive Batch Sizes Using Non-Euclidean Gradient Noise Scales for Stochastic Sign and
        | Spectral Descent (2026), https://arxiv.org/abs/2602.03001
    """

    power = 2
    alike = True

    def _use(self, optimizer: Optimizer) -> None:
        self._momentum = moment_of(optimizer, ("exp_avg", "momentum_buffer"))
        shards = [local(p) for p in self.parameters]
        self._first = [torch.zeros_like(p, dtype=torch.float32) for p in shards]
        self._second = [torch.zeros_like(p, dtype=torch.float32) for p in shards]

    def clear(self) -> None:
        """Starts a new step."""
        super().clear()
        self._loss_scale: Tensor | float = 1.0
        torch._foreach_zero_(self._first)
        torch._foreach_zero_(self._second)

    def see(self, slot: int, gradient: Tensor) -> None:
        """Takes the gradient that the open part adds to a parameter."""
        self.see_norm(slot, self._zero)
        self.witness.see(slot, gradient)
        gradient = gradient.to(torch.float32)
        self._first[slot].add_(gradient)
        self._second[slot].addcmul_(gradient, gradient)

    def end_part(
        self, weight: Tensor | float, samples: int, parts: int, loss_scale: Tensor | float
    ) -> None:
        """Closes the open part; all parts of a step weigh the same and share the loss scale."""
        super().end_part(weight, samples, parts, loss_scale)
        self._loss_scale = loss_scale

    def _here(
        self, gradients: Mapping[int, Tensor], factor: float, multiple: float, scale: Tensor | float
    ) -> Tensor:
        r"""The weight of this process's parts, and deviation and descent of every group.

        With ``m`` equal parts of ``n/m`` samples, :math:`h_j = (A/m)\,g_j`.
        """
        m, weight = self.parts, self.a * factor
        variance_factor = (self.samples / m) / ((m - 1) * (weight / m) ** 2)
        c4 = unbias_deviation(self._zero.new_full((), m - 1))
        deviation, descent = [], []
        for slot, parameter in enumerate(self.parameters):
            spread = self._second[slot] - self._first[slot] ** 2 / m
            sigma = (spread * variance_factor).clamp_(min=0).sqrt_().sum(dtype=self._zero.dtype)
            deviation.append(sigma / c4)
            descent.append(self._descent(parameter, gradients.get(slot)))
        rows = [torch.stack(deviation) / self._loss_scale, torch.stack(descent) * multiple / scale]
        return self._packed([weight * (1 / self.together)], [row * self._shares for row in rows])

    def _solve(self, sums: Tensor) -> SignalNoise:
        """Deviation and descent of every group, whose ratio's square is the noise scale."""
        deviation, descent = sums[1:].view(2, self._groups)
        return descent / sums[0], deviation

    def _descent(self, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            return self._zero
        momentum = self._momentum(parameter)
        if momentum is None:
            return torch.full_like(self._zero, torch.nan)
        sign = torch.sign(momentum).to(torch.float32)
        return (gradient.to(torch.float32) * sign).sum(dtype=self._zero.dtype)


def _inverse(weight: Tensor | float) -> Tensor | float:
    """Inverse of a weight; a part of weight zero, as of padding alone, adds nothing."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, 1 / weight)
    return 1 / weight
