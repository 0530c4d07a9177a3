"""Hooks at every module of a model, and the tensors that pass through them."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from steadygrad._checks import InputError
from steadygrad._names import own_name
from steadygrad._nests import attributes
from steadygrad.shards import local

__all__ = ["Known", "Shared", "has_values", "hook_modules", "is_planned", "tensors_of", "values"]

T = TypeVar("T")
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Shared:
    """State that an owner shares with its hooks, none of which keeps it alive.

    Attributes:
        owner: Gives the owner; None if it is gone.
        current: The pass that is in the model.
        deferred: Whether a read waits for the device, so that it is left until later.
        detailed: Whether to follow the graph in every pass, and not in the first one alone.
    """

    def __init__(self, device: torch.device, owner: Callable[[], Any] = lambda: None) -> None:
        self.device, self.owner = device, owner
        self.current: Any = None
        self.deferred, self.detailed = device.type not in ("cpu", "meta"), False

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not hooked.
        return Shared, (self.device,)


def hook_modules(model: nn.Module, shared: Shared, hooks: ExitStack) -> None:
    """Hooks every module; what is within a compiled one is part of it.

    Before and after a module's call, or after it alone if it never changes its input, the pass in
    ``shared.current`` takes its inputs and its output; the owner begins a pass as the model itself
    is called.

    Args:
        model: The model as it is called.
        shared: What the hooks know.
        hooks: Takes them away as it closes.

    Raises:
        InputError: If a part of the model is a ScriptModule.
    """
    compiled = tuple[str, ...]()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"Expected a model of Python modules. Found a ScriptModule at {name!r}. "
                "Remedy: hand it in before torch.jit."
            )
        if not name.startswith(compiled):
            _hook(own_name(name, model), module, module is model, shared, hooks)
            if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
                compiled += (f"{name}." if name else "",)


def _hook(name: str, module: nn.Module, is_root: bool, shared: Shared, hooks: ExitStack) -> None:
    compiled = module._compiled_call_impl
    # A layer that never changes its input and draws nothing: that is looked at after it, which
    # saves a hook.
    place = type(module).__module__
    plain = place.startswith("torch.nn.modules") and not place.endswith(("dropout", "rnn"))
    plain &= not (is_root or compiled or module._modules or getattr(module, "inplace", False))
    hook = partial(_on_call, shared, name, is_root, plain)
    if compiled is not None:
        # Hooks would be compiled as well.
        def call(*args: Any, **kwargs: Any) -> Any:
            hook(module, args, kwargs)
            output = compiled(*args, **kwargs)
            hook(module, args, kwargs, output)
            return output

        module._compiled_call_impl = call
        hooks.callback(setattr, module, "_compiled_call_impl", compiled)
        return
    hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
    if not plain:
        hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))


def _on_call(shared: Shared, name: str, is_root: bool, plain: bool, *call: Any) -> None:
    """Hook before a module, without an output, and after it; after it alone if it is ``plain``."""
    # Code that is compiled or transformed, or that checkpointing repeats in a backward pass.
    odd = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if odd or torch._C._current_graph_task_id() != -1:
        return
    _, args, kwargs, *outputs = call
    owner = shared.owner() if is_root and not outputs else None
    if owner is not None:
        owner.begin((args, kwargs))
    elif shared.current is not None:
        if plain or not outputs:
            shared.current.take(name, (*args, *kwargs.values()))
        for output in outputs:
            shared.current.give(name, output, is_root=is_root)


def is_planned() -> bool:
    """Whether tensors have shapes only, or are recorded, for a tool that plans or counts."""
    keys = torch._C._TorchDispatchModeKey
    odd = any(map(torch._C._get_dispatch_mode, (keys.FAKE, keys.PROXY)))
    return odd or torch._C._is_tracing()


class Known(Generic[T]):
    """Notes on tensors that a pass has met, until they are changed in place."""

    def __init__(self) -> None:
        # Here and not on the tensors, which other code may save.
        self._notes = dict[int, tuple[weakref.ref[Tensor], int, T]]()

    def get(self, tensor: Tensor) -> T | None:
        """The note on a tensor; None if there is none, or it was changed in place since."""
        note = self._notes.get(id(tensor))
        known = note and note[0]() is tensor and note[1] == _version(tensor)
        return note[2] if note and known else None

    def put(self, tensor: Tensor, note: T) -> None:
        """Takes a note on a tensor as it is now."""
        self._notes[id(tensor)] = weakref.ref(tensor), _version(tensor), note

    def tensors(self) -> list[Tensor]:
        """Those that are still there."""
        return [x for ref, *_ in self._notes.values() if (x := ref()) is not None]


def has_values(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Whether there is a tensor, with values to look at and one shape."""
    if tensor is None or tensor.is_meta or tensor.is_nested or isinstance(tensor, FakeTensor):
        return False
    return not torch._C._functorch.is_legacy_batchedtensor(tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def tensors_of(nest: Any) -> list[Tensor]:
    """Tensors among a module's inputs or outputs."""
    found = []
    for leaf in (nest,) if isinstance(nest, Tensor) else _pytree.tree_leaves(nest):
        if isinstance(leaf, Tensor):
            found += [leaf] if has_values(leaf) else []
        else:
            parts = leaf.values() if isinstance(leaf, Mapping) else attributes(leaf)
            found += [tensor for part in parts for tensor in tensors_of(part)]
    return found


def values(tensor: Tensor) -> Tensor:
    """This process's numbers of a tensor, dense and real."""
    tensor = local(tensor.detach())
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    # Sums and norms of float8 do not exist.
    return tensor if tensor.dtype in REAL else tensor.float()
