"""A batch cut into micro-batches."""

from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.utils import _pytree

__all__ = ["cut", "equal_sizes", "ragged_sizes", "samples_of"]


def samples_of(batch: Any) -> int:
    """The leading dimension of a nest of tensors; 0 if there is none."""
    sizes = [x.shape[0] for x in _pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes else 0


def cut(batch: Any, start: int, stop: int) -> Any:
    """Some samples of a nest; what has no sample dimension is kept."""
    count = samples_of(batch)

    def part(leaf: Any) -> Any:
        whole = not (isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count)
        return leaf if whole else leaf[start:stop]

    return _pytree.tree_map(part, batch)


def equal_sizes(count: int, parts: int) -> list[int]:
    """Sizes of as many equal parts; what is left over is left out."""
    return [count // parts] * parts


def ragged_sizes(count: int, parts: int) -> list[int]:
    """Sizes that grow by equal steps, as nearly as whole numbers do."""
    more = count - parts
    ends = [round(more * i * (i + 1) / (parts * (parts + 1))) for i in range(parts + 1)]
    return [1 + stop - start for start, stop in pairwise(ends)]
