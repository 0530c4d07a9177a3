"""Building of batches of parameters, and the choice of their backend."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from steadygrad import kernels
from steadygrad._checks import InputError
from steadygrad.kernels.table import Types, is_recording
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.checks import TYPES, check_parameter
from steadygrad.optim.masters import MASTER, ensure_master
from steadygrad.optim.state import StatefulOptimizer
from steadygrad.shards import is_sharded, local

__all__ = ["BatchBuilder"]


class BatchBuilder(StatefulOptimizer):
    """An optimizer that can build batches of its parameters.

    A subclass names its backend modules.
    """

    # Module in `formulas` with its passes; each package of `kernels` has one of the same name.
    _passes: ModuleType
    # Whether a parameter without a gradient, unless it is frozen, takes part as if it were zero.
    _none_is_zero = False

    # Caches, neither saved nor copied: parameters with elements in the order of the groups, whether
    # each is sharded, those without elements, and what the batches that are kept were built for.
    _params: Sequence[Tensor] = ()
    _sharded: Sequence[bool] = ()
    _empty: Sequence[Tensor] = ()
    _members_then: Sequence[Any] = ()
    _built_for: Any = None

    @property
    def _large(self) -> list[str]:
        """Names of the states with the parameter's shape, masters aside."""
        return [name for name, field in self._fields.items() if field.elementwise]

    def _kind(self, parameter: Tensor) -> Any:
        """A property that all parameters of a batch share, besides group, device and types."""

    def _find_params(self) -> None:
        """Lists the parameters anew where they or their states were exchanged."""
        # Without a look-up by parameter: each of these calls Python for the hash of a tensor.
        found = self._members()
        same = len(found) == len(self._members_then) and all(map(is_, found, self._members_then))
        same = same and not any(map(Tensor.numel, self._empty))
        if not (same and found and all(self.state.values())):
            self._fill_state()
            self._members_then, self._built_for = self._members(), None
            params = [p for group in self.param_groups for p in group["params"]]
            self._params = [p for p in params if p.numel()]
            self._empty = [p for p in params if not p.numel()]
            self._sharded = [is_sharded(p) for p in self._params]

    def _members(self) -> list[Any]:
        """Every group before its parameters, then the keys and values of the state."""
        groups = (part for g in self.param_groups for part in ([g], g["params"]))
        return [*chain.from_iterable(groups), *self.state, *self.state.values()]

    def _check_params(self) -> None:
        """Raises InputError if a parameter no longer has the shape and device of its state."""
        for p in self._params:
            check_parameter(p)
            for name in (*self._large, MASTER):
                kept = self.state[p].get(name, p)
                if kept.shape != p.shape or kept.device != p.device:
                    raise InputError(
                        "Expected parameters with the shape and device of their state. Found "
                        f"{tuple(p.shape)} on {p.device}, and a `{name}` of {tuple(kept.shape)} on "
                        f"{kept.device}. Remedy: a new optimizer, after the model was changed."
                    )

    def _build(self, grads: Sequence[Tensor | None]) -> list[ParamBatch]:
        """All batches, from local gradients of all parameters."""
        if not torch.compiler.is_compiling():
            self._check_params()
        if any(is_recording(device) for device in {p.device for p in self._params}):
            raise RuntimeError(
                "Expected a step outside of CUDA graphs before one that a graph records. Found "
                "none with these parameters and options. Remedy: take one first."
            )
        return [
            batch
            for group, places in self._grouped()
            for batch in self._build_group(group, places, grads)
        ]

    def _grouped(self) -> list[tuple[dict[str, Any], range]]:
        """Each group with the indices of its parameters."""
        found, first = [], 0
        for group in self.param_groups:
            stop = first + sum(p.numel() > 0 for p in group["params"])
            found.append((group, range(first, stop)))
            first = stop
        return found

    def _build_group(
        self,
        group: dict[str, Any],
        places: Sequence[int],
        grads: Sequence[Tensor | None],
        *,
        is_report: bool = False,
    ) -> list[ParamBatch]:
        """Batches of a group.

        Args:
            group: The group.
            places: Indices of its parameters.
            grads: Local gradients of all parameters.
            is_report: Whether nothing is to change: multi-tensor calls on copies of the columns.
        """
        kinds: dict[Any, list[int]] = defaultdict(list)
        for i in places:
            p, state = self._params[i], self.state[self._params[i]]
            ensure_master(p, state, group)
            types = None if is_report else self._kernel_types(p, grads[i], group)
            state_dtype = state[self._large[0]].dtype
            kinds[p.device, p.dtype, state_dtype, types, self._kind(p)].append(i)
        batches = []
        for (device, _, _, types, _), members in kinds.items():
            params = [self._params[i] for i in members]
            states = [self.state[p] for p in params]
            passes, table = self._passes, None
            if types is not None:
                passes = kernels.backend_of(passes, device.type)
                sizes = [local(p).numel() for p in params]
                table = kernels.table_for(device, sizes, types, len(self._large))
            batch = ParamBatch(
                group,
                params,
                members,
                states,
                self._fields,
                passes,
                table,
                single=group["foreach"] is False,
                views=not (is_report or torch.compiler.is_compiling()),
            )
            batches.append(batch)
        return batches

    def _kernel_types(
        self, parameter: Tensor, gradient: Tensor | None, group: Mapping[str, Any]
    ) -> Types | None:
        """Types for which kernels take a parameter; None: multi-tensor calls work on it."""
        name, device = type(self).__name__, parameter.device
        if not kernels.wants_fused(group["foreach"], group["fused"], device.type):
            return None
        why = kernels.missing(device.type)
        if why is None:
            types = _types_for_kernels(parameter, gradient, self.state[parameter], self._large)
            if isinstance(types, str):
                if group["fused"]:
                    kernels.warn_once(name, types, parameter)
                return None
            if (why := kernels.prepare(self._passes, device, types, len(self._large))) is None:
                return types
        if group["fused"] or device.type in kernels.BACKENDS:
            kernels.warn_once(name, why)
        return None


