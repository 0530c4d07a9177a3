"""Batches in a given order, made by this process or by others ahead of it."""

import pickle
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from steadygrad._checks import InputError, check_count
from steadygrad.tasks.guard import TaskError, reason
from steadygrad.tasks.samples import Samples

__all__ = ["batches"]


def batches(
    samples: Samples, index_batches: Iterable[Tensor], device: torch.device, workers: int = 0
) -> Iterator[Any]:
    """Collects one batch after the other, on the host.

    The batches and torch's random numbers are the same whatever the number of workers. Samples
    that draw random numbers themselves draw others in each worker.

    Args:
        samples: What the batches are made of. Where Python starts processes afresh (not by fork),
            workers need samples that can be pickled.
        index_batches: The sample numbers of each batch, int64 with shape ``(n,)``.
        device: Where the batches will be moved: for CUDA the workers' batches are in pinned memory.
        workers: Processes that make batches ahead; 0: this one makes each as it is asked for.

    Yields:
        The batches, in order.

    Raises:
        InputError: If the samples cannot be sent to a worker.
        TaskError: If the samples' own code raises in a worker.
    """
    check_count("workers", workers, low=0)
    if workers == 0:
        yield from (samples.batch(indices) for indices in index_batches)
        return
    try:
        for batch in _from_workers(samples, index_batches, device, workers):
            if isinstance(batch, _Failure):
                raise TaskError(
                    "Samples.batch should run without an error in a worker process. "
                    f"Found {batch.reason}. Remedy: loader_workers = 0 shows its traceback."
                )
            yield batch
    # torch's own, of a worker that was killed or ran out of shared memory or of files.
    except (RuntimeError, OSError, EOFError) as error:
        raise TaskError(
            "The worker processes of Task.loader_workers should live as long as the training. "
            f"Found {reason(error)}. Remedy: fewer loader_workers if memory is short, or 0."
        ) from error


def _from_workers(
    samples: Samples, index_batches: Iterable[Tensor], device: torch.device, workers: int
) -> Iterator[Any]:
    # A loader draws its workers' seed: from a copy, so that training draws the same without them.
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    loader: DataLoader[Any] = DataLoader(
        _InWorker(samples),
        batch_size=None,
        sampler=(indices.tolist() for indices in index_batches),
        collate_fn=_unchanged,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=generator,
    )
    try:
        return iter(loader)
    # What the several kinds of objects raise that cannot be pickled.
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            "Samples for worker processes should be picklable: classes and functions of a module, "
            f"no lambdas and open files. Found {reason(error)}. Remedy: loader_workers = 0."
        ) from error
    finally:
        # torch's handler raises the death of a worker wherever the program is; without it the next
        # batch does. Windows has none, and only the main thread handles any.
        if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@dataclass
class _Failure:
    reason: str


class _InWorker(Dataset[Any]):
    """Batches by their sample numbers; an error is sent back as a value, in one line."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, numbers: list[int]) -> Any:
        try:
            return self.samples.batch(torch.tensor(numbers))
        except Exception as error:
            return _Failure(reason(error))


def _unchanged(batch: Any) -> Any:
    return batch
