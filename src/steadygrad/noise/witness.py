"""A few elements of gradients, read twice: in the parts, and in `.grad` at the end."""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from steadygrad.distributed import World
from steadygrad.noise.equations import ROUNDINGS, is_altered
from steadygrad.shards import first_shard, replicas

# Clipping, a loss scale or leftover gradients change every element, so these numbers of parameters
# and elements are enough to notice them. A change of a few parameters is found when it is their
# turn.
_PARAMETERS, _ELEMENTS = 4, 16

# Together they need 21 steps. A mean cosine of 0.1 is a hundredth of the parts' spread.
_SCORE, _COSINE = 4.5, 0.1

_ALTERED = (
    "Expected `.grad` to be the sum of the micro-batches' gradients at noise.step(). Found other "
    "values. Such steps are left out, and `noise.altered` counts them. Remedy: call noise.step() "
    "before gradients are clipped, divided or cleared, hand over the loss scale (`scaler`, "
    "`grad_scale`), and announce every backward pass since zero_grad()."
)


class Witness:
    """Compares a few elements of ``.grad`` with the sum of the parts' elements at the same places.

    A slot is an index into the parameters; ``slots`` are those compared sooner or later. ``zero``
    is of all sums' type and device; ``reduced`` gradients are sharded like the parameters.
    ``count`` is the number of steps where ``.grad`` was not the parts' sum.
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
        # One over the number of processes that hold a copy; zero on the others.
        shares = {s: self._shards[s].here / replicas(parameters[s], world) for s in self.slots}
        self._turns = []
        for start in range(count := max(-(-len(self.slots) // _PARAMETERS), 1)):
            chosen = self.slots[start::count]
            each = [slot for slot in chosen for _ in range(_size(self._shards[slot].shape))]
            index = torch.tensor(each, dtype=torch.int64, device=zero.device)
            self._turns.append((chosen, index, zero.new_tensor([shares[slot] for slot in each])))
        # Sums of the unit differences of every turn, and below them of their cosines.
        self.cosines = zero.new_zeros(count + 1, _PARAMETERS * _ELEMENTS)
        self.count = torch.zeros((), dtype=torch.int64, device=zero.device)
        self._ever = torch.zeros((), dtype=torch.bool, device=zero.device)
        self._on_host = torch.zeros((), dtype=torch.bool, pin_memory=zero.is_cuda)
        self._warned = False
        self.turn(0)
        self.clear()

    def turn(self, step: int) -> None:
        """Looks at the parameters whose turn it is, on all processes the same."""
        self._turn = step % len(self._turns)
        self._slots, self._index, self._shares = self._turns[self._turn]

    def clear(self) -> None:
        """Starts a new step."""
        self._seen, self._squares, self._parts = self._zero, self._zero, 0
        # Element rows, weights and samples of the first part and the last one like it.
        self._first: tuple[Tensor, Tensor | float, int] | None = None
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

    def end_part(self, weight: Tensor | float, samples: int, loss_scale: Tensor | float) -> None:
        """Closes the open part."""
        row = self._row(self._open) / self._by_element(loss_scale)
        row = row * self._shares if self._reduced else row
        self._seen = self._seen + row
        self._squares = self._squares + self._seen.square().sum()
        self._first = self._first or (row, weight, samples)
        if samples == self._first[2]:
            self._last = row, weight
        self._parts += 1
        self.drop_part()

    def column(
        self, gradients: Mapping[int, Tensor], multiple: float, scale: Tensor | float
    ) -> Tensor:
        """This process's sums, to be added up over all processes, with shape ``(3 n + 1)``.

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
        return torch.cat([self._seen.expand_as(held), held, self._difference(held), squares])

    def judge(self, sums: Tensor, finite: Tensor) -> Tensor:
        """Whether the step can be kept, from the sums over all processes; waits for no device.

        Counts a step whose ``.grad`` is not the parts' sum, and warns of the first. One that is not
        finite is left out anyway, and says nothing of its gradients.
        """
        seen, held, difference = sums[:-1].view(3, len(self._index))
        altered = is_altered(seen, held, sums[-1], self._unit(), self._world.size) & finite
        kept = finite & ~altered
        note_cosine(self.cosines, self._turn, torch.where(kept, difference, 0.0))
        self.count += altered
        if not self._warned:
            self._ever |= altered
            # From an accelerator it arrives later, and is read in a later step.
            self._on_host.copy_(self._ever, non_blocking=True)
            self._warned = bool(self._on_host)
            if self._warned:
                warnings.warn(_ALTERED, stacklevel=6)
        return kept

    def _difference(self, like: Tensor) -> Tensor:
        """First mean gradient less the last one of as many samples, times both weights.

        Only such ones are alike in more than their means. Zeros where they differ by rounding.
        """
        if self._first is None:
            return torch.zeros_like(like)
        (first, a, _), (last, b) = self._first, self._last
        first, last = first * b, last * a
        distance, size = (first - last).norm(), first.norm() + last.norm()
        return torch.where(distance > ROUNDINGS * self._unit() * size, first - last, 0.0)

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


def note_cosine(state: Tensor, turn: int, difference: Tensor) -> None:
    r"""Takes in the first part of a step less the last one of as many samples, zeros if none.

    Of independent samples either may as well come first, so their difference is as likely as its
    opposite, and its cosine :math:`c_t` with the sum of the earlier differences has a random sign.
    Then :math:`\sum c_t / \sqrt{\sum c_t^2}` passes 4.5 with a probability below
    :math:`e^{-4.5^2/2}`, whatever the gradients' distribution, and whether or not the weights
    move. Parts of one loss, one after the other, pass it soon.

    References:
        | Student's t-Test under Symmetry Conditions (Efron, 1969)
        | https://doi.org/10.1080/01621459.1969.10501068
    """
    past, sums = state[turn, : len(difference)], state[-1]
    unit = (difference / difference.norm()).nan_to_num()
    cosine = (unit.dot(past) / past.norm()).nan_to_num()
    sums[:3] += torch.stack([(cosine != 0).to(cosine), cosine, cosine * cosine])
    past += unit


def parts_differ(state: Tensor) -> Tensor:
    """Whether first and last parts differ systematically, boolean with shape ``()``."""
    count, total, squares = state[-1, :3]
    differ: Tensor = (total > _SCORE * squares.sqrt()) & (total > _COSINE * count)
    return differ


def _size(shape: Sequence[int]) -> int:
    return min(_ELEMENTS, max(shape, default=1))


def _elements(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    """Elements of its first rows, equally far from each other in every dimension, as a view."""
    size = _size(shape)
    stride = sum(n // size * s for n, s in zip(shape, gradient.stride(), strict=True))
    return gradient.as_strided((size,), (stride,), gradient.storage_offset())
