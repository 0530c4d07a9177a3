r"""The boundary of a layer: identity in the forward pass, a factor in the backward pass.

Each tensor that leaves a layer passes a node that multiplies its gradient by the layer's scale
:math:`s`, and each one that enters passes a node that divides by it. So inside, all gradients are
:math:`s` times, outside they are what they would be. A node belongs to one consumer: the same
tensor used elsewhere, around a residual branch or by another layer, is not touched.

Where one layer's output is the next one's input, the next one's node reaches back over both
boundaries and multiplies by :math:`s_a / s_b` at once: between the two, in half precision, the
plain gradient might be no number but zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from steadygrad.formulas.exponents import exponent_histograms
from steadygrad.scale.gradients import known, narrow
from steadygrad.scale.nests import map_differentiable
from steadygrad.scale.table import ScaleTable
from steadygrad.scale.tracing import Watch, note_call, refuse_changes, watch
from steadygrad.sharding import local

__all__ = ["Boundary"]

_TRACE = "_steadygrad_trace"


@dataclass(frozen=True)
class _Way:
    """A gradient's way between two layers; all are indices of layers.

    Attributes:
        into: Where it goes.
        out_of: Where it comes from, and so where a value arose that is not finite.
        times: Whose scales multiply it.
        over: Whose scales divide it.
    """

    into: int
    out_of: int
    times: tuple[int, ...] = ()
    over: tuple[int, ...] = ()

    def extended(self, out_of: int, times: tuple[int, ...], over: tuple[int, ...]) -> "_Way":
        """This way with one more boundary before it."""
        up, down = [*self.times, *times], [*self.over, *over]
        for index in list(up):
            if index in down:
                up.remove(index)
                down.remove(index)
        return _Way(self.into, out_of, tuple(up), tuple(down))


class _Trace(NamedTuple):
    """How a tensor came out of a boundary, for the next boundary to reach back over it."""

    table: ScaleTable
    origin: Tensor
    origin_version: int
    version: int
    way: _Way
    argument: Tensor

    def holds(self, tensor: Tensor, table: ScaleTable) -> bool:
        """Whether the tensor still is what it was, and so is its origin."""
        return (
            self.table is table
            # Who listens at this tensor wants its gradient to pass by.
            and not (tensor._backward_hooks or tensor.retains_grad)
            and tensor._version == self.version
            and self.origin._version == self.origin_version
        )


class _Crossing(torch.autograd.Function):
    """The node; ``flag`` and the gauges are leaves that take what it finds as their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        own: Tensor,
        inverse: Tensor,
        way: _Way,
        flag: Tensor,
        into: Tensor | None,
        out_of: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(own, inverse)
        ctx.times, ctx.over, ctx.measured = way.times, way.over, into is not None
        ctx.into_layer = way.into
        # A view would not do: autograd forbids to change it in place.
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own, inverse = ctx.saved_tensors
        # In float32 at least: a scale of 2**16 is infinite in half precision.
        scaled = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        for factor in _factors(own, ctx.times, inverse, ctx.over):
            scaled = scaled * (factor if isinstance(factor, float) else factor.to(gradient.device))
        # It is finite if and only if all are, sums near float32's limit aside.
        total = local(scaled).sum()
        into = out_of = None
        if ctx.measured:
            into, out_of = exponent_histograms([local(scaled), local(gradient)]).unbind()
        if (seen := known(total)) is not None and math.isfinite(seen):
            # A pass and some operations less, where the host can tell without waiting.
            return scaled.to(gradient.dtype), None, None, None, None, into, out_of
        found = torch.isfinite(total).logical_not().to(own)
        result = torch.nan_to_num(scaled, 0.0, 0.0, 0.0).to(gradient.dtype)
        return result, None, None, None, found, into, out_of


