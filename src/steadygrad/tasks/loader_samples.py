"""Samples out of data loaders, of map-style data sets and of streams."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from steadygrad._checks import InputError
from steadygrad.tasks.guard import reason
from steadygrad.tasks.samples import Samples

__all__ = ["CollatedSamples", "in_memory", "read_loader"]


class CollatedSamples:
    """Samples of a map-style data set, collated into batches.

    Args:
        dataset: Has ``__getitem__`` and ``__len__``; its ``__getitems__`` is used where it has one.
        collate: ``(list of samples) -> batch``.
        keys: What the data set is asked for, in the order of the sample numbers; None: all of
            ``range(len(dataset))``.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], keys: Sequence[Any] | None = None
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.keys = range(len(dataset)) if keys is None else keys

    def __len__(self) -> int:
        return len(self.keys)

    def batch(self, indices: Tensor) -> Any:
        """Collates the samples ``indices``, with shape ``(n,)``."""
        keys = [self.keys[i] for i in indices.tolist()]
        many = getattr(self.dataset, "__getitems__", None)
        rows = many(keys) if many else [self.dataset[key] for key in keys]
        try:
            return self.collate(rows)
        except (RuntimeError, ValueError) as error:
            if self.collate is not default_collate:
                raise
            raise InputError(
                "Samples should have one shape where no collate_fn pads them. Found "
                f"{reason(error)}. Remedy: a DataLoader with a collate_fn."
            ) from error


class NestSamples:
    """Samples held in the tensors of any nest, which share their first dimension.

    Args:
        leaves: The tensors, each with shape ``(N, *)``.
        spec: The nest's structure.
    """

    def __init__(self, leaves: Sequence[Tensor], spec: TreeSpec) -> None:
        self.leaves = leaves
        self.spec = spec

    def __len__(self) -> int:
        return len(self.leaves[0])

    def batch(self, indices: Tensor) -> Any:
        """Picks the rows ``indices`` (shape ``(n,)``) out of every tensor."""
        return tree_unflatten([leaf[indices] for leaf in self.leaves], self.spec)


class ReadLoader(NamedTuple):
    """A loader's samples, its batch size where it has one, and where the samples come from."""

    samples: Samples
    batch_size: int | None
    provenance: dict[str, str]


def read_loader(name: str, loader: Any, max_samples: int) -> ReadLoader:
    """Takes the samples out of a loader.

    Args:
        name: What the caller knows the loader by.
        loader: A data loader, another iterable of batches, or samples already.
        max_samples: Most samples read from a stream.

    Raises:
        InputError: If it is not iterable, or its batches cannot be cut into samples.
    """
    if isinstance(loader, Samples):
        return ReadLoader(loader, None, {})
    if not isinstance(loader, Iterable):
        raise InputError(
            f"Parameter `{name}` should be a DataLoader or another iterable of batches. Found "
            f"{type(loader).__name__}. Remedy: torch.utils.data.DataLoader(dataset, batch_size=8)."
        )
    # Without a batch sampler the items of the data set are taken for ready batches.
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return _read_batches(name, loader, max_samples)
    size = getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(loader.dataset, IterableDataset):
        rows = list(islice(loader.dataset, max_samples))
        return ReadLoader(CollatedSamples(rows, loader.collate_fn), size, _stream(len(rows)))
    keys = _drawn(loader, max_samples)
    return ReadLoader(CollatedSamples(loader.dataset, loader.collate_fn, keys), size, {})


def in_memory(dataset: Any, max_samples: int) -> Any:
    """A data set that can be indexed: itself, or the start of a stream as a list."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return dataset
    if not isinstance(dataset, Iterable):
        raise InputError(
            "A data set should have __getitem__ and __len__, or be iterable. Found "
            f"{type(dataset).__name__}. Remedy: a datasets.Dataset, or a list of mappings."
        )
    return list(islice(dataset, max_samples))


def _drawn(loader: DataLoader[Any], max_samples: int) -> list[Any] | None:
    """Samples that the loader's sampler draws in one epoch; None: every sample once."""
    batches: Any = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else None
    # Each rank of a distributed sampler has a part, and a study shares batches itself.
    uniform = isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler))
    source = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
    if uniform and source is loader.dataset:
        return None
    most = max(max_samples, len(loader.dataset))  # type: ignore[arg-type]
    # One fixed seed: every process and every resumed run has the same samples.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = chain.from_iterable(islice(batches, most)) if sampler is None else sampler
        return list(islice(drawn, most))


def _read_batches(name: str, loader: Iterable[Any], max_samples: int) -> ReadLoader:
    columns: list[list[Tensor]] = []
    sizes: list[int] = []
    spec = None
    # Each holds a sample, or the stream might go on for ever without any.
    for batch in islice(loader, max_samples):
        leaves, found = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        if spec is None:
            spec, columns = found, [[] for _ in leaves]
        sizes.append(_rows(name, leaves))
        if found != spec:
            raise _uneven(name, "batches of different structure")
        for column, leaf in zip(columns, leaves, strict=True):
            # A worker's tensor holds a file open for as long as it lives.
            column.append(leaf.clone())
        if sum(sizes) >= max_samples:
            break
    if spec is None:
        raise InputError(
            f"Parameter `{name}` should yield at least one batch. Found none. "
            "Remedy: check where it reads its data from."
        )
    try:
        tensors = [torch.cat(column)[:max_samples] for column in columns]
    except RuntimeError as error:
        raise _uneven(name, "samples of different shapes") from error
    return ReadLoader(NestSamples(tensors, spec), sizes[0], _stream(len(tensors[0])))


def _rows(name: str, leaves: list[Any]) -> int:
    tensors = all(isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves)
    sizes = {len(leaf) for leaf in leaves} if tensors else set()
    if len(sizes) != 1:
        kinds = ", ".join(
            str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__
            for leaf in leaves
        )
        raise _uneven(name, kinds or "no tensor")
    return sizes.pop()


def _uneven(name: str, found: str) -> InputError:
    return InputError(
        f"Ready batches of `{name}` should be tensors with one row for each sample, of one shape. "
        f"Found {found}. Remedy: a DataLoader with a map-style data set and its collate_fn, or "
        "samples padded to one length."
    )


def _stream(count: int) -> dict[str, str]:
    return {"train": f"the first {count} samples of a stream"}
