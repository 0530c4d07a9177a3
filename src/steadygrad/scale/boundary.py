r"""The boundary of a layer: identity in the forward pass, a factor in the backward pass.

Each tensor that leaves a layer passes an autograd node that multiplies its gradient by the layer's
scale :math:`s`, and each one that enters passes a node that divides by it. So inside the layer all
gradients are :math:`s` times as large, and outside they are unchanged. Each consumer of a tensor
has a node of its own: the same tensor in a residual branch or in another layer is not touched.

Where one layer's output is the next one's input, the next one's node replaces both and multiplies
by :math:`s_a / s_b`: in half precision the plain gradient between the two might be zero.
"""

import copyreg
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadygrad._checks import InputError
from steadygrad._nests import tree_map_tensors, tree_tensors
from steadygrad.formulas.exponents import exponent_histograms
from steadygrad.scale.audit import CallTracker, is_narrow
from steadygrad.scale.layers import Layers
from steadygrad.scale.table import ScaleTable
from steadygrad.sharding import local

__all__ = ["ScaleHooks", "has_boundary"]

_TAG = "_steadygrad_boundary"


@dataclass(frozen=True)
class _ScalePath:
    """Lists the boundaries that a gradient crosses at one node, as indices of layers.

    Attributes:
        into: The layer that the gradient enters.
        out_of: The layer that it leaves; a non-finite value arose there.
        times: Layers whose scales multiply it.
        over: Layers whose scales divide it.
    """

    into: int
    out_of: int
    times: tuple[int, ...] = ()
    over: tuple[int, ...] = ()

    def joined(self, earlier: "_ScalePath") -> "_ScalePath":
        """Joins an earlier path to this one; scales that cancel are left out."""
        times, over = [*self.times, *earlier.times], [*self.over, *earlier.over]
        for index in list(times):
            if index in over:
                times.remove(index)
                over.remove(index)
        return _ScalePath(self.into, earlier.out_of, tuple(times), tuple(over))


class _BoundaryTag(NamedTuple):
    """Marks a tensor behind a boundary, so that the next boundary can replace its node.

    Attributes:
        table: The scaler's table.
        origin: The tensor before the boundary.
        versions: Versions of the origin and of the tensor.
        path: The node's path.
        argument: The tensor that the hook was given; ``origin`` or a tensor behind it.
    """

    table: ScaleTable
    origin: Tensor
    versions: tuple[int, int]
    path: _ScalePath
    argument: Tensor

    def allows_replacement(self, tensor: Tensor, table: ScaleTable) -> bool:
        """Checks that both tensors are unchanged and the one between them has no hooks."""
        return (
            self.table is table
            and not (tensor._backward_hooks or tensor.retains_grad)
            and self.versions == (self.origin._version, tensor._version)
        )


class _ScaleGrad(torch.autograd.Function):
    """Scales gradients; detected overflows become the gradient of leaves of the table.

    In a pass of a loss that another scaler scaled it does nothing, and in one of a loss that no
    scaler did it scales alone: whoever has that loss must see what is not finite.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        table: ScaleTable,
        path: _ScalePath,
        nonfinite_leaf: Tensor,
        into_counts: Tensor | None,
        out_of_counts: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(table.own, table.inverse, *table.gates)
        ctx.table, ctx.measured = table, into_counts is not None
        ctx.times, ctx.over = path.times, path.over
        # The audit reads it.
        ctx.into_layer = path.into
        # A view would not do: autograd forbids to change it in place.
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            result, *seen = _scaled(gradient, ctx)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            zero = torch.zeros((), requires_grad=True)  # the gradient of a mean has no graph
            result = _OnceOnly.apply(result, gradient, zero)  # type: ignore[no-untyped-call]
        return result, None, None, *seen


def _scaled(gradient: Tensor, ctx: Any) -> tuple[Tensor | None, ...]:
    """Scales a gradient; returns what was seen in it too, a flag and two rows of counts."""
    own, inverse, own_gate, others_gate = ctx.saved_tensors
    # In float32 at least: a scale of 2**16 is infinite in half precision. One after the other:
    # the product of the factors may be out of float32's range although its result is not.
    scaled = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    for index in ctx.times:
        scaled = scaled * own[index].to(gradient.device)
    for index in ctx.over:
        scaled = scaled * inverse[index].to(gradient.device)
    compiling = torch.compiler.is_compiling()
    if not compiling and not ctx.table.passes[0]:
        return gradient if ctx.table.passes[1] else scaled.to(gradient.dtype), None, None, None
    # The sum is finite exactly when every element is, unless the sum itself overflows.
    seen = [torch.isfinite(local(scaled).sum()).logical_not().to(own), None, None]
    if ctx.measured:
        seen[1:] = exponent_histograms([local(scaled), local(gradient)]).unbind()
    result = torch.nan_to_num(scaled, 0.0, 0.0, 0.0)
    if compiling:
        own_gate, others_gate = (gate.to(gradient.device) for gate in (own_gate, others_gate))
        result = torch.where(own_gate, result, torch.where(others_gate, gradient, scaled))
        seen = [None if rows is None else rows * own_gate for rows in seen]
    return result.to(gradient.dtype), *seen


class _OnceOnly(torch.autograd.Function):
    """Refuses to differentiate gradients again that crossed a boundary."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *behind: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise InputError(
            "Expected first derivatives through the modules chosen in `layer_scales`. Found a "
            "second one, as of a gradient penalty: no single divisor removes the scales from it. "
            "Remedy: do not choose these modules, or layer_scales={} with an init_scale."
        )


