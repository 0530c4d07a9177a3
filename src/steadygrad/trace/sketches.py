"""Sketches of a step's tensors, kept on their devices until the step is over."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
        z: Projections, with shape ``(16,)``.
        square: Sum of squares.
        bad: Number of elements that are not finite.
        type: The tensor's type.
        count: Number of elements.
        rows: Rows of the batch over which a mean is taken; 0: none is.
        copy: Whether another process has the same part.
        made: What it was made of: places in the order of the step, and the first one within it.
        maker: The module whose code made it.
        drew: Whether random numbers were drawn while it was made.
    """

    z: Tensor
    square: Tensor
    bad: Tensor | int
    type: str
    count: int = 0
    rows: int = 0
    copy: bool = False
    made: Sequence[Any] = ([], 0)
    maker: str = ""
    drew: bool = False


class Sketches:
    """Takes sketches by name, in the order in which they are met; parts of one name add up."""

    def __init__(self) -> None:
        self.found = dict[Key, Sketch]()

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
        device, tensor = tensor.device.type, tensor.detach()
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                sums = _sums(tensor, batch)
        else:
            sums = _sums(tensor, batch)
        if (one := self.found.get(key)) is None:
            one = self.found[key] = Sketch(*sums, str(tensor.dtype).removeprefix("torch."))
        else:
            z, square, bad = sums
            one.z, one.square, one.bad = one.z + z, one.square + square, one.bad + bad
        one.count += local(tensor).numel()
        if batch is not None and mean:
            one.rows += tensor.shape[batch] if tensor.ndim else 1
        return one

    def numbers(self) -> Iterator[tuple[Key, Sketch, list[float]]]:
        """All sketches, with projections, square and count of what is not finite, on the host.

        A device is waited for once for each type.
        """
        alike = dict[Any, list[Sketch]]()
        for one in self.found.values():
            alike.setdefault((one.z.device, one.z.dtype, type(one.bad)), []).append(one)
        rows = dict[int, list[float]]()
        for some in alike.values():
            bad = [torch.as_tensor(one.bad, device=one.z.device) for one in some]
            ends = torch.stack([*(one.square for one in some), *bad]).view(2, -1).T
            table = torch.cat([torch.stack([one.z for one in some]), ends], 1).tolist()
            rows |= {id(one): row for one, row in zip(some, table, strict=True)}
        for key, one in self.found.items():
            yield key, one, rows[id(one)]


def _sums(tensor: Tensor, batch: int | None) -> tuple[Tensor, Tensor, Tensor | int]:
    """Projections, sum of squares, and the number of elements that are not finite."""
    place, shape, numbers = [*offsets(tensor)], [*tensor.shape], values(tensor)
    # Sums of whole numbers are exact in the widest type, in any order. Elsewhere than on a CPU
    # float32 products may be taken with ten bits.
    plain = tensor.dtype.is_floating_point and tensor.device.type == "cpu"
    dtype = wide(numbers.dtype) if plain else exact(tensor.device)
    rows: Tensor | None = None
    if tensor.is_sparse:
        rows, place, shape = tensor._indices()[0], [0] * numbers.ndim, [*numbers.shape]
    if tensor.is_complex():
        place, shape = [*place, 0], [*shape, 2]
    square, bad = _square(numbers, dtype)
    if batch is not None and numbers.ndim:
        numbers = numbers.sum(batch, dtype=dtype)
        del place[batch], shape[batch]
    if not numbers.ndim:
        numbers, place, shape = numbers[None], [0], [1]
    columns = _columns(tuple(place[1:]), numbers.shape[1:], tuple(shape[1:]), dtype, tensor.device)
    if not numbers.numel():
        return columns.new_zeros(PROJECTIONS), square, bad
    step = max(1, _chunk(numbers) // max(len(columns), PROJECTIONS))
    totals = list[Tensor]()
    for first in range(0, len(numbers), step):
        part = numbers[first : first + step].reshape(-1, len(columns)).to(dtype)
        if rows is None:
            own = _rows(place[0] + first, len(part), dtype, tensor.device)
        else:
            own = signs(rows[first : first + step], "row", dtype)
        totals.append(project(part, own, columns))
    total = torch.stack(totals).sum(0) if len(totals) > 1 else totals[0]
    return total, square, bad


@lru_cache(1024)
def _rows(first: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return signs(torch.arange(first, first + count, device=device), "row", dtype)


@lru_cache(256)
def _columns(
    place: tuple[int, ...],
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Signs of the columns of a part that begins at some place of the whole."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for at, own, size in zip(place, shape, whole, strict=True):
        index = (index * size)[..., None] + torch.arange(at, at + own, device=device)
    return signs(index.reshape(-1), "column", dtype)


def _square(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | int]:
    flat, most = numbers.reshape(-1), _chunk(numbers)
    parts = [x.to(dtype) for x in (flat.split(most) if len(flat) > most else [flat])]
    squares = [torch.dot(part, part) for part in parts]
    square = torch.stack(squares).sum() if len(squares) > 1 else squares[0]
    # On a device a look would wait for it.
    if flat.device.type != "cpu" or not math.isfinite(square):
        return square, flat.numel() - flat.isfinite().sum()
    return square, 0


def _chunk(tensor: Tensor) -> int:
    return _CHUNK if tensor.device.type == "cpu" else _DEVICE_CHUNK
