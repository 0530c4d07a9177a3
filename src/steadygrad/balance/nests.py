"""The outputs that losses depend on: one tensor, or a nest of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from steadygrad._checks import InputError
from steadygrad.balance.window import Kind
from steadygrad.sharding import is_sharded

__all__ = ["Outline", "branches", "differentiable", "item_count", "outlines"]


class Outline(NamedTuple):
    """What is left of a tensor when nobody needs its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        """A tensor of that kind."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def outlines(leaves: Sequence[Tensor]) -> list[Outline]:
    """The tensors' outlines."""
    return [Outline(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]


def differentiable(y: Any) -> list[Tensor]:
    """The tensors of a nest that gradients can flow into, each once, in the nest's order.

    Raises:
        InputError: If there is none, one is complex or sharded, or some might be in a dataclass.
    """
    flat = tree_flatten(y)[0]
    closed = [type(x).__name__ for x in flat if _hides_tensors(x)]
    if closed:
        raise InputError(
            "Parameter `y` should be a tensor, or a nest of dicts, lists and tuples with tensors "
            f"in it. Found a {closed[0]}, which cannot be looked into. Remedy: "
            "`dict(y)` or `vars(y)`, the dict of its parts; for a dataclass also "
            "`torch.export.register_dataclass` with its type."
        )
    # A tensor that is there twice has one gradient.
    leaves = list({id(leaf): leaf for leaf in flat if isinstance(leaf, Tensor)}.values())
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


def _hides_tensors(x: Any, depth: int = 2) -> bool:
    """Whether something torch knows no parts of may hold some: they would go by unbalanced."""
    if isinstance(x, (Tensor, type)) or not depth:
        return False
    if is_dataclass(x):
        return True
    parts = list(x.values()) if isinstance(x, Mapping) else []
    parts += list(x) if isinstance(x, (list, tuple)) else []
    parts += vars(x).values() if hasattr(x, "__dict__") else []
    return any(isinstance(part, Tensor) or _hides_tensors(part, depth - 1) for part in parts)


def branches(
    y: Any, leaves: Sequence[Tensor], names: Sequence[str], copies: Iterator[Tensor]
) -> dict[str, Any]:
    """For each name a nest like ``y``, with the next copies in the leaves' places."""
    flat, spec = tree_flatten(y)
    found = {}
    for name in names:
        own = {id(leaf): next(copies) for leaf in leaves}
        found[name] = tree_unflatten([own.get(id(x), x) for x in flat], spec)
    return found


def item_count(leaves: list[Tensor], kind: Kind) -> int:
    """How many items a batch has.

    Args:
        leaves: The tensors, with shapes ``(B, *)``.
        kind: Which norm is taken: whether it looks at items or their number, so that the first
            dimensions must agree.

    Raises:
        InputError: If a tensor has no dimension for them, or the first dimensions differ.
    """
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) == 1 and None not in sizes:
        return leaves[0].shape[0]
    if kind.per_item or kind.batch_independent:
        raise InputError(
            "Parameter `y` should hold tensors with one common first dimension, the batch. Found "
            f"shapes {[tuple(leaf.shape) for leaf in leaves]}. Remedy: per_batch_item=False, and "
            "no batch_independent=True."
        )
    return leaves[0].shape[0] if leaves[0].ndim else 1
