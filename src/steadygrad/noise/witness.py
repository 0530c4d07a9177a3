"""A few elements of gradients, read twice: in the parts, and in `.grad` at the end."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steadygrad.distributed import World
from steadygrad.formulas.summed_parts import ROUNDINGS, is_altered
from steadygrad.noise.parts import Part, Step
from steadygrad.noise.repeats import Likeness
from steadygrad.shards import first_shard, replicas

__all__ = ["Alterations", "Witness"]

# Clipping, a loss scale or leftover gradients change every element, so these numbers of parameters
# and elements are enough to notice them. A change of a few parameters is found when it is their
# turn.
_PARAMETERS, _ELEMENTS = 4, 16
# Steps between two reads on an accelerator; each reads the copy that was started at the one before.
_INTERVAL = 16


class Line(NamedTuple):
    """Some elements of a parameter: equally far from each other in every dimension.

    Of a sharded parameter they lie in its first shard.

    Attributes:
        size: Number of elements.
        steps: Distance from one element to the next, by dimensions.
        here: Whether that shard is this process's.
        share: One over the number of processes that hold a copy; zero on the others.
    """

    size: int
    steps: tuple[int, ...]
    here: bool
    share: float

    def of(self, gradient: Tensor) -> Tensor:
        """These elements of a dense tensor, as a view."""
        stride = sum(a * b for a, b in zip(self.steps, gradient.stride(), strict=True))
        return gradient.as_strided((self.size,), (stride,), gradient.storage_offset())


class _Turn(NamedTuple):
    """The elements of one step: lines by slots, and each element's slot and share."""

    lines: dict[int, Line]
    slots: Tensor
    shares: Tensor

    @classmethod
    def of(cls, lines: dict[int, Line], zero: Tensor) -> "_Turn":
        slots = [slot for slot, line in lines.items() for _ in range(line.size)]
        shares = [line.share for line in lines.values() for _ in range(line.size)]
        on_device = torch.tensor(slots, dtype=torch.int64, device=zero.device)
        return cls(lines, on_device, torch.tensor(shares, dtype=zero.dtype, device=zero.device))


