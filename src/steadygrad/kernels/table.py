"""Addresses of a batch's tensors, and their division into chunks that threads or programs share.

What a chunk adds up goes to a place of its own, so sums do not depend on who worked on it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadygrad._checks import InputError

__all__ = [
    "BLOCK",
    "CHUNK",
    "GRAD",
    "MOST_SUMS",
    "PARAM",
    "STATES",
    "WEIGHT",
    "KernelBatch",
    "PointerTable",
    "Types",
    "addresses_of",
    "is_recording",
]

# Elements of a chunk: with fewer, hardware prefetching restarts too often (of 16,384 to
# 1,048,576 all from 65,536 on took the same time, fewer up to 8% more).
CHUNK = 65536
# Elements that are added up in the working type; their sums are added up in float64.
BLOCK = 4096
# Sums that a pass may leave for each chunk.
MOST_SUMS = 3
# Columns of addresses. A 16-bit parameter with a master is where the weight goes, rounded.
GRAD, PARAM, WEIGHT, STATES = 0, 1, 2, 3

# Types of gradients, weights, state, and of the parameters that weights are rounded to.
Types = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]


class PointerTable:
    """Addresses and chunks of a batch's tensors, in the host's memory.

    Args:
        sizes: Elements of each tensor; an empty one has an empty chunk.
        types: Types of the batch.
        states: Number of large states.
        device: Device of the tensors.
        chunk: Elements of a chunk.

    Attributes:
        addresses: With shape ``(tensors, 3 + states)``. Zero for a gradient that is zero.
        chunks: Rows of tensor, first element and length, with shape ``(chunks, 3)``.
        firsts: First chunk of each tensor.
        elements: Elements of all tensors.
        lengths: Elements of each tensor.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        types: Types,
        states: int,
        device: torch.device,
        chunk: int = CHUNK,
    ) -> None:
        self.lengths = lengths = np.asarray(sizes, np.int64)
        counts = np.maximum(1, -(-lengths // chunk))
        tensors = np.repeat(np.arange(len(sizes)), counts)
        self.types, self.device, self.elements = types, device, int(lengths.sum())
        self.firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        starts = (np.arange(len(tensors)) - self.firsts[tensors]) * chunk
        parts = np.minimum(chunk, lengths[tensors] - starts)
        self.chunks = np.ascontiguousarray(np.stack([tensors, starts, parts], axis=1))
        self.addresses = np.zeros((len(sizes), STATES + states), np.int64)

    def fill_states(self, moments: Sequence[Sequence[Tensor]]) -> None:
        """Writes where large states lie, given as a list for each of them."""
        for place, states in enumerate(moments):
            self.addresses[:, STATES + place] = addresses_of(states)

    def fill(
        self,
        params: Sequence[Tensor],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor | None],
    ) -> None:
        """Writes where all that may have moved lies now.

        Args:
            params: Local parameters.
            weights: Local weights, or masters.
            grads: Local gradients; None: zero.
        """
        given = [g for g in grads if g is not None]
        present = slice(None) if len(given) == len(grads) else [g is not None for g in grads]
        self.addresses[:, GRAD] = 0
        self.addresses[present, GRAD] = addresses_of(given)
        self.addresses[:, PARAM] = addresses_of(params)
        own = self.addresses[:, PARAM]
        self.addresses[:, WEIGHT] = own if weights is params else addresses_of(weights)
        if not self.addresses.all():
            self._check_memory(present)

    def _check_memory(self, present: slice | list[bool]) -> None:
        """Raises InputError if a tensor with elements has no memory, and is no gradient of None."""
        freed = (self.addresses == 0) & (self.lengths > 0)[:, None]
        absent = np.ones(len(freed), bool)
        absent[present] = False
        freed[absent, GRAD] = False
        if freed.any():
            row, column = np.argwhere(freed)[0]
            what = {GRAD: "gradient", PARAM: "parameter", WEIGHT: "weight"}.get(column, "state")
            raise InputError(
                f"Expected tensors with memory. Found a {what} of {self.lengths[row]} elements "
                "whose storage was freed. Remedy: give it memory again before the step, or set a "
                "gradient to None."
            )


class KernelBatch(Protocol):
    """Parameters of a batch, as kernels see them.

    Attributes:
        table: Addresses of their tensors, a table of the backend's own.
        sum_dtype: Type of sums over a parameter.
        inverse_scale: Factor on every gradient that is read, with shape ``()``; None: one.
    """

    table: Any
    sum_dtype: torch.dtype
    inverse_scale: Tensor | None


def addresses_of(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    """Address of each tensor's memory."""
    # Without a loop in Python: there are thousands of them a step.
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def is_recording(device: torch.device) -> bool:
    """Whether a CUDA graph is recording on a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
