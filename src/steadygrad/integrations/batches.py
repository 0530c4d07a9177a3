"""Sizes and labels of a micro-batch as trainers hand it over."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError

__all__ = ["IGNORED", "labels_of", "rows_of"]

IGNORED = -100


def rows_of(batch: Any) -> int:
    """Rows of the first tensor of a micro-batch, which may be a nest of mappings and sequences.

    Raises:
        InputError: If it has none.
    """
    first = next(_tensors(batch), None)
    if first is None:
        raise InputError(
            "Expected a micro-batch with a tensor of samples. Found none in a "
            f"{type(batch).__name__}. Remedy: pass `samples`, a function from the micro-batch to "
            "its number of samples."
        )
    return len(first)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping):
        yield from _tensors([*batch.values()])
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        for part in batch:
            yield from _tensors(part)


def labels_of(inputs: Mapping[str, Any], shifted: bool) -> Tensor:
    """The labels that a Hugging Face loss is a mean over; -100 is ignored.

    Args:
        inputs: A micro-batch.
        shifted: Whether the loss leaves out each row's first label.
    """
    if "shift_labels" in inputs:
        return torch.as_tensor(inputs["shift_labels"])
    labels = torch.as_tensor(inputs["labels"])
    return labels[..., 1:] if shifted else labels
