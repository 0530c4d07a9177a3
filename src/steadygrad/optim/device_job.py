"""A whole model on an accelerator, as its kernels see it: all groups, in a few launches a step.

Addresses are read anew at each step, so that nobody need tell when memory has moved; what is kept
from step to step is which tensors they are of, and that is looked after too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadygrad.kernels import device
from steadygrad.kernels.device_tables import CHUNK, DeviceTable, Group, Head, Row
from steadygrad.optim.leaves import Scaling
from steadygrad.optim.masters import MASTER, follow_dtype
from steadygrad.optim.memory import (
    fits,
    gradient_type,
    has_plain_gradient,
    layout,
    own_gradients,
)
from steadygrad.sharding import is_sharded, local

__all__ = ["DeviceJob", "OverShards"]

# Adds up a list of sums over shards, in one collective; None: nothing is sharded.
OverShards = Callable[[list[Tensor]], list[Tensor]] | None


class DeviceJob:
    """All parameters of an optimizer; a subclass says what a step of it is.

    Args:
        groups: The optimizer's groups.
        states: Its states.
        chunk: Elements that a program works on.

    Attributes:
        params: The parameters, group by group, those without elements left out.
        table: What kernels are handed.
    """

    # Two states with the parameter's shape; small ones, by their place in a tensor's row.
    large: tuple[str, str]
    small: Mapping[str, Row]
    # Whether a parameter without a gradient, unless it is frozen, takes part as if it were zero.
    none_is_zero = False

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        states: Mapping[Tensor, dict[str, Any]],
        chunk: int = CHUNK,
    ) -> None:
        self._bind(groups, states)
        kinds = [self.types.index(kind) for kind in self._kinds]
        self.table = DeviceTable(
            [own.numel() for own in self._own], kinds, len(groups), self._own[0].device, chunk
        )
        self._held: list[Any] = []

    def _bind(
        self, groups: Sequence[dict[str, Any]], states: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Finds everything that belongs to the parameters."""
        self._groups, self._all = list(groups), states
        self._lists = [list(group["params"]) for group in groups]
        self._masters = [group["master_weights"] for group in groups]
        pairs = [
            (p, i) for i, some in enumerate(self._lists) for p in self.order(some) if p.numel()
        ]
        self.params, self._group_of = [p for p, _ in pairs], [i for _, i in pairs]
        for p, i in pairs:
            follow_dtype(p, states[p], groups[i])
        self._states = [states[p] for p in self.params]
        names = [*self.large, *self.small, MASTER]
        self._known = [[state.get(name) for name in names] for state in self._states]
        self.sharded = any(map(is_sharded, self.params))
        self._find_locals()
        self._starts, self._layout = [own.data_ptr() for own in self._own], layout(self._own)
        self._kinds = [
            (gradient_type(p), weight.dtype, first.dtype, own.dtype)
            for p, weight, first, own in zip(
                self.params, self._weights, self._first, self._own, strict=True
            )
        ]
        self.types = list(dict.fromkeys(self._kinds))
        self._shape = self._kinds, self._group_of, [own.shape for own in self._own], self.sharded

    def order(self, params: list[Tensor]) -> list[Tensor]:
        """A group's parameters as they come in the table."""
        return params

    def _find_locals(self) -> None:
        # Not a view of each, which would keep memory alive that somebody has let go of.
        self._own = [local(p.detach()) for p in self.params] if self.sharded else self.params
        states, (first, second) = self._states, self.large
        self._first = [local(state[first]) for state in states]
        self._second = [local(state[second]) for state in states]
        self._weights = [
            local(state[MASTER]) if MASTER in state else own
            for state, own in zip(states, self._own, strict=True)
        ]

    @classmethod
    def can_take(
        cls, groups: Sequence[dict[str, Any]], states: Mapping[Tensor, dict[str, Any]]
    ) -> str | None:
        """Why kernels cannot take all parameters; None if they can."""
        params = [p for group in groups for p in group["params"]]
        where = {local(p.detach()).device for p in params}
        if len(where) != 1:
            return "the parameters are on several devices"
        if not all(
            fits(p, states[p], cls.large, list(cls.small), *where) for p in params if p.numel()
        ):
            return "not for parameters or state that do not lie in one piece, in the same order"
        return None

    def holds(
        self, groups: Sequence[dict[str, Any]], states: Mapping[Tensor, dict[str, Any]]
    ) -> bool:
        """Whether its table is still good, for the same tensors or others like them."""
        if self._is_same(groups, states):
            return True
        if self.can_take(groups, states) is not None:
            return False
        before = self._shape
        self._bind(groups, states)
        return self._shape == before and len(groups) == len(self.table.groups)

    def _is_same(
        self, groups: Sequence[dict[str, Any]], states: Mapping[Tensor, dict[str, Any]]
    ) -> bool:
        if len(groups) != len(self._groups) or not all(map(is_, groups, self._groups)):
            return False
        for group, params, masters in zip(groups, self._lists, self._masters, strict=True):
            found = group["params"]
            if group["master_weights"] is not masters or len(found) != len(params):
                return False
            if not all(map(is_, found, params)):
                return False
        names = [*self.large, *self.small, MASTER]
        return (
            all(map(is_, map(states.__getitem__, self.params), self._states))
            and all(
                state.get(name) is tensor
                for state, known in zip(self._states, self._known, strict=True)
                for name, tensor in zip(names, known, strict=True)
            )
            and self._is_where_it_was()
            and all(map(has_plain_gradient, self.params))
            and all(
                gradient_type(p) is kind[0]
                for p, kind in zip(self.params, self._kinds, strict=True)
            )
        )

    def _is_where_it_was(self) -> bool:
        owns = [local(p.detach()) for p in self.params] if self.sharded else self.params
        return self._starts == [own.data_ptr() for own in owns] and self._layout == layout(owns)

    def look(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> bool:
        """Looks where everything lies now; False if no parameter takes part."""
        if self.sharded:
            self._find_locals()
        grads = own_gradients(self.params, self._own, sharded=self.sharded)
        rows = self.table.rows
        rows[:, Row.ACTIVE] = [
            1 if g is not None else 2 * (self.none_is_zero and p.requires_grad)
            for p, g in zip(self.params, grads, strict=True)
        ]
        rows[:, Row.GRAD] = [0 if g is None else g.data_ptr() for g in grads]
        for place, tensors in (
            (Row.WEIGHT, self._weights),
            (Row.FIRST, self._first),
            (Row.SECOND, self._second),
            (Row.PARAM, self._own),
        ):
            rows[:, place] = [tensor.data_ptr() for tensor in tensors]
        for name, place in self.small.items():
            rows[:, place] = [s[name].data_ptr() if name in s else 0 for s in self._states]
        rows[:, Row.GROUP] = self._group_of
        self.aligned = not (rows[:, Row.GRAD : Row.PARAM + 1] & 15).any()
        self._held = [grads]
        self._fill_head(found_inf, grad_scale)
        return bool(rows[:, Row.ACTIVE].any())

    def _fill_head(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        table = self.table
        table.head[Head.FOUND_INF] = self._address(found_inf)
        table.head[Head.GRAD_SCALE] = self._address(grad_scale)
        table.head[Head.GROUPS] = len(self._groups)
        for row, group, params in zip(table.groups, self._groups, self._lists, strict=True):
            numbers = row.view(np.float64)
            rate = group["lr"]
            row[Group.LR_AT] = 0
            if not isinstance(rate, Tensor):
                numbers[Group.LR] = rate
            elif rate.device.type == "cpu" != table.device.type:
                # It is read on the host, where nothing has to be waited for.
                numbers[Group.LR] = rate.detach().to(torch.float64).numpy().reshape(())
            else:
                row[Group.LR_DOUBLE] = rate.dtype is torch.float64
                row[Group.LR_AT] = self._address(rate, torch.float64)
            for place, beta in zip((Group.BETA1, Group.BETA2), group["betas"], strict=True):
                numbers[place] = beta
                numbers[place + 2] = math.log(beta) if beta > 0 else -math.inf
            numbers[Group.EPS] = group["eps"]
            numbers[Group.SIGN] = -1.0 if group["maximize"] else 1.0
            row[Group.SKIPPED] = 0
            if params:
                row[Group.SKIPPED] = self.shared(group)["skipped"].data_ptr()
            self.fill_group(row, numbers, group)
        self.fill_rows()

    def shared(self, group: dict[str, Any]) -> dict[str, Any]:
        """A state of a group that has parameters: what they share can be seen from each."""
        return self._all[group["params"][0]]

    def fill_rows(self) -> None:
        """Fills in what else there is to know of each tensor."""

    def fill_group(
        self, row: NDArray[np.int64], numbers: NDArray[np.float64], group: dict[str, Any]
    ) -> None:
        """Fills in a group's own options; both arrays are the same memory."""
        raise NotImplementedError

    def _address(self, number: Tensor | None, *also: torch.dtype) -> int:
        """Where a number is, in float32 or one of other types, on the device."""
        if number is None:
            return 0
        if number.dtype not in (torch.float32, *also) or number.device != self.table.device:
            number = number.to(self.table.device, torch.float32, non_blocking=True)
        self._held.append(number)
        return number.data_ptr()

    def run(self, name: str, whole: bool) -> None:
        """Starts a kernel over all chunks."""
        device.launch_chunks(name, self.table, self.types, whole=whole, aligned=self.aligned)

    def totals(self, first: int, count: int) -> Tensor:
        """Some columns of sums, of whole local tensors, with shape ``(count, tensors)``."""
        table = self.table
        _, _, rows = table.parts()
        numbers = table.sums, table.totals, table.slots, table.tensors
        device.launch(
            "totals", table.device, table.tensors, rows, *numbers, first=first, count=count
        )
        return table.totals[first : first + count]

    def decide(self, scaling: Scaling, sums: Sequence[Tensor]) -> None:
        """Tells kernels whether all gradients are finite, where processes must agree on it."""
        finite = [torch.isfinite(some).all() for some in sums]
        self.table.flags[:1].copy_(~scaling.ok(finite))

    def prepare(self) -> None:
        """Compiles and loads all kernels, by a step that no tensor takes part in."""
        table, kept = self.table, self.table.rows.copy()
        table.rows[:, Row.ACTIVE] = 0
        table.head[:] = 0
        table.send()
        # Gradients may be views into larger memory, at any place: both ways are ready then.
        for self.aligned in (True, False):
            self.passes((lambda columns: columns) if self.sharded else None, Scaling(None, None))
        table.rows[:] = kept
        self.prepared = self.variant()

    def variant(self) -> tuple[Any, ...]:
        """Options that other kernels are compiled for."""
        return ()

    def step(self, over_shards: OverShards, scaling: Scaling) -> None:
        """Takes a step, of tensors where they were last looked for."""
        self.table.send()
        self.passes(over_shards, scaling)
        rows = self.table.rows
        active = [own for own, there in zip(self._own, rows[:, Row.ACTIVE], strict=True) if there]
        torch.autograd.graph.increment_version(active)
        # Memory of gradients may be wanted; what is under way on the device comes first there.
        self._held = []

    def passes(self, over_shards: OverShards, scaling: Scaling) -> None:
        """Starts the kernels of a step."""
        raise NotImplementedError
