"""Sketches of a step's tensors, kept on their devices until the step is over."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadygrad.numerics import exact, wide
from steadygrad.shards import local, offsets
from steadygrad.trace.equations import PROJECTIONS, project, signs
from steadygrad.watch.hooks import has_values, values

# Elements that are converted at a time: on a CPU as many as its cache holds.
_CHUNK, _DEVICE_CHUNK = 2**17, 2**24
# What is larger counts as not finite: sums of squares of less have a number.
_LARGEST = 1e120


class Key(NamedTuple):
    """Name of a tensor of a step.

    ``kind`` is one of ``"data"``, ``"input"`` (of a module, made by the code around it),
    ``"output"``, ``"signal"`` (the gradient at one of these), ``"loss"``, ``"start"`` (a weight),
    ``"raw"`` (a gradient as a backward pass leaves it), ``"gradient"``, ``"before"`` and
    ``"state"`` (of the optimizer, before and after its step), and ``"weight"`` (after it).
    """

    kind: str
    name: str  # of the module or of the parameter
    part: str = ""  # of several outputs, or a state's name
    call: int = 0  # of several calls of a module


@dataclass(eq=False)
class Sketch:
    """Sums over the parts of a tensor that were met so far; a file has them with these names.

    Attributes:
        sums: Projections and the sum of squares, with shape ``(17,)``.
        rows: Rows of the batch over which a mean is taken; 0: none is.
        batch: The dimension of these rows.
        copy: Whether another process has the same part.
        took: What the module under way was given, by place in the order of the step.
        since: Place of the first value within that module.
        maker: The module whose code made it.
        drew: Whether random numbers were drawn while it was made.
        jumps: Whether it was made by an operation whose derivative jumps, as that of a ReLU.
    """

    sums: Tensor
    type: str
    count: int = 0
    rows: int = 0
    batch: int = 0
    copy: bool = False
    took: Sequence[int] = ()
    since: int = 0
    maker: str = ""
    drew: bool = False
    jumps: bool = False


class Sketches:
    """Takes sketches by name, in the order in which they are met; parts of one name add up."""

    def __init__(self) -> None:
        self.found = dict[Key, Sketch]()

    def take(
        self, key: Key, tensor: Tensor, *, batch: int | None = None, mean: bool = True
    ) -> Sketch | None:
        """Adds a tensor, of a sharded one this process's part, to the sketch of a name.

        Over the dimension ``batch`` it is added up, and divided by its rows where that is a
        ``mean``. None: the tensor has no values to look at.
        """
        if not has_values(tensor):
            return None
        casts = torch.is_autocast_enabled(tensor.device.type)
        with torch.autocast(tensor.device.type, enabled=False) if casts else nullcontext():
            sums = _sums(tensor.detach(), batch)
        if (one := self.found.get(key)) is None:
            one = self.found[key] = Sketch(sums, str(tensor.dtype).removeprefix("torch."))
        else:
            one.sums = one.sums + sums
        one.count += local(tensor).numel()
        if batch is not None and mean:
            one.rows += tensor.shape[batch] if tensor.ndim else 1
            one.batch = batch
        return one

    def numbers(self) -> Iterator[tuple[Key, Sketch, list[float]]]:
        """All sketches with their sums on the host; a device is waited for once for each type."""
        alike = dict[Any, dict[int, Tensor]]()
        for one in self.found.values():
            alike.setdefault((one.sums.device, one.sums.dtype), {})[id(one)] = one.sums
        rows = dict[int, list[float]]()
        for some in alike.values():
            rows |= zip(some, torch.stack([*some.values()]).tolist(), strict=True)
        for key, one in self.found.items():
            yield key, one, rows[id(one)]


def _sums(tensor: Tensor, batch: int | None) -> Tensor:
    """Projections, the sum of squares, and the number of elements that are not finite."""
    if tensor.is_sparse:
        tensor = tensor.coalesce()
    place, shape, numbers = [*offsets(tensor)], [*tensor.shape], values(tensor)
    # Sums of whole numbers are exact in the widest type, in any order. Elsewhere than on a CPU
    # float32 products may be taken with ten bits.
    plain = tensor.dtype.is_floating_point and tensor.device.type == "cpu"
    dtype = wide(numbers.dtype) if plain else exact(tensor.device)
    most, rows = _CHUNK if tensor.device.type == "cpu" else _DEVICE_CHUNK, None
    if tensor.is_sparse:
        rows, place, shape = tensor.indices()[0], [0] * numbers.ndim, [*numbers.shape]
    if tensor.is_complex():
        place, shape = [*place, 0], [*shape, 2]
    bad = _zero(dtype, tensor.device)
    # On a device a look would wait for it.
    here = tensor.device.type == "cpu"
    if not (here and math.isfinite(square := _square(numbers, dtype, most))):
        dtype = exact(tensor.device)
        good = numbers.abs() <= min(_LARGEST, torch.finfo(numbers.dtype).max)
        bad = (~good).sum().to(dtype)
        # Places of what is infinite, as in a mask, are seen as ones.
        numbers = torch.where(good, numbers, numbers.nan_to_num(0.0).clamp(-1, 1))
        square = _square(numbers, dtype, most)
    if batch is not None and numbers.ndim:
        numbers = numbers.sum(batch, dtype=dtype)
        del place[batch], shape[batch]
    if not numbers.ndim:
        numbers, place, shape = numbers[None], [0], [1]
    columns = _columns(tuple(place[1:]), numbers.shape[1:], tuple(shape[1:]), dtype, tensor.device)
    width, totals = columns.shape[0], list[Tensor]()
    step = max(1, most // max(width, PROJECTIONS))
    for first in range(0, max(numbers.shape[0], 1), step):
        part = numbers[first : first + step].reshape(-1, width).to(dtype)
        if rows is None:
            own = _rows(place[0] + first, part.shape[0], dtype, tensor.device)
        else:
            own = signs(rows[first : first + step], "row", dtype)
        totals.append(project(part, own, columns))
    return torch.cat([_sum(totals), square[None], bad[None]])


def _square(numbers: Tensor, dtype: torch.dtype, most: int) -> Tensor:
    flat = numbers.reshape(-1)
    parts = [part.to(dtype) for part in (flat.split(most) if flat.numel() > most else (flat,))]
    return _sum([torch.dot(part, part) for part in parts])


def _sum(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


@lru_cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


@lru_cache(256)
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
