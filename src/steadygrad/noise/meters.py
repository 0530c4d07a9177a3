r"""Norms of gradients in several geometries.

A meter sees the gradients of the parts of one step (micro-batches, ranks or examples), then the
whole step's gradient, and solves for signal and noise. With :math:`h_j = a_j g_j` what part ``j``
adds to ``.grad``, all that is needed of the parts are sums,

.. math:: A = \sum a_j, \quad B = \sum |h_j|^2 / a_j, \quad C = \sum a_j / n_j, \quad
          D = \sum a_j^2 / n_j,

so the contributions of all processes add up in one collective. Then, with :math:`w_j = a_j / A`,
the equations of :mod:`steadygrad.formulas.noise_scale` apply.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad.distributed import World
from steadygrad.formulas.noise_scale import SignalNoise, from_part_sums
from steadygrad.noise.norms import Norms, values_of
from steadygrad.noise.parts import Part, Step
from steadygrad.noise.witness import Witness
from steadygrad.shards import replicas

__all__ = ["Measured", "Meter"]

# Gradients with fewer elements are held until the part is over, and measured in one call: on small
# layers the calls are what a measurement costs. Larger ones are measured while they are at hand.
_SMALL = 2**16


@dataclass(frozen=True)
class Measured:
    """One measured parameter: its name, itself, and the index of its group."""

    name: str
    parameter: nn.Parameter
    group: int


class Meter:
    """Signal and noise of one step from norms of gradients.

    Args:
        measured: The measured parameters; a slot is an index into them.
        groups: Number of groups.
        world: The processes that train together.
        norms: Norms of parameters' gradients.
        dtype: Type of the sums.
        reduced: Whether the parts' gradients are those of all processes, sharded like the
            parameters, instead of this process's own.
    """

    power = 1

    def __init__(
        self,
        measured: Sequence[Measured],
        groups: int,
        world: World,
        norms: Norms,
        dtype: torch.dtype,
        reduced: bool = False,
    ) -> None:
        self.measured, self.groups, self.world, self.norms = measured, groups, world, norms
        device = measured[0].parameter.device
        self._rows = torch.tensor([m.group for m in measured], device=device)
        self._zero = torch.zeros((), dtype=dtype, device=device)
        # A reduced gradient is seen by every process that holds a copy; it must count once.
        shares = [1 / replicas(m.parameter, world) for m in measured]
        self._shares = torch.tensor(shares, dtype=dtype, device=device)
        part_shares = self._shares if reduced else torch.ones_like(self._shares)
        self._both_shares = torch.stack([part_shares, self._shares])
        self.witness = Witness([m.parameter for m in measured], world, self._zero, reduced)
        self.clear()

    def clear(self) -> None:
        """Starts a new step."""
        # Folded as parts come, so that passes without a step hold no memory.
        self._squares = torch.zeros_like(self._shares)
        self.is_empty = True
        self.witness.clear()
        self.drop_part()

    def drop_part(self) -> None:
        """Forgets the open part."""
        self._held: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self.witness.drop_part()

    def see(self, slot: int, gradient: Tensor) -> None:
        """Takes the gradient that the open part adds to a parameter."""
        gradient = values_of(gradient)
        if slot in self.witness.lines:
            self.witness.see(slot, gradient)
        if gradient.numel() < _SMALL:
            self._refuse_second(slot)
            self._held[slot] = gradient
        else:
            self.see_norm(slot, self.norms([self.measured[slot].parameter], [gradient])[0])

    def see_norm(self, slot: int, norm: Tensor) -> None:
        """Takes its norm."""
        self._refuse_second(slot)
        self._norms[slot] = norm

    def _refuse_second(self, slot: int) -> None:
        if slot in self._norms or slot in self._held:
            raise InputError(
                f"Expected one gradient of {self.measured[slot].name!r} a micro-batch. Found two: "
                "several backward passes, or a reentrant checkpoint of a reused layer. Remedy: "
                "NoiseScale(source='accumulated'), or checkpoint(..., use_reentrant=False)."
            )

    def end_part(self, part: Part, loss_scale: Tensor | float) -> None:
        """Closes the open part, or open examples.

        Args:
            part: The part's facts; its weight is provisional.
            loss_scale: Loss scale of its gradients; one for all, or for each slot.
        """
        scaled = self._column(self._norms, self._held) / loss_scale
        self._squares.addcmul_(scaled, scaled * _inverse(part.each))
        self.is_empty = False
        self.witness.end_part(part, loss_scale)
        self.drop_part()

    def _column(self, norms: Mapping[int, Tensor], gradients: Mapping[int, Tensor]) -> Tensor:
        """Norms by slot, given as such or to be taken of gradients; zero for the others."""
        slots = sorted(gradients)
        parameters = [self.measured[slot].parameter for slot in slots]
        taken = self.norms(parameters, [gradients[slot] for slot in slots]) if slots else []
        if len(taken) < len(self.measured):
            found = {**norms, **dict(zip(slots, taken, strict=True))}
            taken = [found.get(slot, self._zero) for slot in range(len(self.measured))]
        there = self._zero.device
        return torch.stack([n if n.device == there else n.to(there) for n in taken]).to(self._zero)

    def measure(self, step: Step, scale: Tensor | float) -> tuple[SignalNoise, Tensor]:
        """Signal and noise of every group, each with shape ``(groups,)``; one collective.

        Args:
            step: The step's parts and how its gradients were reduced.
            scale: Loss scale that is still in ``.grad``; one for all, or for each slot.

        Returns:
            The measurement, and whether ``.grad`` is anything but the sum of the parts. It is NaN
            where that is so or a gradient is not finite, and infinite where a process had no step.
        """
        gradients = {
            slot: values_of(m.parameter.grad)
            for slot, m in enumerate(self.measured)
            if m.parameter.grad is not None
        }
        own = self.sums(gradients, step, scale)
        seen = self.witness.column(gradients, step, scale)
        packed = self.world.sum(torch.cat([own, seen]))
        own, seen = packed.split([len(own), len(seen)])
        finite = torch.isfinite(own).all()
        # A step that is left out anyway, as after an overflow, says nothing of its gradients.
        altered = self.witness.judge(seen) & finite
        kept = finite & ~altered
        self.witness.compare(seen, kept)
        left_out = torch.where(torch.isfinite(own[0]), torch.nan, torch.inf)
        return SignalNoise(*(torch.where(kept, x, left_out) for x in self.solve(own))), altered

    def sums(self, gradients: Mapping[int, Tensor], step: Step, scale: Tensor | float) -> Tensor:
        """This process's ``A``, ``C``, ``D``, every group's ``B`` and squared norm of the whole.

        The first is NaN if, and only if, the step is broken.
        """
        sums, factor = step.sums, step.factor
        scaled = (sums.a * factor, sums.c * factor, sums.d * factor**2)
        numbers = [self._zero + x * step.share for x in scaled]
        whole = self._column({}, gradients) * step.multiple / scale
        rows = torch.stack([self._squares / factor, whole * whole]) * self._both_shares
        by_group = rows.new_zeros(2, self.groups).index_add_(1, self._rows, rows)
        return torch.cat([torch.stack(numbers), by_group.flatten()])

    def solve(self, sums: Tensor) -> SignalNoise:
        """Signal and noise from the sums over all processes."""
        a, c, d = sums[:3]
        parts, whole = sums[3:].view(2, self.groups)
        return from_part_sums(parts / a, whole / (a * a), c / a, d / (a * a))


def _inverse(weight: Tensor | float) -> Tensor | float:
    """Inverse of a weight; a part of weight zero, as of padding alone, adds nothing."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, 1 / weight)
    return 1 / weight
