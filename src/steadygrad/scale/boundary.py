r"""The boundary of a layer: identity in the forward pass, a factor in the backward pass.

Each tensor that leaves a layer passes an autograd node that multiplies its gradient by the layer's
scale :math:`s`, and each one that enters passes a node that divides by it. So inside the layer all
gradients are :math:`s` times as large, and outside they are unchanged. Each consumer of a tensor
has a node of its own: the same tensor in a residual branch or in another layer is not touched.

Where one layer's output is the next one's input, the next one's node replaces both and multiplies
by :math:`s_a / s_b`: in half precision the plain gradient between the two might be zero.
"""

import copyreg
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad._nests import tree_map_tensors
from steadygrad.numerics import wide
from steadygrad.scale.equations import exponent_histogram, is_narrow
from steadygrad.scale.layers import Layers
from steadygrad.scale.table import OTHERS, OWN, ScaleTable
from steadygrad.shards import local

_TAG = "_steadygrad_boundary"


class _ScalePath(NamedTuple):
    """The boundaries that a gradient crosses at one node, as indices of layers."""

    into: int  # the layer that the gradient enters
    out_of: int  # the layer that it leaves; a non-finite value arose there
    times: tuple[int, ...] = ()  # layers whose scales multiply it
    over: tuple[int, ...] = ()  # layers whose scales divide it

    def joined(self, earlier: "_ScalePath") -> "_ScalePath":
        """Joins an earlier path to this one; scales that cancel are left out."""
        times, over = [*self.times, *earlier.times], [*self.over, *earlier.over]
        for index in {*times} & {*over}:
            times.remove(index)
            over.remove(index)
        return _ScalePath(self.into, earlier.out_of, tuple(times), tuple(over))


class _BoundaryTag(NamedTuple):
    """Marks a tensor behind a boundary, so that the next boundary can replace its node."""

    table: ScaleTable
    origin: Tensor  # the tensor before the boundary
    version: int  # of the origin; the tensor's own is zero until it is changed in place
    path: _ScalePath
    argument: Tensor  # what the hook was given: the origin, or a tensor behind it


class _ScaleGrad(torch.autograd.Function):
    """Scales gradients; detected overflows become the gradient of leaves of the table.

    In a pass of a loss that another scaler scaled it does nothing, and in one of a loss that no
    scaler did it scales alone: whoever has that loss must see what is not finite.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, table: ScaleTable, path: _ScalePath, flag: Tensor, *counts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(table.scales, table.inverse, table.gate)
        # The audit reads the path.
        ctx.table, ctx.scale_path, ctx.measured = table, path, bool(counts)
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
    """Scales a gradient; returns a flag and two rows of counts of its values too."""
    scales, inverse, gate = ctx.saved_tensors
    # In float32 at least: a scale of 2**16 is infinite in half precision. One after the other:
    # the product of the factors may be out of float32's range although its result is not.
    scaled = gradient.to(wide(gradient.dtype))
    for index in ctx.scale_path.times:
        scaled = scaled * scales[index].to(gradient.device)
    for index in ctx.scale_path.over:
        scaled = scaled * inverse[index].to(gradient.device)
    compiling = torch.compiler.is_compiling()
    if not compiling and ctx.table.running != OWN:
        kept = gradient if ctx.table.running == OTHERS else scaled.to(gradient.dtype)
        return kept, *[None] * (3 if ctx.measured else 1)
    # The sum is finite exactly when every element is, unless the sum itself overflows.
    seen = [torch.isfinite(local(scaled).sum()).logical_not().to(scales)]
    if ctx.measured:
        seen += [exponent_histogram(local(scaled)), exponent_histogram(local(gradient))]
    result = torch.nan_to_num(scaled, 0.0, 0.0, 0.0)
    if compiling:
        gate = gate.to(gradient.device)
        others = torch.where(gate == OTHERS, gradient, scaled)
        result = torch.where(gate == OWN, result, others)
        seen = [rows * (gate == OWN) for rows in seen]
    return result.to(gradient.dtype), *seen


class _OnceOnly(torch.autograd.Function):
    """Refuses to differentiate gradients again that crossed a boundary."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *behind: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise InputError(
            "Expected first derivatives through the modules in `layer_scales`. Found a second one, "
            "from which no divisor removes the scales. Remedy: leave these modules out."
        )


