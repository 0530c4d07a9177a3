"""The model's output `y` that the losses depend on: a tensor, or a nest of tensors."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from steadygrad._checks import InputError
from steadygrad._nests import tree_map_tensors, tree_tensors
from steadygrad.balance.options import BalancerOptions
from steadygrad.sharding import is_sharded

__all__ = ["branches", "item_count", "output_tensors"]


def output_tensors(y: Any) -> list[Tensor]:
    """Collects the tensors of ``y`` that require a gradient, each once, in the nest's order.

    Raises:
        InputError: If there is none, one is complex or sharded, or some are in an object that
            cannot be taken apart.
    """
    tensors = tree_tensors(y, "parameter `y`")
    if not tensors:
        raise InputError(
            "Parameter `y` should hold a tensor that requires a gradient. Found none. Remedy: "
            "hand in the model's output as the losses see it: not detached, not made under "
            "`torch.no_grad()`."
        )
    for tensor in tensors:
        if is_sharded(tensor):
            raise InputError(
                "Parameter `y` should hold plain tensors. Found a DTensor. "
                "Remedy: `y.to_local()` or `y.full_tensor()` before the losses."
            )
        if not tensor.is_floating_point():
            raise InputError(
                f"Parameter `y` should hold real tensors. Found one of {tensor.dtype}. "
                "Remedy: `torch.view_as_real(y)` before the losses."
            )
    return tensors


def branches(
    y: Any, outputs: Sequence[Tensor], names: Sequence[str], copies: Iterator[Tensor]
) -> dict[str, Any]:
    """Makes a nest like ``y`` for each name, with the next copies in place of the outputs."""

    def branch() -> Any:
        copy_of = {id(output): next(copies) for output in outputs}
        return tree_map_tensors(lambda tensor: copy_of[id(tensor)], y, "parameter `y`")

    return {name: branch() for name in names}


def item_count(outputs: Sequence[Tensor], options: BalancerOptions) -> int:
    """Counts the items of a batch of outputs with shapes ``(B, *)``.

    Raises:
        InputError: If the norm depends on items, and the first dimensions differ.
    """
    sizes = {output.shape[0] if output.ndim else None for output in outputs}
    if len(sizes) == 1 and None not in sizes:
        return outputs[0].shape[0]
    if options.per_batch_item or options.batch_independent:
        raise InputError(
            "Parameter `y` should hold tensors with one common first dimension, the batch. Found "
            f"shapes {[tuple(t.shape) for t in outputs]}. Remedy: per_batch_item=False, and "
            "no batch_independent=True."
        )
    return outputs[0].shape[0] if outputs[0].ndim else 1
