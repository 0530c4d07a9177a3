"""A few elements of gradients, looked at twice: in the parts, and in what is left in `.grad`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from steadygrad.formulas.summed_parts import is_altered, running_squares
from steadygrad.noise.parts import Step
from steadygrad.sharding import World, replicas

__all__ = ["Verdict", "Witness"]

# Clipping, loss scales and what was left from before change every element; these are enough.
_PARAMETERS, _ELEMENTS = 16, 8


class Verdict(NamedTuple):
    """What the elements say of one step.

    Attributes:
        altered: Whether ``.grad`` is anything but the parts' sum, boolean with shape ``()``.
        elements: Sums of the parts, ``.grad`` and loss scales, with shape ``(3, n)``.
        unit: Unit roundoff of the coarsest type that was met.
    """

    altered: Tensor
    elements: Tensor
    unit: float


class Line(NamedTuple):
    """Some elements of a parameter: equally far from each other in every dimension.

    Of a sharded parameter they lie in its first shard.

    Attributes:
        size: Number of elements.
        steps: Distance from one to the next, by dimensions.
        here: Whether they are in this process's shard.
        share: One over the number of processes that hold a copy.
    """

    size: int
    steps: tuple[int, ...]
    here: bool
    share: float

    def of(self, gradient: Tensor, like: Tensor) -> Tensor:
        """A copy of these elements of a dense tensor."""
        stride = sum(a * b for a, b in zip(self.steps, gradient.stride(), strict=True))
        view = gradient.as_strided((self.size,), (stride,), gradient.storage_offset())
        # A copy at once: autograd adds to the gradient in place.
        return view.to(like, copy=True)


class Witness:
    """The same elements of the parts and of ``.grad``, which must be the parts' sum.

    Args:
        parameters: The measured parameters; a slot is an index into them.
        world: The processes that train together.
        zero: A number of the type, and on the device, of all sums.
        reduced: Whether the parts' gradients are sharded like the parameters.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: World, zero: Tensor, reduced: bool
    ) -> None:
        self._world, self._zero, self._reduced = world, zero, reduced
        lines = {slot: line(parameter, world) for slot, parameter in enumerate(parameters)}
        known = [slot for slot, found in lines.items() if found is not None]
        last = max(len(known) - 1, 0)
        spread = {known[i * last // (_PARAMETERS - 1)] for i in range(_PARAMETERS) if known}
        self.lines: dict[int, Line] = {s: found for s in sorted(spread) if (found := lines[s])}
        slots = [slot for slot, found in self.lines.items() for _ in range(found.size)]
        self._slots = torch.tensor(slots, dtype=torch.int64, device=zero.device)
        self.clear()

    def clear(self) -> None:
        """Starts a new step."""
        self._parts: list[Tensor] = []
        self._scales = self._zero.new_ones(len(self._slots))
        # What is lost in the sums here and in loss scales, which are float32; and by gradients on
        # their way between processes, which may be bfloat16.
        here = max(8 * torch.finfo(self._zero.dtype).eps, _unit(torch.float32))
        self.unit = here if self._world.size == 1 else _unit(torch.bfloat16)
        self._least = 0.0
        self.drop_part()

    def drop_part(self) -> None:
        """Forgets the open part."""
        self._open: dict[int, Tensor] = {}

    def see(self, slot: int, gradient: Tensor) -> None:
        """Takes a gradient of the open part, as this process has it."""
        found = self.lines.get(slot)
        if found is not None and (found.here or not self._reduced):
            self._note(gradient)
            elements = found.of(gradient, self._zero)
            if self._reduced:
                elements *= found.share
            before = self._open.get(slot)
            self._open[slot] = elements if before is None else before + elements

    def end_part(self, loss_scale: Tensor | float) -> None:
        """Closes the open part."""
        if self.lines:
            self._scales = self._spread(loss_scale)
            self._parts.append(self._row(self._open) / self._scales)
        self.drop_part()

    def column(self, gradients: Mapping[int, Tensor], step: Step, scale: Tensor | float) -> Tensor:
        """This process's sums, to be added up over all processes, with shape ``(2 n + 1)``.

        Args:
            gradients: This process's parts of ``.grad``, by slots.
            step: How they were reduced.
            scale: Loss scale that is still in them; one for all, or for each slot.
        """
        if not self.lines:
            return self._zero.new_zeros(1)
        found = {}
        for slot, its in self.lines.items():
            if its.here and slot in gradients:
                self._note(gradients[slot])
                found[slot] = its.of(gradients[slot], self._zero) * its.share
        taken_out = self._spread(scale)
        held = self._row(found) * step.multiple / taken_out
        parts = torch.stack(self._parts) if self._parts else torch.zeros_like(held)[None]
        # Where a type has no smaller numbers, a rounding is not relative to the sum.
        coarse = (self._least / self.unit / taken_out).square().sum() * len(parts)
        squares = running_squares(parts) + coarse
        return torch.cat([parts.sum(0), held, squares[None]])

    def judge(self, sums: Tensor) -> Verdict:
        """Compares what the processes have added up."""
        seen, found = sums[:-1].view(2, -1)
        altered = is_altered(seen, found, sums[-1], self.unit, self._world.size)
        return Verdict(altered, torch.stack([seen, found, self._scales]), self.unit)

    def _row(self, elements: Mapping[int, Tensor]) -> Tensor:
        """Elements of all slots, zero where a slot has none."""
        lines = self.lines.items()
        return torch.cat(
            [elements[s] if s in elements else self._zero.new_zeros(it.size) for s, it in lines]
        )

    def _spread(self, scale: Tensor | float) -> Tensor:
        """A scale by slots, or of all, as one by elements."""
        if isinstance(scale, Tensor):
            wide = scale.to(self._zero)
            return wide[self._slots] if wide.dim() else wide.expand(len(self._slots))
        return torch.full_like(self._slots, scale, dtype=self._zero.dtype)

    def _note(self, gradient: Tensor) -> None:
        """Remembers the coarsest type."""
        limits = torch.finfo(gradient.dtype)
        self.unit = max(self.unit, _unit(gradient.dtype))
        self._least = max(self._least, limits.smallest_normal * limits.eps)


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def line(parameter: nn.Parameter, world: World) -> Line | None:
    """Elements of a parameter that every process can find; None where there are none."""
    shape, here = list(parameter.shape), True
    if isinstance(parameter, DTensor):
        *_, last = parameter.placements
        if isinstance(last, Shard):
            if last.dim != 0 or not shape:
                return None
            shape[0] = -(-shape[0] // parameter.device_mesh.size(-1))
            coordinate = parameter.device_mesh.get_coordinate()
            here = coordinate is not None and coordinate[-1] == 0
    if 0 in shape:
        return None
    count = min(_ELEMENTS, max(shape, default=1))
    steps = tuple(size // count for size in shape)
    return Line(count, steps, here, 1 / replicas(parameter, world))
