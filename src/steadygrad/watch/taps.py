"""The hooks behind each module."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from steadygrad._nests import tree_map_tensors
from steadygrad.watch.finding import OUTPUT, Seen
from steadygrad.watch.passes import Clock, in_backward, largest

if TYPE_CHECKING:
    from steadygrad.watch.gradient_watch import GradientWatch

__all__ = ["Tap", "detach", "is_compiled", "is_watched", "witnesses"]

_TAP = "_steadygrad_tap"


class Tap:
    """Observes one module.

    The gradients of a leaf module's weights are sums over the gradient at its output, so they show
    whether that is finite; likewise for a module that contains such leaves. Other outputs get a
    hook.

    Args:
        name: Name of the module.
        hooked: Whether gradients at its outputs are hooked in every pass.
        watch: The watch that gets the observations; None for a copy of a watched model.
        clock: The watch's clock.

    Attributes:
        plain: Whether it is one of torch's layers, which never changes its input.
        root: Whether it is the model.
        prefix: How names of modules within it begin.
        batch: Index of the last pass in which it was called.
        input: The last tensor that it took and no module had given.
        output: The last one that it gave.
        forward: Largest magnitudes of outputs in compiled code, added up, with shape ``()``.
        backward: A leaf, whose gradient is that of the outputs' gradients in compiled code.
        time: When the module was last at work in compiled code, by the watch's clock.
    """

    def __init__(
        self, name: str, hooked: bool, watch: "GradientWatch | None", clock: Clock
    ) -> None:
        self.name, self.hooked = name, hooked
        self.plain = self.root = False
        self.prefix = f"{name}." if name else ""
        self.batch, self.input, self.output = -1, None, None
        self.watch: Callable[[], GradientWatch | None] = weakref.ref(watch) if watch else _nobody
        self.clock, device = clock, clock.ticks.device
        self.forward = torch.zeros((), device=device)
        self.backward = torch.zeros((), device=device, requires_grad=True)
        self.time = torch.zeros((), dtype=torch.int64, device=device)

    input: Seen | None
    output: Seen | None

    def attach(self, module: nn.Module, model: nn.Module) -> None:
        """Puts the tap and its hooks behind a module."""
        self.root = module is model
        # Its inputs are looked at after it, which saves a hook.
        self.plain = (
            type(module).__module__.startswith("torch.nn.modules")
            and not (self.root or any(True for _ in module.children()))
            and not getattr(module, "inplace", False)
        )
        # A copy of a watched model has hooks already.
        detach([module])
        module.__dict__[_TAP] = self
        module.register_forward_hook(_after_forward, with_kwargs=True)
        if not self.plain:
            module.register_forward_pre_hook(_before_forward, with_kwargs=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tap, (self.name, self.hooked, None, Clock(self.forward.device))

    def take(self, batch: int) -> Seen:
        """Hands over the numbers that compiled code left, and clears them."""
        gradient, self.backward.grad = self.backward.grad, None
        one = Seen(OUTPUT, self.name, batch, self.forward.clone())
        # Half a tick before what ran outside of compiled code after it.
        one.gradient, one.time, one.takers = gradient, self.time - 0.5, None
        self.forward.zero_()
        self.output, self.batch = one, batch
        return one

    def trace(self, output: Any) -> Any:
        """Observes an output in compiled code: numbers in tensors that are changed in place."""

        def crossed(tensor: Tensor) -> Tensor:
            self.forward.add_(largest(tensor))
            self.clock.used = True
            self.clock.ticks.add_(1)
            self.time.copy_(self.clock.ticks)
            if not self.hooked:
                return tensor
            through: Tensor = _Largest.apply(tensor, self.backward)  # type: ignore[no-untyped-call]
            return through

        return tree_map_tensors(crossed, output, f"the output of {self.name!r}")


def detach(modules: Iterable[nn.Module]) -> None:
    """Takes taps and their hooks away."""
    for module in modules:
        module.__dict__.pop(_TAP, None)
        for hooks, flags in (
            (module._forward_hooks, module._forward_hooks_with_kwargs),
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        ):
            for key in [k for k, h in hooks.items() if h in (_after_forward, _before_forward)]:
                del hooks[key]
                flags.pop(key, None)


def is_watched(module: nn.Module) -> bool:
    """Whether a watch that still exists is attached to a module."""
    return _TAP in module.__dict__ and module.__dict__[_TAP].watch() is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has a module, wrapped or in place."""
    # The wrapper's own type would have to be imported, which takes seconds.
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def witnesses(model: nn.Module) -> Mapping[nn.Module, str]:
    """The smallest weight of each leaf module whose weights are trained and only its own."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = {}
    for module in model.modules():
        own = {leaf: p for leaf, p in module._parameters.items() if p is not None}
        if any(True for _ in module.children()) or any(uses[id(p)] > 1 for p in own.values()):
            continue
        sizes = {leaf: p.numel() for leaf, p in own.items() if p.requires_grad}
        if sizes:
            found[module] = min(sizes, key=lambda leaf: sizes[leaf])
    return found


def _nobody() -> None:
    return None


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    tap = module.__dict__[_TAP]
    watch = tap.watch()
    if watch is None:
        return
    if tap.root:
        if not in_backward():
            watch.begin((args, kwargs))
    elif watch.current is not None:
        watch.current.enter(tap, args, kwargs)


def _after_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    # From the module and not from a closure: code compiled for one block serves the next one.
    tap = module.__dict__[_TAP]
    if torch.compiler.is_compiling():
        return tap.trace(output) if torch.is_grad_enabled() else output
    watch = tap.watch()
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
        return gradient, largest(gradient).float()