class Boundary:
    """The hooks of one chosen module.

    Args:
        index: Of the layer.
        parent: Of the layer around it.
        table: The scales.

    Attributes:
        watch: Whether the module has ever been called with gradients to come.
    """

    def __init__(self, index: int, parent: int, table: ScaleTable) -> None:
        self._table = table
        self._name = repr(table.names[index])
        self.watch = Watch(self._name)
        self._handles: list[RemovableHandle] = []
        self._enter = _Way(into=parent, out_of=index, over=(index,))
        self._leave = _Way(into=index, out_of=parent, times=(index,))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is nobody's: its gradients must not be scaled.
        return _inert, ()

    def attach(self, module: nn.Module) -> None:
        """Puts the hooks on a module."""
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Takes the hooks off again."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not (self._table.enabled and torch.is_grad_enabled()):
            return None
        note_call(self.watch)
        where = f"an argument of {self._name}"
        entered = tuple(self._through(arg, self._enter, where) for arg in args)
        return entered, {k: self._through(v, self._enter, where) for k, v in kwargs.items()}

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not (self._table.enabled and torch.is_grad_enabled()):
            return output
        left = self._through(output, self._leave, f"an output of {self._name}")
        if torch.compiler.is_compiling():
            refuse_changes(self.watch)
        else:
            self._hand_back(args, kwargs)
        return left

    def _through(self, nest: Any, way: _Way, where: str) -> Any:
        if isinstance(nest, Tensor):
            return self._cross(nest, way) if nest.requires_grad else nest
        crossed = map_differentiable(lambda tensor: self._cross(tensor, way), nest, where)
        # The caller's own list or dictionary, where nothing in it was replaced.
        return crossed if _differ(crossed, nest) else nest

    def _cross(self, tensor: Tensor, way: _Way) -> Tensor:
        table, origin = self._table, tensor
        # A compiler cannot look at versions; inductor leaves out the roundings in between itself.
        traceable = not torch.compiler.is_compiling()
        trace = getattr(tensor, _TRACE, None) if traceable else None
        if trace is not None and trace.holds(tensor, table):
            origin, way = trace.origin, trace.way.extended(way.out_of, way.times, way.over)
        # float32 gradients lose nothing: what they are says nothing about float16.
        gauges = table.gauges if table.measuring and narrow(tensor.dtype) else None
        crossed: Tensor = _Crossing.apply(  # type: ignore[no-untyped-call]
            origin,
            table.own,
            table.inverse,
            way,
            table.flags[way.out_of],
            gauges[way.into] if gauges else None,
            gauges[way.out_of] if gauges else None,
        )
        if traceable:
            versions = origin._version, crossed._version
            setattr(crossed, _TRACE, _Trace(table, origin, *versions, way, tensor))
        elif way is self._enter:
            watch(self.watch, crossed)
        return crossed

    def _hand_back(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Lets the caller see what the module did to its arguments in place, and frees them."""
        for nest in (*args, *kwargs.values()):
            # Most are tensors, and looking into a nest takes as long as crossing the boundary.
            for inner in [nest] if isinstance(nest, Tensor) else _pytree.tree_leaves(nest):
                trace = getattr(inner, _TRACE, None) if isinstance(inner, Tensor) else None
                if trace is None or trace.table is not self._table:
                    continue
                delattr(inner, _TRACE)
                if inner._version != trace.version:
                    trace.argument.copy_(self._cross(inner, self._leave))


class _Off:
    """The table of a boundary that does nothing."""

    enabled = False


def _inert() -> Boundary:
    """What stands for a boundary in a copied or unpickled model."""
    boundary = object.__new__(Boundary)
    vars(boundary)["_table"] = _Off
    return boundary


# Products within these are normal numbers of float32, as each of their factors is.
_RANGE = 2.0**-126, 2.0**127


def _factors(
    own: Tensor, times: Sequence[int], inverse: Tensor, over: Sequence[int]
) -> Sequence[float | Tensor]:
    """What a gradient is multiplied by: one number if the host may know that it fits."""
    if not (times or over):
        return []
    up, down = known(own), known(inverse)
    if up is not None and down is not None:
        product = math.prod([up[i] for i in times] + [down[i] for i in over])
        if _RANGE[0] <= product <= _RANGE[1]:
            return [product]
    return [own[i] for i in times] + [inverse[i] for i in over]


def _differ(new: Any, old: Any) -> bool:
    pairs = zip(_pytree.tree_leaves(new), _pytree.tree_leaves(old), strict=True)
    return any(a is not b for a, b in pairs)
