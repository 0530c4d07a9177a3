"""Sketches of a step's tensors, kept on their devices until the step is over."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadygrad.numerics import exact, wide
from steadygrad.shards import local, offsets
from steadygrad.trace.equations import PROJECTIONS, project, signs
from steadygrad.watch.hooks import has_values, values

__all__ = ["Key", "Sketch", "Sketches"]

# Elements that are converted at a time: on a CPU as many as its cache holds.
_CHUNK, _DEVICE_CHUNK = 2**17, 2**24
# Signs that are kept from step to step.
_KEPT = 2**20


class Key(NamedTuple):
    """Name of a tensor of a step.

    ``kind`` is one of ``"data"``, ``"input"`` (of a module, made by the code around it),
    ``"output"``, ``"signal"`` (the gradient at one of these), ``"loss"``, ``"start"`` (a weight),
    ``"gradient"``, ``"before"`` and ``"state"`` (of the optimizer, before and after its step), and
    ``"weight"`` (after it).
    """

    kind: str
    name: str  # of the module or of the parameter
    part: str = ""  # of several outputs, or a state's name
    call: int = 0  # of several calls of a module


@dataclass(eq=False)
class Sketch:
    """Sums over the parts of a tensor that were met so far.

    Attributes:
        sums: Projections, the sum of squares, and the number of elements that are not finite, with
            shape ``(18,)``.
        count: Number of elements.
        rows: Rows of the batch over which a mean is taken; 0: none is.
        type: The tensor's type.
        copy: Whether another process has the same part.
        made: What it was made of: places in the order of the step, and the first one within it.
        maker: The module whose code made it.
        drew: Whether random numbers were drawn while it was made.
    """

    sums: Tensor
    type: str
    count: int = 0
    rows: int = 0
    copy: bool = False
    made: tuple[list[int], int] = ([], 0)
    maker: str = ""
    drew: bool = False


class Sketches:
    """Takes sketches by name, in the order in which they are met; parts of one name add up."""

    def __init__(self) -> None:
        self.found = dict[Key, Sketch]()
        self._signs = dict[Any, Tensor]()

    def clear(self) -> None:
        """Begins another step."""
        self.found = {}

    def take(
        self, key: Key, tensor: Tensor, *, batch: int | None = None, mean: bool = True
    ) -> Sketch | None:
        """Adds a tensor, or a part of it, to the sketch of a name.

        Args:
            key: The name.
            tensor: The tensor; sharded: this process's part, by its place in the whole.
            batch: The dimension of the batch, which is added up; None: there is none.
            mean: Whether to divide by the number of rows in the batch.

        Returns:
            The sketch; None if the tensor has no values to look at.
        """
        if not has_values(tensor):
            return None
        with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
            sums = self._sums(tensor.detach(), batch)
        one = self.found.get(key)
        if one is None:
            kind = str(tensor.dtype).removeprefix("torch.")
            one = self.found[key] = Sketch(torch.zeros_like(sums), kind)
        one.sums += sums.to(one.sums.device)
        one.count += local(tensor).numel()
        if batch is not None and mean:
            one.rows += tensor.shape[batch] if tensor.ndim else 1
        return one

    def numbers(self) -> Iterator[tuple[Key, Sketch, list[float]]]:
        """All sketches with their sums, on the host: a device is waited for once."""
        by_device = dict[torch.device, list[Sketch]]()
        for one in self.found.values():
            by_device.setdefault(one.sums.device, []).append(one)
        rows = dict[int, list[float]]()
        for some in by_device.values():
            table = torch.stack([one.sums for one in some]).tolist()
            rows |= {id(one): row for one, row in zip(some, table, strict=True)}
        for key, one in self.found.items():
            yield key, one, rows[id(one)]

    def _sums(self, tensor: Tensor, batch: int | None) -> Tensor:
        place, shape = list(offsets(tensor)), list(tensor.shape)
        numbers = values(tensor)
        # Sums of whole numbers are exact in the widest type, in any order. Elsewhere than on a CPU
        # float32 products may be taken with ten bits.
        plain = tensor.dtype.is_floating_point and tensor.device.type == "cpu"
        dtype = wide(numbers.dtype) if plain else exact(tensor.device)
        rows: Tensor | None = None
        if tensor.is_sparse:
            rows, place, shape = tensor._indices()[0], [0] * numbers.ndim, [*numbers.shape]
        if tensor.is_complex():
            place, shape = [*place, 0], [*shape, 2]
        square, bad = self._squares(numbers, dtype)
        if batch is not None and numbers.ndim:
            numbers = numbers.sum(batch, dtype=dtype)
            del place[batch], shape[batch]
        if not numbers.ndim:
            numbers, place, shape = numbers[None], [0], [1]
        return torch.cat([self._project(numbers, rows, place, shape, dtype), square, bad])

    def _project(
        self, x: Tensor, rows: Tensor | None, place: list[int], shape: list[int], dtype: torch.dtype
    ) -> Tensor:
        """Projections of a tensor that begins at some place of the whole one, in pieces."""
        total = torch.zeros(PROJECTIONS, dtype=exact(x.device), device=x.device)
        if not x.numel():
            return total
        key = (tuple(place), tuple(x.shape), tuple(shape[1:]), dtype, x.device)
        columns = self._signs.get(key)
        if columns is None:
            index = torch.zeros((), dtype=torch.int64, device=x.device)
            for at, own, whole in zip(place[1:], x.shape[1:], shape[1:], strict=True):
                here = torch.arange(at, at + own, device=x.device)
                index = (index * whole)[..., None] + here
            columns = self._kept(key, signs(index.reshape(-1), "column", dtype))
        step = max(1, _chunk(x) // max(columns.shape[0], PROJECTIONS))
        for first in range(0, len(x), step):
            part = x[first : first + step].reshape(-1, columns.shape[0]).to(dtype)
            total += project(part, self._rows(rows, place[0] + first, len(part), part), columns)
        return total

    def _rows(self, rows: Tensor | None, first: int, count: int, like: Tensor) -> Tensor:
        if rows is not None:
            return signs(rows[first : first + count], "row", like.dtype)
        key = (first, count, like.dtype, like.device)
        places = torch.arange(first, first + count, device=like.device)
        found = self._signs.get(key)
        return self._kept(key, signs(places, "row", like.dtype)) if found is None else found

    def _kept(self, key: Any, made: Tensor) -> Tensor:
        """Keeps signs that most tensors share; those of the longest take too much memory."""
        if made.numel() <= _KEPT:
            self._signs[key] = made
        return made

    def _squares(self, numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Sum of squares, and the number of elements that are not finite, with shape ``(1,)``."""
        widest = exact(numbers.device)
        square = torch.zeros(1, dtype=widest, device=numbers.device)
        bad = torch.zeros_like(square)
        flat = numbers.reshape(-1)
        for part in flat.split(_chunk(flat)):
            square += part.to(dtype).square().sum()
        # On a device a look would wait for it.
        if flat.device.type != "cpu" or not math.isfinite(square):
            bad += flat.numel() - flat.isfinite().sum()
        return square, bad


def _chunk(tensor: Tensor) -> int:
    return _CHUNK if tensor.device.type == "cpu" else _DEVICE_CHUNK
