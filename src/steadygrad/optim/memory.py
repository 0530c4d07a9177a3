"""Which tensors compiled kernels can take: plain dense memory, one order throughout."""

from collections.abc import Mapping, Sequence
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.optim.leaves import local_grads
from steadygrad.optim.masters import MASTER
from steadygrad.sharding import local

__all__ = ["Layout", "fits", "gradient_type", "has_plain_gradient", "layout", "own_gradients"]

_TYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


def gradient_type(parameter: Tensor) -> torch.dtype:
    """Its gradient's type, also where it has none yet."""
    return parameter.dtype if parameter.grad is None else parameter.grad.dtype


def has_plain_gradient(parameter: Tensor) -> bool:
    """Whether its gradient, if any, has memory of its own: a wrapper's lies elsewhere."""
    gradient = parameter.grad
    return gradient is None or type(gradient) is Tensor or type(local(gradient)) is Tensor


def layout(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Type, shape and order of tensors, which may change where addresses do not."""
    return [(t.dtype, t.shape, t.stride()) for t in tensors]


class Layout:
    """What tensors are to stay, compared without a trace: thousands of tuples wake the collector.

    Args:
        tensors: The tensors.
        dtype: Their type, if it is to be another.
    """

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
        self._dtypes = [t.dtype if dtype is None else dtype for t in tensors]
        self._shapes = [t.shape for t in tensors]
        self._strides = [t.stride() for t in tensors]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether types, shapes and orders still are these."""
        return (
            all(map(is_, map(attrgetter("dtype"), tensors), self._dtypes))
            and all(map(eq, map(attrgetter("shape"), tensors), self._shapes))
            and all(map(eq, map(Tensor.stride, tensors), self._strides))
        )


def fits(
    parameter: Tensor,
    state: Mapping[str, Any],
    large: Sequence[str],
    small: Sequence[str],
    device: torch.device,
) -> bool:
    """Whether kernels can take a parameter and its state.

    Args:
        parameter: The parameter.
        state: Its state.
        large: Names of the states with its shape, other than masters; of one type.
        small: Names of those that are numbers, or rows of them: the step count, which is float32,
            and others of that type, if the state has them.
        device: Where the kernels run.
    """
    own = local(parameter.detach())
    averages = [local(state[name]) for name in large]
    masters = [local(state[MASTER])] if MASTER in state else []
    numbers = [state[name] for name in small if name in state]
    kept = averages[0].dtype
    return (
        all(
            type(t) is Tensor and t.device == device and not t.is_neg()
            for t in (own, *averages, *masters, *numbers)
        )
        and all(layout([t])[0][1:] == layout([own])[0][1:] for t in (*averages, *masters))
        and kept in (torch.float32, torch.float64)
        and all(t.dtype is kept for t in (*averages, *numbers[1:]))
        and all(t.dtype is torch.float32 for t in (numbers[0], *masters))
        and all(t.is_contiguous() for t in numbers)
        and _is_dense(own)
        and {own.dtype, gradient_type(parameter)} <= _TYPES
        and has_plain_gradient(parameter)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory without gaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def own_gradients(
    params: Sequence[Tensor], owns: Sequence[Tensor], *, sharded: bool
) -> list[Tensor | None]:
    """This process's gradients, with elements that lie in their parameters' order.

    Args:
        params: The parameters.
        owns: This process's parts of them.
        sharded: Whether any of them is a part.

    Raises:
        InputError: If one has another shape than its parameter.
    """
    found = [p.grad for p in params]
    there = {i: gradient for i, gradient in enumerate(found) if gradient is not None}
    if sharded or any(g.layout is not torch.strided for g in there.values()):
        # All at once: partial sums of several are added up in one collective.
        parts = local_grads([params[i] for i in there])
        there = dict(zip(there, parts, strict=True))
    for i, gradient in there.items():
        if gradient.shape != owns[i].shape:
            raise InputError(
                "Expected gradients with their parameters' shapes. Found one of shape "
                f"{tuple(gradient.shape)} for {tuple(owns[i].shape)}. Remedy: zero_grad() after a "
                "parameter's shape was changed, and a new optimizer."
            )
        found[i] = gradient
        if gradient.stride() != owns[i].stride() or gradient.is_neg():
            found[i] = torch.empty_like(owns[i], dtype=gradient.dtype).copy_(gradient)
    return found
