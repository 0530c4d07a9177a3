"""Parameters that compiled loops take, and where all that belongs to them lies.

Addresses are read anew at each step, so that nobody need tell when memory has moved; what is kept
from step to step is which tensors they are of, and that is looked after too.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadygrad.formulas.tensors import wide
from steadygrad.kernels import cpu
from steadygrad.kernels.tables import COLUMNS, SMALL_STATES, ChunkTable, Number, Setting
from steadygrad.optim.leaves import Leaves
from steadygrad.optim.masters import MASTER
from steadygrad.optim.memory import Layout, gradient_type, has_plain_gradient, own_gradients
from steadygrad.sharding import is_sharded, local

__all__ = ["CPU", "Fused"]

CPU = torch.device("cpu")


class Fused:
    """Parameters of one group and one set of types, as compiled loops see them.

    Args:
        group: The group.
        params: Its parameters, each of them one that loops can take.
        states: Their states.
        large: Names of the two states that have the parameter's shape.
        small: Names of those that are numbers, or rows of them; the step count first.
        first_pass: Name of the kernel that a step begins with, which moves nothing.
        early: Whether it may read weights too, as it was told by the step before.

    Attributes:
        numbers: What kernels share, with shape ``(tensors, k)``, at the places that ``Number`` or
            ``LansNumber`` of :mod:`steadygrad.kernels.tables` says.
        columns: The same, the other way round.
        settings: Numbers that hold for all, at the places of ``Setting`` or ``LansSetting``.
        found: The same memory, for the host to read and write.
    """

    def __init__(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        large: tuple[str, str],
        small: Sequence[str],
        first_pass: str,
        early: bool,
    ) -> None:
        self.group, self.params, self.states = group, list(params), list(states)
        self._first_pass = first_pass
        self.sharded = any(map(is_sharded, params))
        # Not a view of each, which would keep memory alive that somebody has let go of.
        self._own = [local(p.detach()) for p in params] if self.sharded else self.params
        has_master = MASTER in states[0]
        names = [*large, *([MASTER] if has_master else [])]
        self._state = {name: [state[name] for state in states] for name in [*names, *small]}
        self._large, self._small = names, list(small)
        self._tensors, self._lengths = list(self._all_tensors()), [*map(len, self.states)]
        self.weights = [local(x) for x in self._state[MASTER]] if has_master else self._own
        self.types = (
            gradient_type(params[0]),
            self.weights[0].dtype,
            states[0][large[0]].dtype,
            self._own[0].dtype,
        )
        self.grads: list[Tensor | None] = []
        self._widths = [max(1, self._state[name][0].numel()) for name in small]
        fields = SMALL_STATES + sum(self._widths)
        self.table = ChunkTable([own.numel() for own in self._own], fields)
        self.table.addresses[:, 4] = _addresses(self._own)
        self.numbers = torch.zeros(len(params), COLUMNS, dtype=torch.float64, device=CPU)
        self.columns = self.numbers.T
        self._early = self.numbers.numpy()[:, Number.EARLY : Number.EARLY + early]
        if early:
            self.numbers.numpy()[:, Number.ELEMENTS] = [p.numel() for p in params]
            # Too much at a first step, for nobody knows yet what it needs.
            self._early[:] = float(params[0].numel() != 1)
        self.settings = torch.zeros(len(Setting), dtype=torch.float64, device=CPU)
        self.found = self.settings.numpy()
        self._numels = [p.numel() for p in params]
        # What each kind of tensor must go on being, for loops not to take it for something else.
        self._sizes = [*map(Tensor.numel, self._own)]
        kinds = (self.types[3], *self.types[:3])
        layouts = [Layout(self._own, dtype) for dtype in kinds]
        self._layout, self._usual, self._weights_layout, self._state_layout = layouts
        self._small_layouts = [Layout(self._state[name]) for name in small]

    def refresh(self) -> bool:
        """Looks where everything lies now; False if it is no longer the same tensors.

        The first pass begins as soon as its own tensors are found, and the rest of the looking is
        done meanwhile. Where others are found, nothing has moved.
        """
        reads_weights = self.sharded or self._early.any()
        if reads_weights and not self._find_weights():
            return False
        if not self._take_gradients():
            return False
        same: list[bool] = []

        def look() -> None:
            same.append((reads_weights or self._find_weights()) and self._find_states())

        self.launch(self._first_pass, look)
        return same[0]

    def _find_weights(self) -> bool:
        if self.sharded:
            self._own = [local(p.detach()) for p in self.params]
            has_master = MASTER in self._state
            self.weights = [local(x) for x in self._state[MASTER]] if has_master else self._own
        found, table = _addresses(self._own), self.table.addresses
        if not np.array_equal(table[:, 4], found) or not self._layout.holds(self._own):
            return False
        if self.weights is self._own:
            table[:, 1] = found
            return True
        # The first pass may write to masters, where somebody has written to their parameters.
        masters = (state.get(MASTER) for state in self.states)
        table[:, 1] = _addresses(self.weights)
        same = all(map(is_, masters, self._state[MASTER]))
        return same and self._weights_layout.holds(self.weights)

    def _find_states(self) -> bool:
        if [*map(len, self.states)] != self._lengths:
            return False
        if not all(map(is_, self._all_tensors(), self._tensors)):
            return False
        for place, name in enumerate(self._large[:2]):
            moments = self._state[name]
            if self.sharded:
                moments = [local(x) for x in moments]
            self.table.addresses[:, 2 + place] = _addresses(moments)
            if not self._state_layout.holds(moments):
                return False
        return self._find_small_states()

    def _find_small_states(self) -> bool:
        place = SMALL_STATES
        rows = zip(self._small, self._widths, self._small_layouts, strict=True)
        for name, width, kept in rows:
            tensors = self._state[name]
            if not kept.holds(tensors):
                return False
            starts = _addresses(tensors)[:, None]
            offsets = np.arange(width) * tensors[0].element_size()
            self.table.addresses[:, place : place + width] = starts + offsets
            place += width
        return True

    def _take_gradients(self) -> bool:
        """Finds the gradients; False if there is one that loops cannot take."""
        grads: list[Tensor | None] = [p.grad for p in self.params]
        if self.sharded or not self._are_usual(grads):
            if not all(map(has_plain_gradient, self.params)):
                return False
            grads = own_gradients(self.params, self._own, sharded=self.sharded)
            sizes = zip(grads, self._sizes, strict=True)
            if any(g is not None and g.numel() != size for g, size in sizes):
                return False
            if any(g is not None and g.dtype is not self.types[0] for g in grads):
                return False
        self.grads = grads
        self.table.addresses[:, 0] = [0 if g is None else g.data_ptr() for g in grads]
        return True

    def _are_usual(self, grads: Sequence[Any]) -> bool:
        """Whether all are there and lie as their parameters do: in few calls, for each counts."""
        return (
            {*map(type, grads)} == {Tensor}
            and self._usual.holds(grads)
            and not any(map(Tensor.is_neg, grads))
        )

    def _all_tensors(self) -> Iterator[Any]:
        """Everything in the states, shared tensors included."""
        return chain.from_iterable(map(dict.values, self.states))

    def leaves(self) -> Leaves:
        """What a step works on."""
        return Leaves(
            group=self.group,
            params=self.params,
            weights=self.weights,
            grads=[],
            states=self.states,
            numels=self._numels,
            buckets=[],
            fused=self,
        )

    def launch(self, name: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Runs a kernel over all parameters; ``meanwhile`` is called once while it does."""
        cpu.launch(name, self.types, self.table, self.numbers, self.settings, meanwhile=meanwhile)

    def launch_small(self, name: str) -> None:
        """Runs a kernel over what there is of each tensor but its elements."""
        cpu.launch(name, self.types, self.table, self.numbers, self.settings, alone=True)

    def local_sums(self, place: int, count: int) -> Tensor:
        """Some columns, of all of a tensor that is here, in the type that sums have elsewhere."""
        found = self.columns[place : place + count]
        # A view, so that who gets it back knows that nothing was added.
        return found.to(wide(self.types[1])) if self.sharded else found

    def take_sums(self, place: int, sums: Tensor) -> bool:
        """Puts back what was added up over shards; False if nothing was."""
        if sums.data_ptr() == self.numbers.data_ptr() + place * self.numbers.element_size():
            return False
        self.columns[place : place + len(sums)] = sums
        return True

    def release(self) -> None:
        """Lets go of the gradients, whose memory the next ones may want, and of shards."""
        self.grads = []
        if self.sharded:
            self._own = self.weights = []

    def wrote(self) -> None:
        """Tells autograd that weights have been written to."""
        torch.autograd.graph.increment_version(self._own)


def _addresses(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    # Without a loop in Python: there are thousands of them a step.
    return np.fromiter(map(torch._C.TensorBase.data_ptr, tensors), np.int64, len(tensors))
