"""Copies of the output `y`, and the node of the graph in which their gradients meet."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad._nests import tree_map_tensors

__all__ = ["Fork", "GradientRows", "branches", "eager"]

P = ParamSpec("P")
R = TypeVar("R")

# For each loss the gradients of all outputs; None for a loss without any.
GradientRows = list[list[Tensor | None] | None]


class Fork(torch.autograd.Function):
    """Returns copies of tensors, and joins the gradients that come back.

    The engine runs a node when the gradients of all its outputs have arrived. So this backward
    sees every loss's gradient at once, within one ordinary pass, and passes on one gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        join: Callable[[GradientRows], Sequence[Tensor | None]],
        branches: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Returns views of all tensors for the first branch, then for the next."""
        ctx.set_materialize_grads(False)  # None tells a missing loss from one with zero gradient
        ctx.join, ctx.branches, ctx.joined = join, branches, False
        return tuple(tensor.view_as(tensor) for _ in range(branches) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Joins the gradients of all branches, once."""
        # Constant, and to be differentiated: the derivative of a copy, and of no loss.
        derivative = torch.is_grad_enabled() and not any(
            g is not None and g.requires_grad for g in gradients
        )
        if ctx.joined or derivative:
            sees = "another one, which would see some of the losses alone"
            found = "a copy's derivative, which would be balanced" if derivative else sees
            raise InputError(
                f"Expected one backward pass through one `fork`. Found {found} and count as a "
                "step. Remedy: add the losses up and call "
                "`backward()` on the sum; take derivatives before the fork, as in "
                '`fork({"u": u, "u_xx": u_xx})`; for a pass of its own, call `fork(y)` again.'
            )
        return Fork._join(ctx, *gradients)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def _join(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        width = len(gradients) // ctx.branches
        rows = [list(gradients[i * width : (i + 1) * width]) for i in range(ctx.branches)]
        present: GradientRows = [row if any(g is not None for g in row) else None for row in rows]
        joined = ctx.join(present)
        ctx.joined = True
        return None, None, *joined


def branches(
    y: Any, outputs: Sequence[Tensor], names: Sequence[str], copies: Iterator[Tensor]
) -> dict[str, Any]:
    """Makes a nest like ``y`` for each name, with the next copies in place of the outputs."""

    def branch() -> Any:
        copy_of = {id(output): next(copies) for output in outputs}
        return tree_map_tensors(lambda tensor: copy_of[id(tensor)], y, "parameter `y`")

    return {name: branch() for name in names}


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps a function out of the graphs that `torch.compile` makes of the code that calls it.

    What it does to buffers and process groups in a backward pass is no part of a graph; the
    compiled code ends before the call and continues after it.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # Not at the top: it imports the compiler, which takes a second.
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call