class Witness:
    """Compares a few elements of ``.grad`` with the sum of the parts' elements at the same places.

    Args:
        parameters: The measured parameters; a slot is an index into them.
        world: The processes that train together.
        zero: A number of the type, and on the device, of all sums.
        reduced: Whether the parts' gradients are sharded like the parameters.

    Attributes:
        likeness: Compares the first part of each step with the last one.
        slots: Slots that are compared sooner or later.
        lines: Places that are compared in this step, by slot.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: World, zero: Tensor, reduced: bool
    ) -> None:
        self._world, self._zero, self._reduced = world, zero, reduced
        found = {slot: line_of(parameter, world) for slot, parameter in enumerate(parameters)}
        known = {slot: line for slot, line in found.items() if line is not None}
        self.slots = list(known)
        count = max(-(-len(known) // _PARAMETERS), 1)
        chosen = (self.slots[start::count] for start in range(count))
        self._turns = [_Turn.of({slot: known[slot] for slot in slots}, zero) for slots in chosen]
        self.likeness = Likeness(count, _PARAMETERS * _ELEMENTS, zero)
        # Rounding of these sums and of loss scales (float32), and of gradients that processes
        # exchange (possibly bfloat16).
        here = max(8 * torch.finfo(zero.dtype).eps, _unit(torch.float32))
        self._unit = here if world.size == 1 else _unit(torch.bfloat16)
        self.turn(0)
        self.clear()

    def turn(self, step: int) -> None:
        """Looks at the parameters whose turn it is, on all processes the same."""
        self._turn = step % len(self._turns)
        self.lines, self._slots, self._shares = self._turns[self._turn]

    def clear(self) -> None:
        """Starts a new step."""
        self._seen, self._squares = self._zero, self._zero
        self._count = 0
        self._first: tuple[Tensor, Part] | None = None
        self._types: set[torch.dtype] = set()
        self.drop_part()

    def drop_part(self) -> None:
        """Forgets the open part."""
        self._open: dict[int, Tensor] = {}

    def see(self, slot: int, gradient: Tensor) -> None:
        """Takes the gradient of a slot that has a line, as this process has it."""
        line = self.lines[slot]
        if self._reduced and not line.here:
            return
        # A copy at once: DDP and FSDP2 reduce gradients in place.
        elements = line.of(gradient).clone()
        before = self._open.get(slot)
        self._open[slot] = elements if before is None else before + elements

    def end_part(self, part: Part, loss_scale: Tensor | float) -> None:
        """Closes the open part."""
        if self.lines:
            row = self._row(self._open) / self._spread(loss_scale)
            row = row * self._shares if self._reduced else row
            self._seen = self._seen + row
            self._squares = self._squares + self._seen.square().sum()
            self._first = self._first or (row, part)
            if part.samples == self._first[1].samples:
                self._last = row, part
            self._count += 1
        self.drop_part()

    def column(self, gradients: Mapping[int, Tensor], step: Step, scale: Tensor | float) -> Tensor:
        """This process's sums, to be added up over all processes, with shape ``(3 n + 1)``.

        Args:
            gradients: This process's parts of ``.grad``, by slots.
            step: How they were reduced.
            scale: Loss scale that is still in them; one for all, or for each slot.
        """
        if not self.lines:
            return self._zero.new_zeros(1)
        lines = self.lines.items()
        found = {
            slot: line.of(gradients[slot])
            for slot, line in lines
            if slot in gradients and line.here
        }
        taken_out = self._spread(scale)
        held = self._row(found) * self._shares * (step.multiple / taken_out)
        # Where a type has no smaller numbers, a rounding is not relative to the sum.
        least = self._least() / self.unit / taken_out
        coarse = least * least * max(self._count, 1)
        coarse = (torch.zeros_like(held) + coarse).sum()
        seen, squares = self._seen.expand_as(held), (self._squares + coarse).view(1)
        return torch.cat([seen, held, self._difference(held), squares])

    def _difference(self, like: Tensor) -> Tensor:
        """First mean gradient less the last one of as many samples, times both weights.

        Only such ones are alike in more than their means. Zeros where they differ by rounding.
        """
        if self._first is None:
            return torch.zeros_like(like)
        (first, a), (last, b) = self._first, self._last
        first, last = first * b.weight, last * a.weight
        distance, size = (first - last).norm(), first.norm() + last.norm()
        return torch.where(distance > ROUNDINGS * self.unit * size, first - last, 0.0)

    def judge(self, sums: Tensor) -> Tensor:
        """Whether ``.grad`` is anything but the parts' sum, from the sums over all processes."""
        count = len(self._slots)
        seen, found = sums[:count], sums[count : 2 * count]
        return is_altered(seen, found, sums[-1], self.unit, self._world.size)

    def compare(self, sums: Tensor, kept: Tensor) -> None:
        """Compares first and last parts in the sums over all processes, if the step was kept."""
        difference = sums[2 * len(self._slots) : -1]
        self.likeness.note(self._turn, torch.where(kept, difference, 0.0))

    @property
    def unit(self) -> float:
        """Largest unit roundoff of the compared gradients' dtypes, and of their reduction."""
        return max([self._unit, *map(_unit, self._types)])

    def _least(self) -> float:
        """Largest of the smallest numbers of the compared gradients' dtypes."""
        limits = map(torch.finfo, self._types)
        return max((it.smallest_normal * it.eps for it in limits), default=0.0)

    def _row(self, elements: Mapping[int, Tensor]) -> Tensor:
        """Elements of all slots, zero where a slot has none."""
        self._types.update(taken.dtype for taken in elements.values())
        device = self._zero.device
        rows = (
            elements[slot].to(device) if slot in elements else self._zero.new_zeros(line.size)
            for slot, line in self.lines.items()
        )
        return torch.cat(list(rows)).to(self._zero)

    def _spread(self, scale: Tensor | float) -> Tensor | float:
        """A scale of each slot as one of each element."""
        if not isinstance(scale, Tensor):
            return scale
        wide = scale.to(self._zero)
        return wide[self._slots] if wide.dim() else wide


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def line_of(parameter: nn.Parameter, world: World) -> Line | None:
    """Elements of a parameter that every process can find; None where there are none."""
    first = first_shard(parameter)
    if first is None or 0 in first.shape or not parameter.is_floating_point():
        return None
    size = min(_ELEMENTS, max(first.shape, default=1))
    steps = tuple(length // size for length in first.shape)
    return Line(size, steps, first.here, first.here / replicas(parameter, world))


class Alterations:
    """Counts steps left out because ``.grad`` was not the sum of the parts, and warns once.

    Attributes:
        count: Number of such steps, with shape ``()``.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._on_host = device.type == "cpu"
        self._any = torch.zeros((), dtype=torch.bool, device=device)
        self._copied: tuple[Tensor, Any] | None = None
        self._steps, self._warned = 0, False

    def note(self, altered: Tensor) -> None:
        """Counts a step if it was altered; waits for no device."""
        self.count += altered
        if self._warned:
            return
        self._any |= altered
        if self._on_host:
            self._warned = bool(altered)
        elif self._steps % _INTERVAL == 0:
            if self._copied is not None and self._copied[1].query():
                self._warned = bool(self._copied[0])
            self._copied = self._copy(self._any)
        self._steps += 1
        if self._warned:
            warnings.warn(
                "Expected `.grad` to be the sum of the micro-batches' gradients at noise.step(). "
                "Found other values. Such steps are left out, and `noise.altered` counts them. "
                "Remedy: call noise.step() before gradients are clipped, divided or cleared, hand "
                "over the loss scale (`scaler`, `grad_scale`), and announce every backward pass "
                "since zero_grad().",
                stacklevel=5,
            )

    @staticmethod
    def _copy(flag: Tensor) -> tuple[Tensor, Any]:
        """A copy on the host, and the event after which it is there."""
        here = torch.empty((), dtype=flag.dtype, pin_memory=flag.is_cuda)
        here.copy_(flag, non_blocking=True)
        event = torch.Event(flag.device)
        event.record()
        return here, event
