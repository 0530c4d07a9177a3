"""The hooks behind each module."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadygrad._nests import tree_map_tensors
from steadygrad.watch.finding import Seen, is_finite
from steadygrad.watch.passes import Pass, Shared, in_backward, look_each, tensors_of

__all__ = ["Tap", "detach", "is_watched"]

_TAP = "_steadygrad_tap"


class Tap:
    """Observes one module.

    Attributes:
        last: The last ``"input"`` that it took and no module had given, and its last ``"output"``.
        forward, time: In compiled code, the sum of its outputs' largest magnitudes, and the tick.
        backward: A leaf, whose gradient is that of the outputs' gradients in compiled code.
    """

    def __init__(self, name: str, shared: Shared) -> None:
        self.name, self.shared = name, shared
        self.plain = self.root = False
        self.hooks: list[RemovableHandle] = []
        self.last = dict[str, Seen]()
        self.forward = torch.zeros((), device=shared.ticks.device)
        self.backward = torch.zeros_like(self.forward, requires_grad=True)
        self.time = torch.zeros_like(shared.ticks)

    def attach(self, module: nn.Module, model: nn.Module) -> None:
        """Puts the tap and its hooks behind a module."""
        self.root = module is model
        # A layer that never changes its input: that is looked at after it, which saves a hook.
        self.plain = (
            type(module).__module__.startswith("torch.nn.modules")
            and not (self.root or module._modules)
            and not getattr(module, "inplace", False)
        )
        # A copy of a watched model has hooks already.
        detach([module])
        module.__dict__[_TAP] = self
        self.hooks = [module.register_forward_hook(_after_forward, with_kwargs=True)]
        if not self.plain:
            hook = module.register_forward_pre_hook(_before_forward, with_kwargs=True)
            self.hooks.append(hook)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tap, (self.name, self.shared), {"hooks": self.hooks}

    def enter(self, over: Pass, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes the module's inputs."""
        for leaf in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(leaf, (Tensor, list, tuple, dict)):
                for tensor in (leaf,) if isinstance(leaf, Tensor) else tensors_of(leaf):
                    one = over.known(tensor)
                    if one is None:
                        self._note(over, "input", tensor)
                    elif one.takers is not None and not in_backward():
                        one.takers.append(self.name)

    def leave(self, over: Pass, output: Any) -> None:
        """Notes the module's outputs."""
        repeated = in_backward()
        over.called.add(self.name)
        outputs = [output] if type(output) is Tensor else tensors_of(output)
        for tensor in outputs:
            if over.known(tensor) in (None, over.seen[0]):
                self._note(over, "output", tensor)
        if self.root and not repeated:
            over.await_loss(outputs)

    def _note(self, over: Pass, what: Literal["input", "output"], tensor: Tensor) -> None:
        # Reentrant checkpointing: the forward pass within the backward pass has a graph.
        again = in_backward()
        takers = [self.name] if what == "input" else []
        one = self.last.get(what) if again else Seen(what, self.name, takers=takers)
        if one is not None and over.note(one, tensor, again=again):
            self.last[what] = one

    def hand_over(self, over: Pass) -> None:
        """Adds the numbers that compiled code left to a pass, and clears them."""
        one = Seen("output", self.name, self.forward.clone(), self.backward.grad, takers=None)
        one.time, self.backward.grad = self.time.clone(), None
        self.forward.zero_()
        over.seen.append(one)
        over.called.add(self.name)
        over.broken = over.broken or not (is_finite(one.value) and is_finite(one.gradient))

    def trace(self, output: Any) -> Any:
        """Observes an output in compiled code: numbers in tensors that are changed in place."""

        def crossed(tensor: Tensor) -> Tensor:
            self.forward.add_(*look_each([tensor], now=False))
            self.shared.compiled = True
            self.time.copy_(self.shared.ticks.add_(1))
            through: Tensor = _Largest.apply(tensor, self.backward)  # type: ignore[no-untyped-call]
            return through

        return tree_map_tensors(crossed, output, f"the output of {self.name!r}")


def detach(modules: Iterable[nn.Module]) -> None:
    """Takes taps and their hooks away."""
    for module in modules:
        tap = module.__dict__.pop(_TAP, None)
        for hook in tap.hooks if tap else ():
            hook.remove()


def is_watched(module: nn.Module) -> bool:
    """Whether a watch that still exists is attached to a module."""
    return _TAP in module.__dict__ and module.__dict__[_TAP].shared.owner() is not None


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    tap = module.__dict__[_TAP]
    if tap.root and not in_backward():
        watch = tap.shared.owner()
        if watch is not None:
            watch.begin((args, kwargs))
    elif tap.shared.current is not None:
        tap.enter(tap.shared.current, args, kwargs)


def _after_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    # From the module and not from a closure: code compiled for one block serves the next one.
    tap = module.__dict__[_TAP]
    if torch.compiler.is_compiling():
        return tap.trace(output) if torch.is_grad_enabled() else output
    over = tap.shared.current
    if over is not None and not torch._C._are_functorch_transforms_active():
        if tap.plain:
            tap.enter(over, args, kwargs)
        tap.leave(over, output)
    return output


class _Largest(torch.autograd.Function):
    """Identity; the largest magnitude of its gradient becomes the gradient of a leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, leaf: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, look_each([gradient], now=False)[0].float()
