"""One node of the graph, in which every loss's gradient arrives by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError

__all__ = ["Fork"]

Gradients = list[list[Tensor | None] | None]


class Fork(torch.autograd.Function):
    """Hands out copies of tensors, and joins the gradients that come back.

    The engine runs a node when all of its outputs' gradients are there. So the backward pass
    here sees every loss's gradient at once, within one ordinary pass, and hands on their sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        join: Callable[[Gradients], Sequence[Tensor | None]],
        branches: int,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        """Views of all tensors for the first branch, then for the next."""
        ctx.set_materialize_grads(False)  # None tells a missing loss from one with zero gradient
        ctx.join, ctx.branches, ctx.joined = join, branches, False
        return tuple(leaf.view_as(leaf) for _ in range(branches) for leaf in leaves)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Joins the branches' gradients, all at once or never."""
        if ctx.joined:
            raise InputError(
                "Expected one backward pass through one `fork`. Found another one, which would see "
                "some of the losses alone and count as a step. Remedy: add the losses up and call "
                "`backward()` on the sum; for a pass of its own, call `fork(y)` again."
            )
        width = len(gradients) // ctx.branches
        rows = [list(gradients[i * width : (i + 1) * width]) for i in range(ctx.branches)]
        present: Gradients = [row if any(g is not None for g in row) else None for row in rows]
        found = ctx.join(present)
        ctx.joined = True
        return None, None, *found
