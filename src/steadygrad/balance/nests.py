"""The outputs that losses depend on: one tensor, or a nest of them."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from steadygrad._checks import InputError
from steadygrad.balance.window import Kind
from steadygrad.sharding import is_sharded

__all__ = ["Outline", "branches", "differentiable", "item_count", "outlines"]


# How deep to look for tensors in what torch does not know.
DEPTH = 3


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
        InputError: If there is none, one is complex or sharded, or some are in something that
            cannot be looked into.
    """
    flat = tree_flatten(y)[0]
    for x in flat:
        _check_open(x)
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


def _check_open(leaf: Any) -> None:
    """Refuses what may hold tensors and is no nest for torch: they would pass by unbalanced."""
    if is_dataclass(leaf) and not isinstance(leaf, type):
        what = "a dataclass that"
        remedy = "`vars(y)`, the dict of its fields; or `torch.export.register_dataclass`"
    elif isinstance(leaf, Tensor) or not _holds(leaf, DEPTH):
        return
    else:
        what = "with tensors in it, which"
        remedy = "`vars(y)`, the dict of what it holds"
        if isinstance(leaf, Mapping):
            remedy = "`dict(y)`, a plain one"
        elif isinstance(leaf, Iterable):
            remedy = "`list(y)` or `tuple(y)`, a plain one"
    raise InputError(
        "Parameter `y` should be a tensor, or a nest of dicts, lists and tuples with tensors "
        f"in it. Found a {type(leaf).__name__}, {what} cannot be looked into. Remedy: {remedy}."
    )


def _holds(found: Any, depth: int) -> bool:
    """Whether a gradient could flow into something inside of this."""
    if isinstance(found, Tensor):
        return found.requires_grad
    if depth == 0 or isinstance(found, (str, bytes, type, nn.Module)):
        return False
    inside: list[Any] = []
    if isinstance(found, Mapping):
        inside += found.values()
    elif isinstance(found, (list, tuple, set, frozenset, deque)):
        inside += found
    inside += getattr(found, "__dict__", {}).values()
    return any(_holds(x, depth - 1) for x in inside)


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
