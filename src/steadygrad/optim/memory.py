"""Which tensors compiled kernels can take: plain dense memory, one order throughout."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.optim.leaves import local_grads
from steadygrad.optim.masters import MASTER
from steadygrad.sharding import local

__all__ = ["fits", "gradient_type", "own_gradients"]

_TYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


def gradient_type(parameter: Tensor) -> torch.dtype:
    """Its gradient's type, also where it has none yet."""
    return parameter.dtype if parameter.grad is None else parameter.grad.dtype


def fits(
    parameter: Tensor, state: Mapping[str, Any], large: Sequence[str], device: torch.device
) -> bool:
    """Whether kernels can take a parameter and its state.

    Args:
        parameter: The parameter.
        state: Its state.
        large: Names of the states with its shape, other than masters.
        device: Where the kernels run.
    """
    own = local(parameter.detach())
    tensors = [own, *(local(state[name]) for name in (*large, MASTER) if name in state)]
    return (
        all(type(t) is Tensor and t.device == device and not t.is_neg() for t in tensors)
        and all(t.stride() == own.stride() for t in tensors)
        and _is_dense(own)
        and {own.dtype, gradient_type(parameter)} <= _TYPES
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
    """
    found = [p.grad for p in params]
    there = {i: gradient for i, gradient in enumerate(found) if gradient is not None}
    if sharded or any(g.layout is not torch.strided for g in there.values()):
        # All at once: partial sums of several are added up in one collective.
        parts = local_grads([params[i] for i in there])
        there = dict(zip(there, parts, strict=True))
    for i, gradient in there.items():
        found[i] = gradient
        if gradient.stride() != owns[i].stride() or gradient.is_neg():
            found[i] = torch.empty_like(owns[i], dtype=gradient.dtype).copy_(gradient)
    return found
