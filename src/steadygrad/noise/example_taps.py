"""Autograd taps, which hand over one layer's gradients of single examples in the backward pass."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from steadygrad._checks import InputError
from steadygrad.formulas.example_norms import linear_bias_gradients, linear_weight_gradients
from steadygrad.noise.example_ledger import Ledger, sum_of_squares
from steadygrad.noise.layer_rules import MeasuredLayer

__all__ = ["Tap", "no_tap"]

# A linear layer can form its examples' gradients anyway (and read them back for the norm), or
# compute two Gram matrices more. One element written and read costs about as much as this many
# multiplications: measured 20-50 in a CPU's cache, and more where memory is far.
_ELEMENT_COST = 32

_Apply = Callable[..., Tensor]


class Tap:
    """The forward hook of one layer, and the receiver of its backward pass.

    Attributes:
        layer: The layer.
        fired: Whether it has measured something in the recording under way.
    """

    def __init__(self, layer: MeasuredLayer, ledger: Ledger) -> None:
        self.layer, self.fired = layer, False
        self._ledger, self._calls = ledger, 0
        self._reused = self._hold_now = False
        # Looked up by every call: attributes of a module cost a microsecond each.
        self._parameters = layer.module._parameters
        self._features = layer.rule.features(layer.module)
        # First in line, so that what other hooks do to the output is not taken for the layer's.
        self._handle = layer.module.register_forward_hook(self, prepend=True, with_kwargs=True)

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        # A copied or saved model is not measured.
        return no_tap, ()

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        """Wraps the layer's output; its value stays the same."""
        if not self._ledger.enabled or torch.compiler.is_compiling():
            return None
        # Inside a backward pass, checkpointing repeats a call that was counted before.
        if module.training and torch._C._current_graph_task_id() == -1:
            self._calls += 1
        if not (torch.is_grad_enabled() and output.requires_grad) or _in_functorch():
            return None
        inputs = args[0] if args else next(iter(kwargs.values()))
        if self._ledger.audit is not None:
            for attribute, name in self.layer.parameters.items():
                self._ledger.audit.watch(name, getattr(module, attribute))
        if self._replaceable(module, inputs, output):
            linear: _Apply = _TappedLinear.apply
            return linear(inputs, module.weight, module.bias, [output], self)
        identity: _Apply = _TappedOutput.apply
        return identity(output, inputs if self._measures("weight") else None, self)

    def remove(self) -> None:
        """Takes the hook off the layer."""
        self._handle.remove()

    def reset(self) -> None:
        """Ends a recording."""
        self.fired, self._calls = False, 0

    def received(self) -> list[tuple[str, Tensor | None, int]]:
        """Name, ``.grad`` and its version, for each parameter."""
        state = []
        for attribute, name in self.layer.parameters.items():
            parameter = self._parameters[attribute]
            grad = None if parameter is None else parameter.grad
            # FSDP2 adds to the local shard behind its DTensor's back.
            version = -1 if grad is None else getattr(grad, "_local_tensor", grad)._version
            state.append((name, grad, version))
        return state

    def recording(self, grad: Tensor) -> bool:
        """Whether this backward call is to be measured; counts it.

        Raises:
            InputError: If the output's leading dimension is not the examples'.
        """
        calls, self._calls = self._calls, max(self._calls - 1, 0)
        self._reused = self._reused or self.fired
        self._hold_now = self._reused or calls > 1
        examples = self._ledger.examples
        if examples is None:
            return False
        if grad.dim() <= self._features or grad.shape[0] != examples:
            raise _wrong_shape(self.layer, tuple(grad.shape), self._features, examples)
        self.fired = True
        return True

    def measure(self, grad: Tensor, inputs: Tensor | None) -> None:
        """Notes the squared norms, from the output's gradient and the layer's input."""
        module, rule = self.layer.module, self.layer.rule
        if self._measures("bias") and rule.bias is not None:
            self.note("bias", rule.bias(module, grad), grad.dtype)
        if inputs is None:
            return
        name = self.layer.parameters["weight"]
        self._refuse_second(name)
        if rule.weight_sq_norms is None or self._holds(name):
            self.note("weight", rule.weight(module, inputs, grad), grad.dtype)
            return
        self._ledger.totals[name] = rule.weight_sq_norms(module, inputs, grad).sum()
        if self._ledger.audit is not None:
            # As if all were one example, where the shapes allow it: no [B, V, D] is formed.
            if self._features == 1:
                rows = inputs.flatten(0, -1 if inputs.dim() < grad.dim() else -2)
                inputs, grad = rows.unsqueeze(0), grad.flatten(0, -2).unsqueeze(0)
            total = rule.weight(module, inputs, grad).sum(0)
            self._ledger.audit.expect(name, total, grad.dtype)

    def note(self, attribute: str, gradients: Tensor, dtype: torch.dtype) -> None:
        """Notes the examples' gradients of one parameter, with shape ``[B, *shape]``.

        Args:
            attribute: ``"weight"`` or ``"bias"``.
            gradients: One gradient for each example.
            dtype: What the layer computes in.
        """
        if not self._measures(attribute):
            return
        name = self.layer.parameters[attribute]
        gradients = gradients.detach() if gradients.requires_grad else gradients
        self._refuse_second(name)
        if gradients.dim() == 2 or self._holds(name):
            self._ledger.hold(name, gradients)
        else:
            self._ledger.totals[name] = sum_of_squares(gradients)
        if self._ledger.audit is not None:
            self._ledger.audit.expect(name, gradients.sum(0), dtype)

    def scratch(self, grad: Tensor, weight: Tensor) -> Tensor | None:
        """Reusable buffer for the examples' gradients of a weight matrix; None if they are kept."""
        if torch.is_grad_enabled() or self._holds(self.layer.parameters["weight"]):
            return None
        return self._ledger.scratch((grad.shape[0], *weight.shape), grad)

    def _measures(self, attribute: str) -> bool:
        parameter = self._parameters.get(attribute)
        if parameter is None or attribute not in self.layer.parameters:
            return False
        return parameter.requires_grad

    def _holds(self, name: str) -> bool:
        ledger, always = self._ledger, self._hold_now or name in self.layer.tied
        return always or ledger.hold_all or name in ledger.held

    def _refuse_second(self, name: str) -> None:
        if name in self._ledger.totals:
            self._ledger.hold_all = True
            raise RuntimeError(
                f"Expected all forward passes of layer `{self.layer.name}` before its first "
                "backward pass. Found one after its examples' norms had been taken. Remedy: add "
                "the losses and call backward once; a second attempt will also succeed."
            )

    def _replaceable(self, module: Any, inputs: Tensor, output: Tensor) -> bool:
        """Whether replacing a linear layer's backward pass is right, and cheaper."""
        if not isinstance(module, nn.Linear) or not self._measures("weight"):
            return False
        weight, (wide, narrow) = module.weight, (torch.float64, torch.float32)
        first = next(iter(module._forward_hooks)) == self._handle.id
        # Another hook has been at the output: its part of the graph must stay.
        if not first or torch_module._global_forward_hooks or output.dim() < 2:
            return False
        if not inputs.dtype == weight.dtype == output.dtype or weight.dtype not in (wide, narrow):
            return False
        positions = math.prod(output.shape[1:-1])
        return positions**2 * sum(weight.shape) >= _ELEMENT_COST * weight.numel()


