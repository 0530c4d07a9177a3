"""Autograd taps, which hand over one layer's gradients of single examples in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.noise.example_audit import ExampleAudit
from steadygrad.noise.layer_rules import MeasuredLayer

__all__ = ["Ledger", "Tap", "no_tap"]


class Ledger:
    """Sums of the examples' gradients, written by all taps of one model.

    Attributes:
        enabled: Whether forward passes are tapped.
        examples: Number of examples of the recording under way, or ``None``.
        totals: Sum over examples of the squared norms, by parameter.
        hold_all: Whether every layer may be used again after its backward pass.
        held: Examples' gradients that may still grow before they are squared, by parameter.
        audit: The comparison with the gradients received, until it has passed.
    """

    def __init__(self) -> None:
        self.enabled = True
        self.examples: int | None = None
        self.hold_all = False
        self.totals: dict[str, Tensor] = {}
        self.held: dict[str, Tensor] = {}
        self.audit: ExampleAudit | None = ExampleAudit()

    def hold(self, name: str, gradients: Tensor) -> None:
        """Adds one use of a parameter: the norm is that of the sum over its uses."""
        known = self.held.get(name)
        self.held[name] = gradients if known is None else known + gradients


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
        # vmap, grad and jvp take no autograd.Function of this form.
        if torch._C._are_functorch_transforms_active():
            return None
        if not (torch.is_grad_enabled() and output.requires_grad):
            return None
        inputs = args[0] if args else next(iter(kwargs.values()))
        if self._ledger.audit is not None:
            for attribute, name in self.layer.parameters.items():
                self._ledger.audit.watch(name, getattr(module, attribute))
        identity: Callable[..., Tensor] = _TappedOutput.apply
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
            raise InputError(
                f"Expected the output of layer `{self.layer.name}` "
                f"({type(self.layer.module).__name__}) to start with a dimension of {examples} "
                f"examples, before {self._features} of features. Found the shape "
                f"{tuple(grad.shape)}. Remedy: give the layer one entry for each example (expand "
                "position indices to [B, T]; put the batch first), pass the right number, or "
                "source='microbatch'."
            )
        self.fired = True
        return True

    def measure(self, grad: Tensor, inputs: Tensor | None) -> None:
        """Notes the squared norms, from the output's gradient and the layer's input."""
        module, rule, ledger = self.layer.module, self.layer.rule, self._ledger
        if self._measures("bias") and rule.bias is not None:
            self._note("bias", rule.bias(module, grad), grad.dtype)
        if inputs is None:
            return
        name = self.layer.parameters["weight"]
        held = self._hold_now or name in self.layer.tied or ledger.hold_all or name in ledger.held
        if rule.weight_sq_norms is None or held:
            self._note("weight", rule.weight(module, inputs, grad), grad.dtype)
            return
        self._refuse_second(name)
        ledger.totals[name] = rule.weight_sq_norms(module, inputs, grad).sum()
        if ledger.audit is not None:
            # As if all were one example, where the shapes allow it: no [B, V, D] is formed.
            if self._features == 1:
                rows = inputs.flatten(0, -1 if inputs.dim() < grad.dim() else -2)
                inputs, grad = rows.unsqueeze(0), grad.flatten(0, -2).unsqueeze(0)
            total = rule.weight(module, inputs, grad).sum(0)
            ledger.audit.expect(name, total, grad.dtype)

    def _note(self, attribute: str, gradients: Tensor, dtype: torch.dtype) -> None:
        """Holds the examples' gradients of one parameter, with shape ``[B, *shape]``."""
        name = self.layer.parameters[attribute]
        self._refuse_second(name)
        self._ledger.hold(name, gradients)
        if self._ledger.audit is not None:
            self._ledger.audit.expect(name, gradients.sum(0), dtype)

    def _measures(self, attribute: str) -> bool:
        parameter = self._parameters.get(attribute)
        if parameter is None or attribute not in self.layer.parameters:
            return False
        return parameter.requires_grad

    def _refuse_second(self, name: str) -> None:
        if name in self._ledger.totals:
            self._ledger.hold_all = True
            raise RuntimeError(
                f"Expected all forward passes of layer `{self.layer.name}` before its first "
                "backward pass. Found one after its examples' norms had been taken. Remedy: add "
                "the losses and call backward once; a second attempt will also succeed."
            )


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
            with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
                ctx.tap.measure(grad, *ctx.saved_tensors)
        return grad, None, None


def _leave_alone(*_: object) -> None:
    """The hook that a copied model carries in a tap's place."""


def no_tap() -> Callable[..., None]:
    """A hook that does nothing."""
    return _leave_alone