class ScaleHooks:
    """Puts a boundary around one chosen module, by its forward hooks."""

    def __init__(self, module: nn.Module, index: int, layers: Layers, table: ScaleTable) -> None:
        parent = layers.chains[index][-2]
        self.table, self._name = table, repr(layers.names[index])
        self._enter = _ScalePath(into=parent, out_of=index, over=(index,))
        self._leave = _ScalePath(into=index, out_of=parent, times=(index,))
        entered: list[Tensor] = []  # in compiled code, while it is traced

        # Functions without arguments of ours: dynamo hands nothing else to its callbacks.
        def note_call(context: Any = None) -> None:
            table.called.add(index)
            entered.clear()

        def note_argument(context: Any) -> None:
            entered.append(context.get_local("tensor").as_fake())

        def refuse_changes(context: Any) -> None:
            if any(fake._version for fake in entered):
                raise InputError(
                    f"Expected arguments left as they are in compiled code. Found {self._name} "
                    "changes one in place, unseen by its caller. Remedy: inplace=False, or choose "
                    "a module around it."
                )

        self._note_call, self._note_argument = note_call, note_argument
        self._refuse_changes = refuse_changes
        # Compiled code is guarded by this text: a new scaler's hooks are traced anew.
        self._key = f"{self._name} {id(self)}"
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True),
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model belongs to no scaler: its gradients must not be scaled.
        return copyreg.__newobj__, (ScaleHooks,), {"table": None}  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _is_active(self) -> bool:
        return self.table is not None and self.table.enabled and torch.is_grad_enabled()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._is_active():
            return None
        if torch.compiler.is_compiling():
            _at_trace_time(self._key, self._note_call)
        else:
            self._note_call()
        where = f"an argument of {self._name}"
        return tree_map_tensors(lambda x: self._cross(x, self._enter), (args, kwargs), where)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._is_active():
            return output
        where = f"an output of {self._name}"
        left = tree_map_tensors(lambda x: self._cross(x, self._leave), output, where)
        if torch.compiler.is_compiling():
            _at_trace_time(self._key, self._refuse_changes)
        else:
            tree_map_tensors(self._hand_back, (args, kwargs), where)
        return left

    def _cross(self, tensor: Tensor, path: _ScalePath) -> Tensor:
        table, origin = self.table, tensor
        # A compiler cannot read versions; inductor leaves out the roundings in between itself.
        compiling = torch.compiler.is_compiling()
        tag = None if compiling else getattr(tensor, _TAG, None)
        if tag is not None and tag.table is table:
            same = (tag.origin._version, tensor._version) == (tag.version, 0)
            if same and not (tensor._backward_hooks or tensor.retains_grad):
                origin, path = tag.origin, tag.path.joined(path)
        leaves = [table.nonfinite_leaves[path.out_of]]
        # float32 gradients lose nothing: what they are says nothing about float16.
        if table.measuring and is_narrow(tensor.dtype):
            leaves += [table.count_leaves[path.into], table.count_leaves[path.out_of]]
        crossed: Tensor = _ScaleGrad.apply(origin, table, path, *leaves)  # type: ignore[no-untyped-call]
        if not compiling:
            setattr(crossed, _TAG, _BoundaryTag(table, origin, origin._version, path, tensor))
        elif path is self._enter:
            _at_trace_time(self._key, self._note_argument, crossed)
        return crossed

    def _hand_back(self, tensor: Tensor) -> Tensor:
        """Applies a module's in-place change of an argument to the caller's tensor."""
        tag = getattr(tensor, _TAG, None)
        if tag is not None and tag.table is self.table:
            # The tag keeps the caller's tensor alive.
            delattr(tensor, _TAG)
            if tensor._version:
                tag.argument.copy_(self._cross(tensor, self._leave))
        return tensor


def _at_trace_time(key: str, callback: Any, tensor: Tensor | None = None) -> None:
    """Runs a callback while dynamo traces; compiled code cannot read versions or change objects."""
    from torch._dynamo.comptime import comptime  # its import takes a second

    if key:
        comptime(callback)


def check_no_boundary(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    """Refuses chosen modules that have, or lie in or around, a boundary of another scaler."""
    for name, module in model.named_modules():
        hooks = [getattr(hook, "__self__", None) for hook in module._forward_hooks.values()]
        # That of a copied model has no table, and belongs to no scaler.
        if any(isinstance(hook, ScaleHooks) and hook.table is not None for hook in hooks):
            for other, layer in chosen.items():
                if module in {*layer.modules()} or layer in {*module.modules()}:
                    raise InputError(
                        f"Expected {other!r} without another scaler's boundary. Found one around "
                        f"{name!r}: gradients would be scaled twice. Remedy: call remove() on it."
                    )