def _types_for_kernels(
    parameter: Tensor, gradient: Tensor | None, state: dict[str, Any], large: Sequence[str]
) -> Types | str:
    """Types of a parameter that kernels can take; else the reason why they cannot.

    Args:
        parameter: The parameter.
        gradient: The parameter's local gradient, or None.
        state: The parameter's state.
        large: Names of the states with its shape, masters aside.
    """
    own, masters = local(parameter), [local(state[MASTER])] if MASTER in state else []
    moments = [local(state[name]) for name in large]
    kept = (*moments, *masters)
    grad_dtype = own.dtype if gradient is None else gradient.dtype
    # A plain parameter's detached memory is a plain tensor; a wrapper's is not.
    for t in (own.detach(), *kept):
        if type(t) is not Tensor:
            return f"tensors of type {type(t).__name__}"
    if gradient is not None and type(gradient) is not Tensor:
        return f"gradients of type {type(gradient).__name__}"
    if any(t.is_neg() for t in (own, *kept)) or _has_gaps(own):
        return f"{kernels.GAPS} (strides {own.stride()})"
    if any((t.shape, t.stride()) != (own.shape, own.stride()) for t in kept):
        return "states in another memory order"
    types = (grad_dtype, (masters or [own])[0].dtype, moments[0].dtype, own.dtype)
    if not {*types} <= {*TYPES} or types[2] not in (torch.float32, torch.float64):
        return f"gradients of {types[0]}, weights of {types[1]} and states of {types[2]}"
    if any(t.dtype is not types[2] for t in moments) or any(
        t.dtype is not torch.float32 for t in masters
    ):
        return "states of several types"
    return types


def _has_gaps(tensor: Tensor) -> bool:
    """Whether its elements do not fill their memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return True
            expected *= size
    return False
