"""The hooks that tell a watch of each module's output, and of that output's gradient."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from steadygrad._nests import tree_map_tensors
from steadygrad.watch.finding import GRADIENT, INPUT, OUTPUT, WEIGHT
from steadygrad.watch.passes import Clock, Pass, floating

if TYPE_CHECKING:
    from steadygrad.watch.gradient_watch import GradientWatch

__all__ = ["Tap", "in_backward"]

_TAP = "_steadygrad_tap"
_TAG = "_steadygrad_watch"


class Tap:
    """Stands at the output of one module.

    Args:
        name: The module's.
        watch: Whom to tell; None for a copy of a model, which nobody watches.
        hooked: Whether to hook the outputs' gradients: those of the module's weights may do.

    Attributes:
        forward: Sum of outputs in compiled code, with shape ``()``.
        backward: A leaf, whose gradient is the sum of the outputs' gradients in compiled code.
        time: When the module was last at work in compiled code, by the watch's clock.
    """

    def __init__(
        self, name: str, watch: "GradientWatch | None", device: torch.device, hooked: bool = True
    ) -> None:
        self.name, self._hooked = name, hooked
        self._watch: Callable[[], GradientWatch | None] = weakref.ref(watch) if watch else _nobody
        self.clock = watch.clock if watch else Clock(device)
        self.forward = torch.zeros((), device=device)
        self.backward = torch.zeros((), device=device, requires_grad=True)
        self.time = torch.zeros((), dtype=torch.int64, device=device)

    def attach(self, module: nn.Module) -> Any:
        """Puts the tap behind a module; returns the hook's handle."""
        module.__dict__[_TAP] = self
        return module.register_forward_hook(_after_forward, with_kwargs=True)

    def detach(self, module: nn.Module) -> None:
        """Takes it away."""
        module.__dict__.pop(_TAP, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tap, (self.name, None, self.forward.device)

    def see(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Notes a module's output, and asks for its gradient."""
        watch = self._watch()
        current = watch.current if watch else None
        if current is None:
            return
        repeated = in_backward()
        for tensor in (output,) if type(output) is Tensor else floating(output):
            tag = tensor.__dict__.get(_TAG)
            # The same tensor as a submodule's output, unless it was changed in place since.
            if tag is None or tag[0] is not current or tag[2] != tensor._version:
                if not repeated:
                    self._note(current, module, args, kwargs, tensor)
                if self._hooked:
                    self._await_gradient(current, tensor)
                tensor.__dict__[_TAG] = (current, self.name, tensor._version)
            if not self.name:
                self._await_gradient(current, tensor)

    def _await_gradient(self, current: Pass, tensor: Tensor) -> None:
        node = tensor.grad_fn
        if node is not None:
            hook = partial(_note_gradient, self._watch, current, self.name, tensor.output_nr)
            # Of the node and not of the tensor: that takes half the time.
            node.register_prehook(hook)

    def _note(
        self,
        current: Pass,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> None:
        """Notes an output; its inputs and weights first, where a fault has to be explained."""
        finite = current.note(OUTPUT, self.name, output)
        explained = finite and not self.clock.deferred
        for tensor in (*args, *kwargs.values()):
            if not isinstance(tensor, Tensor):
                continue
            tag = tensor.__dict__.get(_TAG)
            if tag is not None and tag[0] is current:
                current.consumers[tag[1]].append(self.name)
            elif not explained and tensor.requires_grad and self.name:
                current.note_before(INPUT, self.name, tensor)
        if not finite:
            for leaf, weight in module._parameters.items():
                if weight is not None:
                    current.note_before(WEIGHT, f"{self.name}.{leaf}".lstrip("."), weight)

    def take(self, current: Pass) -> None:
        """Hands what compiled code left to a pass, and clears it."""
        gradient, self.backward.grad = self.backward.grad, None
        current.note_compiled(OUTPUT, self.name, self.forward, self.time)
        if gradient is not None:
            current.note_compiled(GRADIENT, self.name, gradient, self.time)
        self.forward.zero_()

    def trace(self, output: Any) -> Any:
        """The same in compiled code: sums in tensors that are changed in place."""

        def crossed(tensor: Tensor) -> Tensor:
            self.forward.add_(tensor.detach().sum(dtype=torch.float32))
            self.clock.used = True
            self.clock.ticks.add_(1)
            self.time.copy_(self.clock.ticks)
            through: Tensor = _Sum.apply(tensor, self.backward)  # type: ignore[no-untyped-call]
            return through

        return tree_map_tensors(crossed, output, f"the output of {self.name!r}")


def _nobody() -> None:
    return None


def in_backward() -> bool:
    """Whether the engine is at work: a forward pass is then one that checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1


def _after_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    # From the module and not from a closure: code compiled for one block serves the next one.
    tap = module.__dict__[_TAP]
    if torch.compiler.is_compiling():
        return tap.trace(output) if torch.is_grad_enabled() else output
    tap.see(module, args, kwargs, output)
    return output


def _note_gradient(
    watch: "Callable[[], GradientWatch | None]",
    current: Pass,
    name: str,
    number: int,
    gradients: tuple[Tensor | None, ...],
) -> None:
    owner, gradient = watch(), gradients[number]
    if owner is not None and gradient is not None:
        owner.await_backward()
        current.backward = True
        current.note(GRADIENT, name, gradient)


class _Sum(torch.autograd.Function):
    """Identity; the sum of its gradient becomes that of a leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, leaf: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.sum(dtype=torch.float32)
