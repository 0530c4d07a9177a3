"""Building of batches: which parameters are worked on together, and by which backend."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from steadygrad import kernels
from steadygrad.kernels import KernelError
from steadygrad.kernels.table import Types, is_recording
from steadygrad.optim.batch import ParamBatch, kernel_types
from steadygrad.optim.masters import ensure_master
from steadygrad.optim.state import StatefulOptimizer
from steadygrad.sharding import local

__all__ = ["BatchBuilder"]


class BatchBuilder(StatefulOptimizer):
    """An optimizer that can build batches of its parameters.

    A subclass names its backend modules and its states.
    """

    # Module in `formulas` with its passes; each package of `kernels` has one of the same name.
    _passes: ModuleType
    # States with the parameter's shape, and small ones; those that a parameter lacks are left out.
    _large: tuple[str, ...]
    _small: tuple[str, ...]
    # Whether a parameter without a gradient, unless it is frozen, takes part as if it were zero.
    _none_is_zero = False

    # Parameters with elements in the order of the groups; a cache, neither saved nor copied.
    _params: Sequence[Tensor] = ()

    def _kind(self, parameter: Tensor) -> Any:
        """What parameters of one batch have in common besides group, device and types."""

    def _build(self, grads: Sequence[Tensor | None]) -> list[ParamBatch]:
        """All batches, from local gradients of all parameters."""
        if any(is_recording(device) for device in {p.device for p in self._params}):
            raise RuntimeError(
                "Expected a step outside of CUDA graphs before one that a graph records. Found "
                "none with these parameters and options. Remedy: take one first."
            )
        batches, place = [], 0
        for group in self.param_groups:
            places = []
            for p in group["params"]:
                if p.numel():
                    places.append(place)
                    place += 1
            batches += self._build_group(group, places, grads)
        return batches

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
            small = [name for name in self._small if name in states[0]]
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
                self._large,
                small,
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
            types = kernel_types(parameter, gradient, self.state[parameter], self._large)
            if isinstance(types, str):
                if group["fused"]:
                    kernels.warn_about_tensor(name, parameter, types)
                return None
            try:
                kernels.prepare(self._passes, device, types)
                return types
            except KernelError as error:
                why = f"it cannot be compiled ({error})"
                kernels.give_up(device.type, why)
        if group["fused"] or device.type in kernels.BACKENDS:
            kernels.warn_about_kernels(name, why)
        return None
