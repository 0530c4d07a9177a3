"""Samples out of data loaders, of map-style data sets and of streams."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from steadygrad._checks import InputError
from steadygrad.tasks.guard import reason
from steadygrad.tasks.samples import Samples, TensorSamples, rows_of

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
        except RuntimeError as error:
            # torch's words, by whichever function the tensors were to be stacked.
            if "equal size" not in str(error):
                raise
            raise InputError(
                f"Samples should have one shape where nothing pads them. Found {reason(error)}. "
                "Remedy: a DataLoader with a collate_fn that does; of Task.from_hf, tokenizer=, "
                "collator= or packed samples."
            ) from error


def read_loader(
    name: str, loader: Any, max_samples: int
) -> tuple[Samples, int | None, dict[str, str]]:
    """Takes the samples out of a loader.

    Args:
        name: What the caller knows the loader by.
        loader: A data loader, another iterable of batches, or samples already.
        max_samples: Most samples read from a stream.

    Returns:
        The samples, the loader's batch size where it has one, and where the samples come from.

    Raises:
        InputError: If its batches cannot be cut into samples.
    """
    if isinstance(loader, Samples):
        return loader, None, {}
    samples: Samples
    size: int | None
    # Without a batch sampler the items of the data set are taken for ready batches.
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        samples, size = _read_batches(name, loader, max_samples)
    else:
        size = getattr(loader.batch_sampler, "batch_size", None)
        if not isinstance(loader.dataset, IterableDataset):
            keys = _drawn(loader, max_samples)
            return CollatedSamples(loader.dataset, loader.collate_fn, keys), size, {}
        rows = list(islice(loader.dataset, max_samples))
        samples = CollatedSamples(rows, loader.collate_fn)
    return samples, size, {"train": f"the first {len(samples)} samples of a stream"}


def in_memory(dataset: Any, max_samples: int) -> Any:
    """A data set that can be indexed: itself, or the start of a stream as a list."""
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return dataset if is_indexed else list(islice(dataset, max_samples))


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


def _read_batches(name: str, loader: Iterable[Any], max_samples: int) -> tuple[Samples, int]:
    parts: list[list[Tensor]] = []
    specs: list[TreeSpec] = []
    count = 0
    # Each holds a sample, or the stream might go on for ever without any.
    for batch in islice(loader, max_samples):
        leaves, spec = rows_of(name, batch)
        # A worker's tensor holds a file open for as long as it lives.
        parts.append([leaf.clone() for leaf in leaves])
        specs.append(spec)
        count += len(leaves[0])
        if count >= max_samples:
            break
    try:
        if not parts or any(spec != specs[0] for spec in specs):
            raise ValueError("batches of different structure" if parts else "no batch")
        tensors = [torch.cat(column)[:max_samples] for column in zip(*parts, strict=True)]
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"Ready batches of `{name}` should hold samples of one structure and shape. Found "
            f"{reason(error)}. Remedy: a DataLoader with a map-style data set and its collate_fn, "
            "or samples padded to one length."
        ) from error
    return TensorSamples(tree_unflatten(tensors, specs[0])), len(parts[0][0])
