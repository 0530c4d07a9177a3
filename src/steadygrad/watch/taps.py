"""The hooks behind each module."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadygrad._nests import tree_map_tensors
from steadygrad.watch.finding import Seen, is_finite
from steadygrad.watch.passes import Clock, Pass, in_backward, look_each

__all__ = ["Tap", "detach", "is_watched", "witnesses"]

_TAP = "_steadygrad_tap"


class Tap:
    """Observes one module.

    The gradients of a leaf module's weights are sums over the gradient at its output, so they show
    whether that is finite; likewise for a module that contains such leaves. Other outputs get a
    hook.

    Attributes:
        hooked: Whether gradients at its outputs are hooked in every pass.
        plain: Whether it is one of torch's layers, which never changes its input.
        batch: Index of the last pass in which it was called.
        input: The last tensor that it took and no module had given.
        output: The last one that it gave.
        forward: Largest magnitudes of outputs in compiled code, added up, with shape ``()``.
        backward: A leaf, whose gradient is that of the outputs' gradients in compiled code.
        time: When the module was last at work in compiled code, by the watch's clock.
    """

    def __init__(self, name: str, hooked: bool, clock: Clock) -> None:
        self.name, self.hooked, self.clock = name, hooked, clock
        self.plain = self.root = False
        self.hooks: list[RemovableHandle] = []
        self.batch = -1
        self.input: Seen | None = None
        self.output: Seen | None = None
        self.forward = torch.zeros((), device=clock.ticks.device)
        self.backward = torch.zeros_like(self.forward, requires_grad=True)
        self.time = torch.zeros_like(clock.ticks)

    def attach(self, module: nn.Module, model: nn.Module) -> None:
        """Puts the tap and its hooks behind a module."""
        self.root = module is model
        # Its inputs are looked at after it, which saves a hook.
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
        return Tap, (self.name, self.hooked, self.clock), {"hooks": self.hooks}

    def hand_over(self, over: Pass) -> None:
        """Adds the numbers that compiled code left to a pass, and clears them."""
        one = Seen("output", self.name, self.forward.clone(), self.backward.grad, takers=None)
        one.time, self.backward.grad = self.time.clone(), None
        self.forward.zero_()
        self.output, self.batch = one, over.batch
        over.seen.append(one)
        over.called.add(self.name)
        over.broken = over.broken or not (is_finite(one.value) and is_finite(one.gradient))

    def trace(self, output: Any) -> Any:
        """Observes an output in compiled code: numbers in tensors that are changed in place."""

        def crossed(tensor: Tensor) -> Tensor:
            self.forward.add_(*look_each([tensor], now=False))
            self.clock.used = True
            self.time.copy_(self.clock.ticks.add_(1))
            if not self.hooked:
                return tensor
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
    return _TAP in module.__dict__ and module.__dict__[_TAP].clock.watch() is not None


def witnesses(model: nn.Module) -> Mapping[nn.Module, str]:
    """The smallest weight of each leaf module whose weights are trained and only its own."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = {}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        sizes = {leaf: p.numel() for leaf, p in own.items() if p.requires_grad}
        if sizes and not module._modules and all(uses[id(p)] == 1 for p in own.values()):
            found[module] = min(sizes, key=lambda leaf: sizes[leaf])
    return found


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    tap = module.__dict__[_TAP]
    watch = tap.clock.watch()
    if watch is not None and tap.root and not in_backward():
        watch.begin((args, kwargs))
    elif watch is not None and watch.current is not None:
        watch.current.enter(tap, args, kwargs)


def _after_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    # From the module and not from a closure: code compiled for one block serves the next one.
    tap = module.__dict__[_TAP]
    if torch.compiler.is_compiling():
        return tap.trace(output) if torch.is_grad_enabled() else output
    watch = tap.clock.watch()
    if watch is None or watch.current is None or torch._C._are_functorch_transforms_active():
        return output
    if tap.plain:
        watch.current.enter(tap, args, kwargs)
    watch.current.see(tap, output)
    return output


class _Largest(torch.autograd.Function):
    """Identity; the largest magnitude of its gradient becomes the gradient of a leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, leaf: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, look_each([gradient], now=False)[0].float()
