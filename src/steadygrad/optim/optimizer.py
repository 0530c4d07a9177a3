"""The life of a step, which all optimizers with per-tensor norms share.

A step is a few passes over plain local tensors with a packed sum over shards after each, and a
little arithmetic on columns with one number for each tensor in between. Everything it decides it
decides on the device: nothing here makes the host wait for one.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, overload

import torch
from torch import Tensor

from steadygrad import kernels
from steadygrad._checks import check_count, check_number
from steadygrad.formulas.tensors import exact
from steadygrad.kernels import KernelError
from steadygrad.kernels.table import Types, is_recording
from steadygrad.optim.batch import ParamBatch, kernel_types
from steadygrad.optim.checks import dense_gradient
from steadygrad.optim.diagnostics import Report
from steadygrad.optim.masters import ensure_master
from steadygrad.optim.state import StatefulOptimizer
from steadygrad.sharding import ShardSum, aligned_locals, is_sharded, local

__all__ = ["AmpState", "ShardedOptimizer"]


@dataclass(frozen=True)
class AmpState:
    """What a gradient scaler has left to the optimizer.

    Attributes:
        grad_scale: Loss scale that is still in the gradients, with one element; None: none is.
        found_inf: Positive where the scaler found a gradient that is not finite; None: it did not
            look.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def unscale(self, device: torch.device, *, maximize: bool) -> Tensor:
        """Factor that removes the loss scale and gives gradients their direction."""
        sign = torch.full((), -1.0 if maximize else 1.0, dtype=exact(device), device=device)
        if self.grad_scale is None:
            return sign
        return sign / self.grad_scale.to(device).to(sign.dtype).reshape(())


