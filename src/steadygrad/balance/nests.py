"""The outputs that losses depend on: one tensor, or a nest of them."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from steadygrad._checks import InputError
from steadygrad.sharding import is_sharded

__all__ = ["differentiable", "item_count"]


def differentiable(y: Any) -> list[Tensor]:
    """The tensors of a nest that gradients can flow into, in the nest's order.

    Raises:
        InputError: If there is none, or one is complex or sharded.
    """
    leaves = [leaf for leaf in tree_flatten(y)[0] if isinstance(leaf, Tensor)]
    found = [leaf for leaf in leaves if leaf.requires_grad]
    if not found:
        raise InputError(
            "Parameter `y` should hold a tensor that requires a gradient. Found "
            f"{len(leaves)} tensors, none of which does. Remedy: hand in the model's output as "
            "the losses see it: not detached, not made under `torch.no_grad()`."
        )
    for leaf in found:
        if is_sharded(leaf):
            raise InputError(
                "Parameter `y` should hold plain tensors. Found a DTensor. "
                "Remedy: `y.to_local()` or `y.full_tensor()` before the losses."
            )
        if not leaf.is_floating_point():
            raise InputError(
                f"Parameter `y` should hold real tensors. Found one of {leaf.dtype}. "
                "Remedy: `torch.view_as_real(y)` before the losses."
            )
    return found


def item_count(leaves: list[Tensor], *, per_item: bool) -> int:
    """How many items a batch has.

    Args:
        leaves: The tensors, with shapes ``(B, *)``.
        per_item: Whether items have norms of their own, so that shapes must agree.

    Raises:
        InputError: If a tensor has no dimension for them, or the first dimensions differ.
    """
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) == 1 and None not in sizes:
        return leaves[0].shape[0]
    if per_item:
        raise InputError(
            "Parameter `y` should hold tensors with one common first dimension, the batch. Found "
            f"shapes {[tuple(leaf.shape) for leaf in leaves]}. Remedy: per_batch_item=False."
        )
    return leaves[0].shape[0] if leaves[0].ndim else 1
