"""The life of a step, which all optimizers with per-tensor norms share.

A step is a few passes over plain local tensors with a packed sum over shards after each, and a
little arithmetic on columns with one number for each tensor in between. Everything it decides it
decides on the device: nothing here makes the host wait for one.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadygrad._checks import InputError, check_count, check_number, install
from steadygrad.numerics import wide
from steadygrad.optim import checks, codes, loops
from steadygrad.optim.batch import Gradients, ParamBatch, types_for_loops
from steadygrad.optim.diagnostics import Report, reports
from steadygrad.optim.passes import BACKENDS, Pass, Types, cast, tensor_of
from steadygrad.optim.skipping import SkipMonitor
from steadygrad.optim.state import MASTER, StatefulOptimizer, ensure_master
from steadygrad.shards import PackedSum, PartialGradients, ZeroSum, first_row, is_sharded


class ShardedOptimizer(StatefulOptimizer):
    """An optimizer whose norms are of whole tensors, however they are sharded.

    A subclass declares its states (``_fields``) and passes, and says how a step goes
    (``_update``); this class keeps torch's contract.

    Attributes:
        skipped: Steps left out because a gradient was not finite, a tensor.
        warn_after_skips: Skipped steps in a row to warn after; None: never.
    """

    warn_after_skips: int | None = 100
    _passes: Sequence[Pass]
    _first_rows = 1  # sums of each parameter that a step begins with
    # Whether a parameter without a gradient, unless it is frozen, takes part as if it were zero.
    none_is_zero = False

    # Caches, neither saved nor copied: parameters with elements in the order of the groups, whether
    # each is sharded, those without elements, and what the batches that are kept were built for.
    _params: Sequence[Tensor] = ()
    _sharded: Sequence[bool] = ()
    _empty: Sequence[Tensor] = ()
    _members_then: Sequence[Any] = ()
    _built: Sequence[ParamBatch] = ()
    _options: Sequence[Any] = ()
    _partial: PartialGradients | None = None
    _anywhere: Tensor | None = None  # where gradients are partial, whether any process has one
    _packed_sum: PackedSum | None = None
    _skips: SkipMonitor | None = None
    _zero_sum: ZeroSum | None = None  # where ZeroRedundancyOptimizer gave it some parameters only

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._zero_sum = ZeroSum.of_caller()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler hands over its scale and its verdict, without a wait.

        As in torch only where ``fused=True`` was asked for: trainers conclude from this flag that
        they must not clip the gradients, and they cannot see which steps are skipped.
        """
        return all(group["fused"] is True for group in self.param_groups)

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

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step.

        If any gradient is not finite, on any process that shares a parameter, no weight and no
        state moves, and the step is counted in ``skipped``. Processes that share no parameter
        (stages of a pipeline) agree through a gradient scaler's ``found_inf`` only.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            The closure's loss.
        """
        checks.check_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            with torch.no_grad():
                self._step()
            return loss
        try:
            # State tensors that are made in inference mode could not be changed outside of it.
            # Columns on the host may overflow and divide by zero, as on a device, without a word.
            with torch.inference_mode(False), torch.no_grad(), np.errstate(all="ignore"):
                self._step()
        except BaseException:
            # A gradient scaler takes these back after a step, and not after an error.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        return loss

    def _step(self) -> None:
        batches = self._batches()
        # Where others may have work they wait for this process, too.
        if batches or self._over_shards() is not None:
            ok = self._update(batches)
            self._skips = self._skips or SkipMonitor(type(self).__name__)
            self._skips.count(ok, self.state.values(), self.warn_after_skips)
            for batch in batches:
                batch.finish()

    def _update(self, batches: Sequence[ParamBatch]) -> Tensor:
        """Moves weights and states of all that take part; whether the step was taken, ``()``."""
        raise NotImplementedError

    # Gradients and batches of a step.

    def _batches(self) -> list[ParamBatch]:
        """The parameters of this step with their gradients."""
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self._check_options()
        self._find_params()
        # A gradient scaler sets it for a step whose gradients it has not unscaled.
        gradients = self._gradients(getattr(self, "grad_scale", None))
        batches = self._built
        if compiling or not batches or not all(b.refresh(gradients) for b in batches):
            if not compiling:
                self._check_params()
                self._warn_of_float32()
            batches = [
                batch
                for group, places in self._grouped()
                for batch in self._build_group(group, places, gradients.grads)
            ]
            if not all(b.refresh(gradients) for b in batches):
                raise RuntimeError(
                    "Expected gradients that stay the same during a step. Found one that changed. "
                    "Remedy: no backward pass and no zero_grad() in another thread meanwhile."
                )
            if not compiling:
                self._built = batches
        return gradients.worked_on(batches)

    def _check_options(self) -> None:
        """Checks the options where anybody may have changed them since the last step."""
        groups = [(n, v) for group in self.param_groups for n, v in group.items()]
        # A schedule writes a new rate in every step. What broke has another count.
        found = [len(loops.BROKEN), *(value for name, value in groups if name != "lr")]
        # A list of them may have changed in place.
        found += chain(*(v for name, v in groups if name == "betas" and type(v) is list))
        if len(found) != len(self._options) or not all(map(is_, found, self._options)):
            self._check_groups()
            self._options, self._built = found, ()
        for group in self.param_groups:
            checks.check_lr(group["lr"])

    def _find_params(self) -> None:
        """Lists the parameters anew where they or their states were exchanged."""
        # Without a look-up by parameter: each of these calls Python for the hash of a tensor.
        members = self._members()
        same = len(members) == len(self._members_then)
        same = same and all(map(is_, members, self._members_then))
        if not same or any(map(Tensor.numel, self._empty)) or not all(self.state.values()):
            self._fill_state()
            self._members_then, self._built = self._members(), ()
            params = [p for group in self.param_groups for p in group["params"]]
            self._params = [p for p in params if p.numel()]
            self._empty = [p for p in params if not p.numel()]
            self._sharded = [is_sharded(p) for p in self._params]

    def _members(self) -> list[Any]:
        """Every group before its parameters, then the states of all of them."""
        groups = (part for g in self.param_groups for part in ([g], g["params"]))
        return [*chain.from_iterable(groups), *self.state.values()]

    def _grouped(self) -> list[tuple[dict[str, Any], range]]:
        """Each group with the indices of its parameters."""
        groups, first = [], 0
        for group in self.param_groups:
            stop = first + sum(p.numel() > 0 for p in group["params"])
            groups.append((group, range(first, stop)))
            first = stop
        return groups

    def _gradients(self, grad_scale: Tensor | None) -> Gradients:
        """Local gradients of all parameters, with a loss scale that is still in them."""
        grads: list[Tensor | None] = [p.grad for p in self._params]
        has_grad = [True] * len(grads)
        if type(None) in {*map(type, grads)}:
            has_grad = [
                g is not None or (self.none_is_zero and p.requires_grad)
                for p, g in zip(self._params, grads, strict=True)
            ]
        if not any(self._sharded):
            self._anywhere = None
            return Gradients(grads, has_grad, has_grad, grad_scale)
        grads = [*map(checks.dense_gradient, self._params)]
        if self._partial is None or not self._partial.is_of(self._params):
            self._partial, self._packed_sum = PartialGradients(self._params), None
        grads, self._anywhere = self._partial(grads, self._params)
        # Another process may have a gradient where this one has none.
        in_step = [
            here or (shared and p.requires_grad)
            for here, shared, p in zip(has_grad, self._sharded, self._params, strict=True)
        ]
        return Gradients(grads, has_grad, in_step, grad_scale)

    def _check_params(self) -> None:
        """Raises InputError if a parameter no longer has the shape and device of its state."""
        for p in self._params:
            checks.check_parameter(p)
            for name in (*self._large, MASTER):
                kept = self.state[p].get(name, p)
                if kept.shape != p.shape or kept.device != p.device:
                    raise InputError(
                        "Expected parameters with the shape and device of their state. Found "
                        f"{tuple(p.shape)} on {p.device}, and a `{name}` of {tuple(kept.shape)} on "
                        f"{kept.device}. Remedy: a new optimizer, after the model was changed."
                    )

    def _warn_of_float32(self) -> None:
        """Says once where states in eight bits were asked for and shards cannot have them."""
        asked = [g["params"] for g in self.param_groups if g.get("state_dtype") == "8bit"]
        cut = [p for p in chain(*asked) if p.numel() >= codes.LEAST and first_row(p) is None]
        if cut:
            checks.warn_once(
                "Expected parameters sharded once along their first dimension for 8-bit states. "
                f"Found shape {tuple(cut[0].shape)}, {cut[0].placements}: their states are in "
                "float32. Remedy: a group of their own with state_dtype='float32'."
            )

    @property
    def _large(self) -> list[str]:
        """Names of the states with the parameter's shape, masters aside."""
        return [name for name, field in self._fields.items() if field.elementwise]

    def _kind(self, parameter: Tensor) -> Any:
        """A property that all parameters of a batch share, besides group, device and types."""

    def _build_group(
        self,
        group: dict[str, Any],
        places: Sequence[int],
        grads: Sequence[Tensor | None],
        *,
        is_report: bool = False,
    ) -> list[ParamBatch]:
        """Batches of the group's parameters at some places.

        For a report nothing is to change: multi-tensor calls work on copies of the columns.
        """
        kinds: dict[Any, list[int]] = defaultdict(list)
        types: dict[int, Types | None] = {}
        for i in places:
            p, state, types[i] = self._params[i], self.state[self._params[i]], None
            ensure_master(p, state, group)
            if not is_report:
                self._bring_into_form(p, group, state)
                types[i] = self._loop_types(p, grads[i], group)
            # Codes and float32 share a batch, so that arithmetic on columns is done once.
            state_dtype, own = wide(state[self._large[0]].dtype), types[i]
            like = own and (*own[:2], state_dtype, *own[3:])
            kinds[p.device, p.dtype, state_dtype, like, self._kind(p)].append(i)
        return [
            ParamBatch(
                group,
                [self._params[i] for i in own],
                own,
                [self.state[self._params[i]] for i in own],
                self._fields,
                [types[i] for i in own],
                views=not (is_report or torch.compiler.is_compiling()),
                is_exact=self._is_exact,
            )
            for own in kinds.values()
        ]

    def _loop_types(
        self, parameter: Tensor, gradient: Tensor | None, group: dict[str, Any]
    ) -> Types | None:
        """Types for which loops or kernels take a parameter; None: multi-tensor calls do."""
        name, fused, device = type(self).__name__, group["fused"], parameter.device
        is_default = fused is None and group["foreach"] is None and device.type in BACKENDS
        # Torch's own compiler writes kernels of its own.
        if torch.compiler.is_compiling() or not (fused or is_default):
            return None
        # A rule that has no loops has nothing to miss.
        is_missed = fused or all(one.loop for one in self._passes)
        if (why := loops.why_none(device)) is None:
            state, is_exact = self.state[parameter], self._is_exact
            types = types_for_loops(parameter, gradient, state, self._large, is_exact)
            if types is None:
                layout = f"shape {tuple(parameter.shape)} and strides {parameter.stride()}"
                why = f"a parameter of {layout}, its gradient or a state is not in plain memory"
                is_missed = fused
            elif (why := loops.prepare(self, types, device)) is None:
                return types
        if is_missed:
            checks.warn_once(
                f"Expected a fused kernel for {name}. Found none: {why}. Multi-tensor calls are "
                "used. Remedy: contiguous() data, triton on CUDA devices, numba on a CPU: "
                f"{install('cpu')}; foreach=True chooses multi-tensor calls."
            )
        return None

    def _needed(self, device: torch.device) -> Sequence[Pass]:
        """The passes that a step takes on a device."""
        return self._passes

    @property
    def _is_exact(self) -> bool:
        """Whether any group has codes: a norm of all parameters may reach every code."""
        return any(group.get("state_dtype") == "8bit" for group in self.param_groups)

    @property
    def _is_alone(self) -> bool:
        """Whether no sum goes over shards."""
        return self._zero_sum is None and not any(self._sharded)

    # Sums over shards, and what all processes decide from them.

    def _first_sums(
        self,
        batches: Sequence[ParamBatch],
        own: Sequence[Tensor],
        finite: Sequence[Callable[[Tensor], Tensor]] | None = None,
        terms: Callable[[], Sequence[tuple[int | slice, Tensor]]] = tuple,
    ) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Adds up a step's first sums, sets ``taken`` of the batches, and decides on the step.

        ``own`` are local sums of each batch, ``(rows, tensors)``; ``finite`` says for each which
        parameters' sums are finite (None: the first row does); ``terms`` are the places of joint
        sums of several parameters, at most two a group, with each parameter's local parts of them.

        Returns:
            The sums over all shards; whether any parameter takes the step; and the joint sums, None
            where every process finds the same from the sums over shards.
        """
        finite = finite or [partial(_finite_norms, batch) for batch in batches]
        bad, joint = _bad(own, finite, getattr(self, "found_inf", None)), None
        total, totals, has_grad = self._over_shards(), list(own), [b.has_grad for b in batches]
        if (found := self._anywhere) is not None:
            has_grad = [b.has_grad | b.column(found.to(b.device)[b.index]) for b in batches]
        if total is not None:
            # A plain tensor's infinity, and who has a gradient, travel with the sums.
            pairs = [(tensor_of(a), tensor_of(c)) for a, c in zip(has_grad, own, strict=True)]
            rows = [torch.cat([c, a.to(c)[None]]) for a, c in pairs]
            parts, count = () if total.is_uniform else terms(), 2 * len(self.param_groups)
            more = self._first_rows + 1, tensor_of(bad), parts, count
            sums, bad, joint = _added(total, batches, rows, *more)
            has_grad, totals = [one[-1] > 0 for one in sums], [one[:-1] for one in sums]
            bad = bad | tensor_of(_bad(totals, finite, None)).to(bad.device)
        ok = ~bad
        for batch, anywhere in zip(batches, has_grad, strict=True):
            batch.taken = anywhere & batch.column(ok)
        return totals, ok, joint

    def _sums(
        self, batches: Sequence[ParamBatch], own: Sequence[Tensor], rows: int
    ) -> list[Tensor]:
        """Sums over all shards of local sums, each with shape ``(rows, tensors)``.

        Every process gets here, also one that works on nothing.
        """
        total = self._over_shards()
        return list(own) if total is None else _added(total, batches, own, rows)[0]

    def _over_shards(self) -> PackedSum | ZeroSum | None:
        """Adds up columns of all parameters over shards; None: nothing is sharded."""
        if not any(self._sharded):
            return self._zero_sum
        if self._packed_sum is None:
            self._packed_sum = PackedSum(self._params)
        return self._packed_sum if self._packed_sum.collectives else None

    def diagnostics(self, top: int = 10, *, grad_scale: float = 1.0) -> list[dict[str, Any]]:
        """Reports the parameters that stand out, by group; see :mod:`steadygrad.optim.diagnostics`.

        Call it after ``backward`` and before ``zero_grad``, on every process. It reads tensors, and
        so waits for the device; nothing of it is computed unless it is called.

        Args:
            top: How many parameters to name in each list.
            grad_scale: Loss scale that is still in the gradients where ``unscale_(optimizer)`` has
                not been called: torch's ``get_scale()``, or a layer-wise ``get_scales()[""]``.

        Returns:
            A dictionary of plain numbers for each group.
        """
        check_count("top", top)
        check_number("grad_scale", grad_scale, low=0, low_open=True)
        with torch.inference_mode(False), torch.no_grad():
            return reports(self, top, grad_scale)

    def _diagnose(
        self, owners: Sequence[tuple[Report, ParamBatch]], norms: Sequence[Tensor]
    ) -> None:
        """Adds to reports, from batches and their squared gradient norms in the first row."""


def _added(
    total: PackedSum | ZeroSum, batches: Sequence[ParamBatch], own: Sequence[Any], *more: Any
) -> tuple[list[Any], Tensor, Tensor | None]:
    """Columns of batches added up over shards, the flag, and joint sums that must be agreed on."""
    index = [batch.index for batch in batches]
    sums, flag, joint = total(index, [*map(tensor_of, own)], *more)
    columns = [batch.column(one) for batch, one in zip(batches, sums, strict=True)]
    return columns, flag, None if total.is_uniform else joint


def _finite_norms(batch: ParamBatch, sums: Any) -> Any:
    # A sum of squares is below infinity unless it is infinite or NaN, in the type of the states.
    return cast(sums[0], batch.state_dtype) < torch.inf


def _bad(sums: Sequence[Any], finite: Sequence[Callable[[Any], Any]], found_inf: Any) -> Any:
    """Whether any sum of this process is not finite, or a scaler has seen such a gradient."""
    flags = [~look(own).all() for look, own in zip(finite, sums, strict=True)]
    # A number where the scaler has seen no gradient at all.
    if isinstance(found_inf, Tensor):
        flags.append((found_inf != 0).reshape(()))
    if flags and not any(isinstance(flag, Tensor) for flag in flags):
        return np.bool_(any(flags))
    if len(flags) < 2:
        return flags[0] if flags else torch.zeros((), dtype=torch.bool)
    found = [*map(tensor_of, flags)]
    device = next((f.device for f in found if f.device.type != "cpu"), found[0].device)
    return torch.stack([flag.to(device) for flag in found]).any()
