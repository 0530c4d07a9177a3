"""A few elements of gradients, read twice: in the parts, and in `.grad` at the end."""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from steadygrad.distributed import World
from steadygrad.noise.equations import is_altered
from steadygrad.shards import first_shard, replicas

# Clipping, a loss scale or leftover gradients change every element, so these numbers of parameters
# and elements are enough to notice them. A change of a few parameters is found when it is their
# turn.
_PARAMETERS, _ELEMENTS = 4, 16

_ALTERED = (
    "Expected `.grad` to be the sum of the micro-batches' gradients at noise.step(), on all ranks "
    "alike. Found other values. Such steps are left out, and `noise.altered` counts them. Remedy: "
    "call noise.step() before gradients are clipped, divided or cleared, hand over the loss scale "
    "(`scaler`, `grad_scale`), announce every backward pass since zero_grad(), and let DDP "
    "synchronise the last one."
)


class Witness:
    """Compares a few elements of ``.grad`` with the sum of the parts' elements at the same places.

    A slot is an index into the parameters; ``slots`` are those compared sooner or later. ``zero``
    is of all sums' type and device; ``reduced`` gradients are sharded like the parameters.
    ``count`` is the number of steps where ``.grad`` was not the parts' sum, or not alike on all
    processes that hold a copy of it.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: World, zero: Tensor, reduced: bool
    ) -> None:
        self._world, self._zero, self._reduced = world, zero, reduced
        # Of a sharded parameter, elements lie in its first shard.
        shards = {slot: first_shard(p) for slot, p in enumerate(parameters)}
        self._shards = {
            slot: shard
            for slot, shard in shards.items()
            if shard is not None and 0 not in shard.shape and parameters[slot].is_floating_point()
        }
        self.slots = list(self._shards)
        copies = {slot: replicas(parameters[slot], world) for slot in self.slots}
        self._turns = []
        for start in range(count := max(-(-len(self.slots) // _PARAMETERS), 1)):
            chosen = self.slots[start::count]
            each = [slot for slot in chosen for _ in range(_size(self._shards[slot].shape))]
            index = torch.tensor(each, dtype=torch.int64, device=zero.device)
            # One over the number of processes that hold a copy; zero on the others.
            shares = zero.new_tensor([self._shards[slot].here / copies[slot] for slot in each])
            self._turns.append((chosen, index, shares))
        self.count = torch.zeros((), dtype=torch.int64, device=zero.device)
        self._ever = torch.zeros((), dtype=torch.bool, device=zero.device)
        self._on_host = torch.zeros((), dtype=torch.bool, pin_memory=zero.is_cuda)
        self._warned = False
        self.turn(0)
        self.clear()

    def turn(self, step: int) -> None:
        """Looks at the parameters whose turn it is, on all processes the same."""
        self._slots, self._index, self._shares = self._turns[step % len(self._turns)]

    def clear(self) -> None:
        """Starts a new step."""
        self._seen, self._squares, self._parts = self._zero, self._zero, 0
        self._types: set[torch.dtype] = set()
        self.drop_part()

    def drop_part(self) -> None:
        """Forgets the open part."""
        self._open: dict[int, Tensor] = {}

    def see(self, slot: int, gradient: Tensor) -> None:
        """Takes the gradient of a slot, dense, as this process has it."""
        if slot not in self._slots or (self._reduced and not self._shards[slot].here):
            return
        # A copy at once: DDP and FSDP2 reduce gradients in place.
        elements = _elements(gradient, self._shards[slot].shape).clone()
        known = self._open.get(slot)
        self._open[slot] = elements if known is None else known + elements

    def end_part(self, loss_scale: Tensor | float) -> None:
        """Closes the open part."""
        row = self._row(self._open) / self._by_element(loss_scale)
        row = row * self._shares if self._reduced else row
        self._seen = self._seen + row
        self._squares = self._squares + self._seen.square().sum()
        self._parts += 1
        self.drop_part()

    def column(
        self, gradients: Mapping[int, Tensor], multiple: float, scale: Tensor | float
    ) -> Tensor:
        """This process's sums, to be added up over all processes, with shape ``(2 n + 1)``.

        ``multiple`` is the gradient summed over what the processes saw, over ``.grad``, and
        ``scale`` the loss scale that is still in it, one or each slot's.
        """
        there = [s for s in self._slots if s in gradients and self._shards[s].here]
        scale = self._by_element(scale)
        rows = {slot: _elements(gradients[slot], self._shards[slot].shape) for slot in there}
        held = self._row(rows) * self._shares * (multiple / scale)
        # Where a type has no smaller numbers, a rounding is not relative to the sum.
        limits = [torch.finfo(dtype) for dtype in self._types]
        least = max((it.smallest_normal * it.eps for it in limits), default=0.0)
        coarse = torch.zeros_like(held) + (least / self._unit() / scale) ** 2 * max(self._parts, 1)
        squares = (self._squares + coarse.sum()).view(1)
        return torch.cat([self._seen.expand_as(held), held, squares])

    def judge(self, sums: Tensor, finite: Tensor, unequal: Tensor) -> Tensor:
        """Whether the step can be kept, from the sums over all processes; waits for no device.

        Counts a step whose ``.grad`` is not the parts' sum, or ``unequal`` on processes that hold
        copies, and warns of the first. One that is not finite is left out anyway, and says nothing
        of its gradients.
        """
        seen, held = sums[:-1].view(2, len(self._index))
        altered = is_altered(seen, held, sums[-1], self._unit(), self._world.size)
        altered = (altered | unequal) & finite
        self.count += altered
        if not self._warned:
            self._ever |= altered
            # From an accelerator it arrives later, and is read in a later step.
            self._on_host.copy_(self._ever, non_blocking=True)
            self._warned = bool(self._on_host)
            if self._warned:
                warnings.warn(_ALTERED, stacklevel=6)
        return finite & ~altered

    def _unit(self) -> float:
        """Largest unit roundoff of the compared gradients' types, and of their reduction."""
        # Rounding of these sums and of loss scales (float32), and of gradients that processes
        # exchange (possibly bfloat16).
        exchanged = torch.float32 if self._world.size == 1 else torch.bfloat16
        units = [torch.finfo(dtype).eps / 2 for dtype in {exchanged, *self._types}]
        return max(*units, 8 * torch.finfo(self._zero.dtype).eps)

    def _row(self, elements: Mapping[int, Tensor]) -> Tensor:
        """Elements of all slots, zero where a slot has none."""
        self._types.update(some.dtype for some in elements.values())
        device = self._zero.device
        rows = [
            elements[slot].to(device)
            if slot in elements
            else self._zero.new_zeros(_size(self._shards[slot].shape))
            for slot in self._slots
        ]
        # Of complex parameters alone there are none.
        return torch.cat(rows).to(self._zero) if rows else self._zero.new_zeros(0)

    def _by_element(self, scale: Tensor | float) -> Tensor | float:
        """A scale of each slot as one of each element."""
        if not isinstance(scale, Tensor):
            return scale
        wide = scale.to(self._zero)
        return wide[self._index] if wide.dim() else wide


def _size(shape: Sequence[int]) -> int:
    return min(_ELEMENTS, max(shape, default=1))


def _elements(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    """Elements of its first rows, equally far from each other in every dimension, as a view."""
    size = _size(shape)
    stride = sum(n // size * s for n, s in zip(shape, gradient.stride(), strict=True))
    return gradient.as_strided((size,), (stride,), gradient.storage_offset())
