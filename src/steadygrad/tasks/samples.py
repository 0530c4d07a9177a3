"""Data that a task draws its batches from."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

from steadygrad._checks import InputError

__all__ = ["Samples", "TensorSamples", "rows_of", "to_device"]


@runtime_checkable
class Samples(Protocol):
    """A fixed, indexable set of samples; the caller's indices decide on the order."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> Any:
        """Collects samples into a batch.

        Args:
            indices: Sample numbers in ``[0, len(self))``, int64 with shape ``(n,)``.

        Returns:
            A nest of tensors whose leading dimension is ``n``.
        """
        ...


class TensorSamples:
    """Samples held in tensors that share their first dimension.

    Args:
        data: One tensor, or a nest (tuples, lists, mappings) of tensors, each with shape
            ``(N, *)``. Batches have the same structure.

    Raises:
        InputError: If there is no tensor, or their first dimensions differ.
    """

    def __init__(self, data: Tensor | Sequence[Any] | Mapping[str, Any]) -> None:
        self._tensors, self._spec = rows_of("data", data)

    def __len__(self) -> int:
        return len(self._tensors[0])

    def batch(self, indices: Tensor) -> Any:
        """Picks the rows ``indices`` (shape ``(n,)``) out of every tensor."""
        return tree_unflatten([tensor[indices] for tensor in self._tensors], self._spec)


def rows_of(name: str, nest: Any) -> tuple[list[Tensor], TreeSpec]:
    """The tensors of a nest that the caller knows as ``name``, and its structure.

    Raises:
        InputError: If it holds anything but tensors with one common first dimension.
    """
    places, spec = tree_flatten_with_path(dict(nest) if isinstance(nest, Mapping) else nest)
    leaves = [leaf for _, leaf in places]
    lengths = {leaf.shape[:1] if isinstance(leaf, Tensor) else () for leaf in leaves}
    if len(lengths) != 1 or () in lengths:
        found = ", ".join(
            f"{name}{keystr(place)}: "
            f"{tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__}"
            for place, leaf in places[:4]
        )
        raise InputError(
            f"Parameter `{name}` should hold tensors with one row for each sample. Found "
            f"{found or 'no tensor'}. Remedy: torch.as_tensor of each; in place of a loader of "
            "such batches, one of a map-style data set, and a collate_fn."
        )
    return leaves, spec


def to_device(batch: Any, model: nn.Module) -> Any:
    """Moves a batch to the device of a model, and narrows no number on the way.

    Args:
        batch: A nest (tuples, named tuples, lists, mappings) of tensors; other leaves are kept.
            Objects with a method ``to``, such as a Hugging Face ``BatchEncoding``, move
            themselves.
        model: Model whose first parameter says the device. A floating-point tensor is widened to
            that parameter's dtype where this has more bits; a float32 target stays float32 for a
            bfloat16 model. A model without parameters leaves the batch alone.

    Returns:
        The same nest on the model's device.
    """
    like = next(model.parameters(), None)
    if like is None:
        return batch
    bits = torch.finfo(like.dtype).bits if like.is_floating_point() else 0

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            wider = leaf.is_floating_point() and bits > torch.finfo(leaf.dtype).bits
            return leaf.to(like.device, like.dtype if wider else leaf.dtype, non_blocking=True)
        if callable(getattr(leaf, "to", None)):
            return leaf.to(like.device)
        # Of a class that torch does not take apart.
        return tree_map(move, dict(leaf)) if isinstance(leaf, Mapping) else leaf

    return tree_map(move, batch)