class ShardedOptimizer(StatefulOptimizer):
    """An optimizer whose norms are those of whole tensors, however they are sharded.

    A subclass names its backend modules and its states, and says how a step goes; this class keeps
    torch's contract.

    Attributes:
        skipped: Steps left out because a gradient was not finite, a tensor.
    """

    # Name of the modules with its passes in `formulas` and in each package of `kernels`.
    _passes: str
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
    _shard_sum: tuple[Any, ShardSum] | None = None

    @property
    def skipped(self) -> Tensor:
        """Steps left out because a gradient was not finite, with shape ``()``."""
        self._fill_state()
        first = next((p for group in self.param_groups for p in group["params"]), None)
        return torch.zeros(()) if first is None else self.state[first]["skipped"]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step.

        If any gradient is not finite, on any process that shares a parameter, no weight and no
        state moves, and the step is counted in ``skipped``. Processes that share no parameter
        (stages of a pipeline) agree through a gradient scaler's ``found_inf`` only.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What the closure returned.
        """
        self._check_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = self._batches()
        if batches:
            amp = AmpState(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
            ok = self._update(batches, amp)
            self._count_skipped(ok)
            for batch in batches:
                batch.finish()
        return loss

    def _update(self, batches: Sequence[ParamBatch], amp: AmpState) -> Tensor:
        """Moves weights and states.

        Args:
            batches: All parameters that take part.
            amp: What a gradient scaler has left.

        Returns:
            Whether the step was taken, with shape ``()``.
        """
        raise NotImplementedError

    def _check_state(self, group: Mapping[str, Any]) -> None:
        """Refuses a group whose options are not those that its state is for."""

    def _kind(self, parameter: Tensor) -> Any:
        """What parameters of one batch have in common besides group, device and types."""

    def _check_capture(self) -> None:
        """A graph keeps what it has seen: the user must have said that this is meant."""
        if torch.compiler.is_compiling() or not torch.cuda.is_available():
            return
        if not torch.cuda.is_current_stream_capturing():
            return
        if not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError(
                "Expected capturable=True while a CUDA graph records the step. Found False. "
                f"Remedy: {type(self).__name__}(..., capturable=True), and a tensor `lr` on the "
                "device if it is to change."
            )

    def _count_skipped(self, ok: Tensor) -> None:
        everywhere = (self.state[p]["skipped"] for g in self.param_groups for p in g["params"])
        for count in {id(count): count for count in everywhere}.values():
            count.add_((~ok).to(count.device))

    # Batches: which parameters are worked on together, and by which backend.

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
            if self._built_for != key or not _refresh(self._built, grads, present, works):
                self._built, self._built_for = self._build(grads), key
                batches = self._built
            else:
                return _working(self._built, works)
        if not _refresh(batches, grads, present, works):
            raise RuntimeError(
                "Expected gradients that stay the same during a step. Found one that changed. "
                "Remedy: no backward pass and no zero_grad() in another thread meanwhile."
            )
        return _working(batches, works)

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
            passes, table = import_module(f"steadygrad.formulas.{self._passes}"), None
            if types is not None:
                passes = kernels.backend_of(self._passes, device.type)
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

    # Sums over shards, and what all processes decide from them.

    def _first_sums(
        self,
        batches: Sequence[ParamBatch],
        own: Sequence[Tensor],
        finite: Sequence[Callable[[Tensor], Tensor]],
        amp: AmpState,
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Adds up a step's first sums, and decides whether the step is taken.

        Args:
            batches: The batches.
            own: Their local sums, each with shape ``(k, tensors)``.
            finite: For each a function that says of sums which are finite, with shape
                ``(tensors)``.
            amp: What a gradient scaler has left.

        Returns:
            The sums over all shards, whether each parameter takes the step, with shape
            ``(tensors)``, and whether any does, with shape ``()``.
        """
        bad = self._bad(own, finite, amp)
        total = self._over_shards()
        if total is None:
            totals, actives = list(own), [b.active for b in batches]
        else:
            # A plain tensor's infinity, and who has a gradient, travel with the sums.
            rows = [torch.cat([c, b.active.to(c)[None]]) for b, c in zip(batches, own, strict=True)]
            totals, bad = self._packed(total, batches, rows, bad)
            actives = [sums[-1] > 0 for sums in totals]
            totals = [sums[:-1] for sums in totals]
            bad = bad | self._bad(totals, finite, AmpState()).to(bad.device)
        ok = ~bad
        taken = [active & ok.to(active.device) for active in actives]
        return totals, taken, ok

    @staticmethod
    def _bad(
        sums: Sequence[Tensor], finite: Sequence[Callable[[Tensor], Tensor]], amp: AmpState
    ) -> Tensor:
        flags = [(~look(own)).any() for look, own in zip(finite, sums, strict=True)]
        if amp.found_inf is not None:
            flags.append((amp.found_inf != 0).reshape(()))
        if len(flags) == 1:
            return flags[0]
        device = next((f.device for f in flags if f.device.type != "cpu"), flags[0].device)
        return torch.stack([flag.to(device) for flag in flags]).any()

    def _sums(self, batches: Sequence[ParamBatch], own: Sequence[Tensor]) -> list[Tensor]:
        """Sums over all shards of local sums, each with shape ``(k, tensors)``."""
        total = self._over_shards()
        return list(own) if total is None else self._packed(total, batches, own, None)[0]

    def _over_shards(self) -> ShardSum | None:
        """Adds up columns of all parameters over shards; None: nothing is sharded."""
        if not any(self._sharded):
            return None
        layout = [
            (getattr(p, "device_mesh", None), getattr(p, "placements", None)) for p in self._params
        ]
        if self._shard_sum is None or self._shard_sum[0] != layout:
            # One column more, for what every process must know.
            self._shard_sum = (layout, ShardSum(self._params, flags=1))
        total = self._shard_sum[1]
        return total if total.collectives else None

    def _packed(
        self,
        total: ShardSum,
        batches: Sequence[ParamBatch],
        own: Sequence[Tensor],
        bad: Tensor | None,
    ) -> tuple[list[Tensor], Tensor]:
        """Sums and a flag in one collective, whose columns are all parameters on every process."""
        device = batches[0].device
        shape = len(own[0]), len(self._params) + 1
        # In float64, so that the order of processes costs no digits.
        packed = torch.zeros(shape, dtype=exact(device), device=device)
        for batch, sums in zip(batches, own, strict=True):
            packed[:, batch.index.to(device)] = sums.to(packed)
        if bad is not None:
            packed[0, -1] = bad.to(packed)
        packed = total(packed)
        parts = [
            packed[:, batch.index.to(device)].to(sums)
            for batch, sums in zip(batches, own, strict=True)
        ]
        return parts, packed[0, -1] != 0

    def diagnostics(self, top: int = 10, *, grad_scale: float = 1.0) -> list[dict[str, Any]]:
        """What stands out, by group; see :mod:`steadygrad.optim.diagnostics`.

        Call it after ``backward`` and before ``zero_grad``, on every process. It reads tensors, and
        so waits for the device; nothing of it is computed unless it is called.

        Args:
            top: How many parameters to name in each list.
            grad_scale: Loss scale that is still in the gradients: ``scaler.get_scale()`` where
                ``scaler.unscale_(optimizer)`` has not been called.

        Returns:
            A dictionary of plain numbers for each group.
        """
        check_count("top", top)
        check_number("grad_scale", grad_scale, low=0, low_open=True)
        with torch.no_grad():
            self._find_params()
            gathered = self._gradients()
            reports, first = [], 0
            for i, group in enumerate(self.param_groups):
                count = sum(p.numel() > 0 for p in group["params"])
                places = range(first, first + count)
                first += count
                batches = self._build_group(group, places, gathered[0], is_report=True)
                _refresh(batches, *gathered)
                batches = _working(batches, gathered[2])
                report = Report(i, group, self.state, top, grad_scale)
                reports.append(self._diagnose(group, batches, report, grad_scale))
        return reports

    def _diagnose(
        self,
        group: dict[str, Any],
        batches: Sequence[ParamBatch],
        report: Report,
        grad_scale: float,
    ) -> dict[str, Any]:
        raise NotImplementedError


def _refresh(batches: Sequence[ParamBatch], *gathered: Any) -> bool:
    return all([batch.refresh(*gathered) for batch in batches])


def _working(batches: Sequence[ParamBatch], works: Sequence[bool]) -> list[ParamBatch]:
    """Batches of which at least one parameter is worked on."""
    return [batch for batch in batches if any(works[i] for i in batch.places)]