class _TappedOutput(torch.autograd.Function):
    """The identity on a layer's output; its backward pass measures."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor | None, tap: Tap) -> Tensor:
        # Saved, not referenced: checkpointing and saved-tensor hooks apply.
        ctx.save_for_backward(inputs)
        ctx.tap = tap
        # Not a view as autograd sees it, so that in-place operations may follow.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.tap.recording(grad):
            with torch.no_grad(), _full_precision(grad):
                ctx.tap.measure(grad, *ctx.saved_tensors)
        return grad, None, None


class _TappedLinear(torch.autograd.Function):
    """A linear layer whose weight gradient is summed from its examples' gradients.

    The value comes from the layer itself, in ``output``; its own graph is dropped.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output: list[Tensor],
        tap: Tap,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.tap = tap
        return output[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        to_inputs, to_weight, to_bias, *_ = ctx.needs_input_grad
        grad_inputs = grad_weight = grad_bias = None
        with _full_precision(grad):
            if to_inputs:
                grad_inputs = grad @ weight
            if not ctx.tap.recording(grad):
                rows = grad.flatten(0, -2)
                grad_weight = rows.t() @ inputs.flatten(0, -2) if to_weight else None
                return grad_inputs, grad_weight, rows.sum(0) if to_bias else None, None, None
            if to_weight:
                out = ctx.tap.scratch(grad, weight)
                gradients = linear_weight_gradients(inputs, grad, out=out)
                grad_weight = gradients.sum(0)
                ctx.tap.note("weight", gradients, grad.dtype)
            if to_bias:
                gradients = linear_bias_gradients(grad)
                grad_bias = gradients.sum(0)
                ctx.tap.note("bias", gradients, grad.dtype)
        return grad_inputs, grad_weight, grad_bias, None, None


def _full_precision(grad: Tensor) -> AbstractContextManager[object]:
    kind = grad.device.type
    autocast = torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if autocast else nullcontext()


def _in_functorch() -> bool:
    """Inside vmap, grad or jvp, which take no autograd.Function of this form."""
    return bool(torch._C._are_functorch_transforms_active())


def _leave_alone(*_: object) -> None:
    """The hook that a copied model carries in a tap's place."""


def no_tap() -> Callable[..., None]:
    """A hook that does nothing."""
    return _leave_alone


def _wrong_shape(
    layer: MeasuredLayer, shape: tuple[int, ...], features: int, examples: int
) -> InputError:
    return InputError(
        f"Expected the output of layer `{layer.name}` ({type(layer.module).__name__}) to start "
        f"with a dimension of {examples} examples, before {features} of features. Found the "
        f"shape {shape}. Remedy: give the layer one entry for each example (expand position "
        "indices to [B, T]; put the batch first), pass the right number, or source='microbatch'."
    )
