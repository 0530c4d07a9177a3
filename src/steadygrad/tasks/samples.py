"""Data that a task draws its batches from."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError

__all__ = ["Samples", "TensorSamples", "to_device"]


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
        data: One tensor, or a tuple, list or mapping of tensors, each with shape ``(N, *)``.
            Batches have the same structure.

    Raises:
        InputError: If there is no tensor, or their first dimensions differ.
    """

    def __init__(self, data: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> None:
        tensors = _named_tensors(data)
        lengths = {name: _length(name, tensor) for name, tensor in tensors.items()}
        if len(set(lengths.values())) != 1:
            found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise InputError(
                "Parameter `data` should hold tensors with one common first dimension. "
                f"Found {found or 'no tensor'}. Remedy: one row for each sample in every tensor."
            )
        self._data = data
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Tensor) -> Any:
        """Picks the rows ``indices`` (shape ``(n,)``) out of every tensor."""
        if isinstance(self._data, Tensor):
            return self._data[indices]
        if isinstance(self._data, Mapping):
            return {name: tensor[indices] for name, tensor in self._data.items()}
        return tuple(tensor[indices] for tensor in self._data)


def _named_tensors(data: Any) -> dict[str, Any]:
    if isinstance(data, Tensor):
        return {"data": data}
    if isinstance(data, Mapping):
        return {f"data[{name!r}]": tensor for name, tensor in data.items()}
    if isinstance(data, (tuple, list)):
        return {f"data[{i}]": tensor for i, tensor in enumerate(data)}
    raise InputError(
        "Parameter `data` should be a tensor, or a tuple, list or mapping of tensors. "
        f"Found {type(data).__name__}. Remedy: convert it with torch.as_tensor."
    )


def _length(name: str, tensor: Any) -> int:
    if not isinstance(tensor, Tensor) or tensor.ndim == 0:
        found = "a 0-d tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(
            f"Parameter `{name}` should be a tensor with one row for each sample. Found {found}. "
            "Remedy: convert it with torch.as_tensor."
        )
    return len(tensor)


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
    return batch if like is None else _to_device(batch, like)


def _to_device(nest: Any, like: Tensor) -> Any:
    if isinstance(nest, Tensor):
        dtype = like.dtype if _is_wider(like, nest) else nest.dtype
        return nest.to(like.device, dtype, non_blocking=True)
    if callable(getattr(nest, "to", None)):
        return nest.to(like.device)
    if isinstance(nest, Mapping):
        return {key: _to_device(item, like) for key, item in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(_to_device(item, like) for item in nest))
    if isinstance(nest, (tuple, list)):
        return type(nest)(_to_device(item, like) for item in nest)
    return nest


def _is_wider(like: Tensor, tensor: Tensor) -> bool:
    floating = like.is_floating_point() and tensor.is_floating_point()
    return floating and torch.finfo(like.dtype).bits > torch.finfo(tensor.dtype).bits
