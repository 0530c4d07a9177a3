"""Data that a task draws its batches from, in this process or in workers ahead of it."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import torch
import torch.utils.data as loading
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from steadygrad._checks import InputError, check_count
from steadygrad.tasks.check import TaskError


@runtime_checkable
class Samples(Protocol):
    """A fixed set of samples; the caller's indices decide on the order."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> Any:
        """A nest of tensors with one row for each of ``indices``: int64 with shape ``(n,)``."""


class TensorSamples:
    """Samples held in tensors that share their first dimension.

    Args:
        data: One tensor, or a nest (tuples, lists, mappings) of tensors, each with shape
            ``(N, *)``. Batches have the same structure.

    Raises:
        InputError: If there is no tensor, or their first dimensions differ.
    """

    def __init__(self, data: Tensor | Sequence[Any] | Mapping[str, Any]) -> None:
        leaves, self._spec = tree_flatten(dict(data) if isinstance(data, Mapping) else data)
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in leaves]
        if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
            found = [str(s or type(x).__name__) for s, x in zip(shapes, leaves, strict=True)]
            raise InputError(
                "Parameter `data` should hold tensors with one row for each sample. Found "
                f"{', '.join(found) or 'no tensor'}. Remedy: torch.as_tensor of each."
            )
        self._tensors: list[Tensor] = leaves

    def __len__(self) -> int:
        return len(self._tensors[0])

    def batch(self, indices: Tensor) -> Any:
        """Picks the rows ``indices`` (shape ``(n,)``) out of every tensor."""
        return tree_unflatten([tensor[indices] for tensor in self._tensors], self._spec)


def to_device(batch: Any, model: nn.Module) -> Any:
    """Moves a batch to the device of a model, and narrows no number on the way.

    Args:
        batch: A nest (tuples, named tuples, lists, mappings) of tensors; other leaves are kept.
            Objects with a method ``to``, such as a ``BatchEncoding``, move themselves.
        model: Its first parameter says the device. A floating-point tensor is widened to that
            parameter's dtype where this has more bits. Without parameters nothing moves.
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


@dataclass(frozen=True, eq=False)
class CollatedSamples:
    """Samples of a map-style data set, of which some ``keys`` are asked for, in batches."""

    dataset: Any
    keys: Sequence[Any]
    collate: Callable[[list[Any]], Any]

    def __len__(self) -> int:
        return len(self.keys)

    def batch(self, indices: Tensor) -> Any:
        """Collates the samples ``indices``, with shape ``(n,)``."""
        keys = [self.keys[i] for i in indices.tolist()]
        many = getattr(self.dataset, "__getitems__", None)
        return self.collate(many(keys) if many else [self.dataset[key] for key in keys])


def read_loader(name: str, loader: Any, max_samples: int) -> tuple[Samples, dict[str, Any]]:
    """The samples of a loader, and further fields of a task that is trained as it says.

    Of a stream ``max_samples`` are read. ``name`` is the argument's, for errors.
    """
    if isinstance(loader, Samples):
        return loader, {"batch_size": None}
    if not isinstance(loader, loading.DataLoader) or loader.batch_sampler is None:
        raise InputError(
            f"Parameter `{name}` should be a DataLoader that makes batches of single samples. "
            f"Found {type(loader).__name__} of ready ones. Remedy: DataLoader(rows, batch_size=8), "
            "with rows such as [row for batch in loader for row in zip(*batch)]."
        )
    rows: Any = loader.dataset
    size = getattr(loader.batch_sampler, "batch_size", None)
    fields = {"batch_size": size, "loader_workers": loader.num_workers}
    if not isinstance(rows, loading.IterableDataset):
        return CollatedSamples(rows, _drawn_keys(loader, max_samples), loader.collate_fn), fields
    rows = list(islice(rows, max_samples))
    fields["provenance"] = {"train": f"the first {len(rows)} samples of a stream"}
    return CollatedSamples(rows, range(len(rows)), loader.collate_fn), fields


def _drawn_keys(loader: loading.DataLoader[Any], max_samples: int) -> Sequence[Any]:
    """Samples that the loader's sampler draws in one epoch."""
    batches: Any = loader.batch_sampler
    sampler = batches.sampler if type(batches) is loading.BatchSampler else None
    # Each rank of a distributed sampler has a part, and a study shares batches itself.
    kinds = (loading.SequentialSampler, loading.RandomSampler, loading.DistributedSampler)
    source = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
    every = range(len(loader.dataset))  # type: ignore[arg-type]
    if isinstance(sampler, kinds) and source is loader.dataset:
        return every
    most = max(max_samples, len(every))
    # One fixed seed: every process and every resumed run has the same samples.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = chain.from_iterable(islice(batches, most)) if sampler is None else sampler
        return list(islice(drawn, most))


def batches(
    samples: Samples, index_batches: Iterable[Tensor], device: torch.device, workers: int = 0
) -> Iterator[Any]:
    """Collects one batch after the other, in order, on the host.

    The batches and torch's random numbers are the same whatever the number of workers. Samples
    that draw random numbers themselves draw others in each worker.

    Args:
        samples: What the batches are made of; for workers they may have to be picklable.
        index_batches: The sample numbers of each batch, int64 with shape ``(n,)``.
        device: Where the batches will be moved: for CUDA the workers' batches are in pinned memory.
        workers: Processes that make batches ahead; 0: this one makes each as it is asked for.

    Raises:
        TaskError: If a worker cannot be started, raises, or ends.
    """
    check_count("workers", workers, low=0)
    if workers == 0:
        yield from (samples.batch(indices) for indices in index_batches)
        return
    # A loader draws its workers' seed: from a copy, so that training draws the same without them.
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    # A row is its own number, and the rows of a batch are collated into what they number.
    loader: loading.DataLoader[Any] = loading.DataLoader(
        range(len(samples)),  # type: ignore[arg-type]
        batch_sampler=(indices.tolist() for indices in index_batches),
        collate_fn=partial(_batch, samples),
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=generator,
    )
    try:
        ahead = iter(loader)
        # torch's handler raises the death of a worker wherever the program is; without it the next
        # batch does. Windows has none, and only the main thread handles any.
        if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield from ahead
    except Exception as error:
        # torch puts the worker's traceback into the message, and what it raised last.
        lines = str(error).strip().splitlines() or [""]
        raise TaskError(
            "The worker processes of Task.loader_workers should run without an error. Found "
            f"{type(error).__name__}: {lines[-1]}. Remedy: loader_workers = 0 shows the traceback; "
            "fewer where memory is short."
        ) from error


def _batch(samples: Samples, numbers: list[int]) -> Any:
    return samples.batch(torch.tensor(numbers))