class ScaleHooks:
    """Puts a boundary around one chosen module, by its forward hooks.

    Args:
        index: Index of the layer.
        layers: The layers.
        table: Scales of the layers.

    Attributes:
        tracker: Records whether the module was called.
    """

    def __init__(self, index: int, layers: Layers, table: ScaleTable) -> None:
        self._layer, self._table = layers.layers[index], table
        self._name = repr(self._layer.name)
        self.tracker = CallTracker(self._name)
        self._handles: list[RemovableHandle] = []
        self._enter = _ScalePath(into=self._layer.parent, out_of=index, over=(index,))
        self._leave = _ScalePath(into=index, out_of=self._layer.parent, times=(index,))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model belongs to no scaler: its gradients must not be scaled.
        return copyreg.__newobj__, (ScaleHooks,), {"_table": None}  # type: ignore[attr-defined]

    def attach(self) -> None:
        """Registers the hooks."""
        module = self._layer.module
        assert module is not None
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _is_active(self) -> bool:
        return self._table is not None and self._table.enabled and torch.is_grad_enabled()

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._is_active():
            return None
        self.tracker.note_call()
        where = f"an argument of {self._name}"
        entered = tuple(self._cross_nest(arg, self._enter, where) for arg in args)
        return entered, {k: self._cross_nest(v, self._enter, where) for k, v in kwargs.items()}

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not self._is_active():
            return output
        left = self._cross_nest(output, self._leave, f"an output of {self._name}")
        if torch.compiler.is_compiling():
            self.tracker.refuse_changes()
        else:
            for nest in (*args, *kwargs.values()):
                self._hand_back(nest)
        return left

    def _cross_nest(self, nest: Any, path: _ScalePath, where: str) -> Any:
        return tree_map_tensors(lambda tensor: self._cross(tensor, path), nest, where)

    def _cross(self, tensor: Tensor, path: _ScalePath) -> Tensor:
        table, origin, entering = self._table, tensor, path is self._enter
        # A compiler cannot read versions; inductor leaves out the roundings in between itself.
        compiling = torch.compiler.is_compiling()
        tag = None if compiling else getattr(tensor, _TAG, None)
        if tag is not None and tag.allows_replacement(tensor, table):
            origin, path = tag.origin, tag.path.joined(path)
        # float32 gradients lose nothing: what they are says nothing about float16.
        counts = table.count_leaves if table.measuring and is_narrow(tensor.dtype) else None
        crossed: Tensor = _ScaleGrad.apply(  # type: ignore[no-untyped-call]
            origin,
            table,
            path,
            table.nonfinite_leaves[path.out_of],
            counts[path.into] if counts else None,
            counts[path.out_of] if counts else None,
        )
        if not compiling:
            versions = origin._version, crossed._version
            setattr(crossed, _TAG, _BoundaryTag(table, origin, versions, path, tensor))
        elif entering:
            self.tracker.note_argument(crossed)
        return crossed

    def _hand_back(self, nest: Any) -> None:
        """Applies a module's in-place changes of its arguments to the caller's tensors."""
        for tensor in tree_tensors(nest, f"an argument of {self._name}"):
            tag = getattr(tensor, _TAG, None)
            if tag is None or tag.table is not self._table:
                continue
            # The tag keeps the caller's tensor alive.
            delattr(tensor, _TAG)
            if tensor._version != tag.versions[1]:
                tag.argument.copy_(self._cross(tensor, self._leave))


def has_boundary(module: nn.Module) -> bool:
    """Whether a boundary of a scaler is around a module."""
    owners = [getattr(hook, "__self__", None) for hook in module._forward_hooks.values()]
    # That of a copied model has no table, and belongs to no scaler.
    return any(isinstance(owner, ScaleHooks) and owner._table is not None for owner in owners)
