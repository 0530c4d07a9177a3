"""Who of a group's parameters is for compiled loops, from step to step."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from steadygrad.kernels import cpu
from steadygrad.optim.fused import CPU, Fused
from steadygrad.optim.leaves import Leaves
from steadygrad.optim.masters import MASTER
from steadygrad.optim.memory import fits, gradient_type

__all__ = ["Plan"]


def _alike(
    parameter: Tensor, state: Mapping[str, Any], large: str, small: Sequence[str]
) -> tuple[Any, ...]:
    """What loops take to be the same for all parameters they work on at a time."""
    widths = [state[name].numel() for name in small if name in state]
    types = parameter.dtype, gradient_type(parameter), state[large].dtype
    return *types, MASTER in state, *widths


class Plan:
    """A group's parameters, those that compiled loops take and the others.

    Args:
        group: The group.
        members: The parameters that take part.
        states: The optimizer's states.
        known: Stands for these: another object, other states.
        kinds: What must be alike in parameters that are worked on together, for each.
        large: Names of the two states that have the parameter's shape.
        small: Names of the small ones; those that a state lacks are left out.
        kernels: Names of the kernels that a step needs; the one that it begins with first.
        early: Whether that one may read weights too.
    """

    def __init__(
        self,
        group: dict[str, Any],
        members: list[Tensor],
        states: Mapping[Tensor, dict[str, Any]],
        known: object,
        kinds: Sequence[Any],
        large: tuple[str, str],
        small: Sequence[str],
        kernels: Sequence[str],
        early: bool,
    ) -> None:
        self.group, self._members = group, members
        self._masters = group["master_weights"]
        self._known = known
        self.others: list[Tensor] = []
        found: dict[Any, list[Tensor]] = defaultdict(list)
        for p, kind in zip(members, kinds, strict=True):
            # Empty parts of sharded parameters too: all processes are to round small states alike.
            if fits(p, states[p], large, small, CPU):
                found[kind, _alike(p, states[p], large[0], small)].append(p)
            else:
                self.others.append(p)
        self.parts = []
        for params in found.values():
            own = [states[p] for p in params]
            names = [name for name in small if name in own[0]]
            self.parts.append(Fused(group, params, own, large, names, kernels[0], early))
            for name in kernels:
                cpu.address_of(name, self.parts[-1].types)

    def holds(self, members: list[Tensor], known: object) -> bool:
        """Whether it is still good; looks where everything lies now, and makes the first pass."""
        return (
            self.group["master_weights"] is self._masters
            and len(members) == len(self._members)
            and all(map(is_, members, self._members))
            and known is self._known
            and all(part.refresh() for part in self.parts)
        )

    def __iter__(self) -> Iterator[Leaves]:
        return (part.leaves() for part in self.parts)
