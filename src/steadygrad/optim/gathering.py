"""Gathering of an optimizer's parameters into batches, each for one backend."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from steadygrad import kernels
from steadygrad.kernels import KernelError
from steadygrad.kernels.table import Types
from steadygrad.optim.batch import ParamBatch, kernel_types
from steadygrad.optim.checks import dense_gradient
from steadygrad.optim.masters import ensure_master
from steadygrad.optim.state import StatefulOptimizer
from steadygrad.sharding import aligned_locals, is_sharded, local

__all__ = ["GatheringOptimizer", "refresh", "working"]


class GatheringOptimizer(StatefulOptimizer):
    """An optimizer that works on batches of parameters.

    A subclass names its backend modules and its states.
    """

    # Module in `formulas` with its passes; each package of `kernels` has one of the same name.
    _passes: ModuleType
    # States with the parameter's shape, and small ones; those that a parameter lacks are left out.
    _large: tuple[str, ...]
    _small: tuple[str, ...]
    # Whether a parameter without a gradient, unless it is frozen, takes part as if it were zero.
    _none_is_zero = False

    # Caches, none of which is saved or copied.
    _params: Sequence[Tensor] = ()
    _sharded: Sequence[bool] = ()
    _params_of: Any = None
    _built: Sequence[ParamBatch] = ()
    _built_for: Any = None

    def _kind(self, parameter: Tensor) -> Any:
        """What parameters of one batch have in common besides group, device and types."""

    def _check_state(self, group: Mapping[str, Any]) -> None:
        """Refuses a group whose options are not those that its state is for."""

    def _batches(self) -> list[ParamBatch]:
        """The parameters of this step with their gradients."""
        self._find_params()
        for group in self.param_groups:
            self._check_state(group)
        grads, present, works = self._gradients()
        if torch.compiler.is_compiling():
            batches = self._build(grads)
        else:
            modes = [(g["foreach"], g["fused"], g["master_weights"]) for g in self.param_groups]
            key = (self._snapshot, modes, kernels.given_up())
            if self._built_for != key or not refresh(self._built, grads, present, works):
                self._built, self._built_for = self._build(grads), key
                batches = self._built
            else:
                return working(self._built, works)
        if not refresh(batches, grads, present, works):
            raise RuntimeError(
                "Expected gradients that stay the same during a step. Found one that changed. "
                "Remedy: no backward pass and no zero_grad() in another thread meanwhile."
            )
        return working(batches, works)

    def _find_params(self) -> None:
        self._fill_state()
        if self._params_of is not self._snapshot:
            self._params_of = self._snapshot
            self._params = [p for g in self.param_groups for p in g["params"] if p.numel()]
            self._sharded = [is_sharded(p) for p in self._params]

    def _gradients(self) -> tuple[list[Tensor | None], list[bool], list[bool]]:
        """Local gradients of all parameters, whether there is one, and whether to work on it."""
        grads: list[Tensor | None] = [p.grad for p in self._params]
        present = [
            g is not None or (self._none_is_zero and p.requires_grad)
            for p, g in zip(self._params, grads, strict=True)
        ]
        found = [i for i, g in enumerate(grads) if g is not None]
        is_odd = any(grads[i].layout is not torch.strided for i in found)  # type: ignore[union-attr]
        if not any(self._sharded) and not is_odd:
            return grads, present, present
        # All at once: partial sums of several are added up in one collective.
        params = [self._params[i] for i in found]
        own = aligned_locals([dense_gradient(p) for p in params], params)
        for i, gradient in zip(found, own, strict=True):
            grads[i] = gradient
        # Another process may have a gradient where this one has none.
        works = [
            here or (shared and p.requires_grad)
            for here, shared, p in zip(present, self._sharded, self._params, strict=True)
        ]
        return grads, present, works

    def _build(self, grads: Sequence[Tensor | None]) -> list[ParamBatch]:
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
        if not kernels.wants_fused(group["foreach"], group["fused"]):
            return None
        name, device = type(self).__name__, parameter.device
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


def refresh(batches: Sequence[ParamBatch], *gathered: Any) -> bool:
    """Reads weights and gradients of all batches; False if they must be built anew."""
    return all(batch.refresh(*gathered) for batch in batches)


def working(batches: Sequence[ParamBatch], works: Sequence[bool]) -> list[ParamBatch]:
    """Batches of which at least one parameter is worked on."""
    return [batch for batch in batches if any(works[i] for i in batch.places)]
