"""Number of micro-batches of every optimizer step, where a trainer's window follows a schedule."""

from collections.abc import Iterator
from typing import NamedTuple

from steadygrad._checks import InputError, check_count
from steadygrad.formulas.schedule import BatchSizeSchedule

__all__ = ["Window", "check_micro_batch", "check_parts", "windows"]


class Window(NamedTuple):
    """One optimizer step's micro-batches.

    Attributes:
        epoch: Epoch that it lies in, from 0.
        start: Micro-batches of that epoch before it.
        factor: Micro-batches that the trainer is set to accumulate.
        length: Micro-batches that it gets: fewer at an epoch's end.
    """

    epoch: int
    start: int
    factor: int
    length: int


def check_parts(parts: int, remedy: str) -> None:
    """Checks the number of micro-batches of a step, on all processes together.

    Raises:
        InputError: If there are fewer than two.
    """
    if parts < 2:
        raise InputError(
            f"Expected at least two micro-batches a step over all processes. Found {parts}. "
            f"Remedy: {remedy}."
        )


def check_micro_batch(schedule: BatchSizeSchedule, batch_size: int) -> None:
    """Checks that every stage is a whole number of micro-batches.

    Raises:
        InputError: If one is not.
    """
    check_count("batch_size", batch_size)
    for stage in schedule:
        if stage.batch_size % batch_size:
            raise InputError(
                f"Expected stages whose batch size is a multiple of {batch_size}, the samples of "
                f"one micro-batch on all devices. Found {stage.batch_size}. Remedy: round the "
                "stages, for example to powers of two."
            )


def windows(
    schedule: BatchSizeSchedule, batch_size: int, epoch_batches: int | None = None
) -> Iterator[Window]:
    """Yields the windows of a run, without end.

    Trainers end a window where the micro-batches of the epoch so far are a multiple of the factor,
    or the epoch ends. So a new factor waits for a window that begins at one of its multiples.

    Args:
        schedule: Batch sizes by samples seen.
        batch_size: Samples of one micro-batch, on all devices together.
        epoch_batches: Micro-batches of an epoch; None: there is one epoch without an end.

    Raises:
        InputError: If a stage's batch size is not an integer multiple of ``batch_size``.
    """
    check_micro_batch(schedule, batch_size)
    stages = [(s.from_samples, s.batch_size // batch_size) for s in schedule]
    epoch = start = seen = stage = 0
    factor = stages[0][1]
    while True:
        while stage + 1 < len(stages) and stages[stage + 1][0] <= seen:
            stage += 1
        wanted = stages[stage][1]
        factor = wanted if start % wanted == 0 else factor
        length = factor if epoch_batches is None else min(factor, epoch_batches - start)
        yield Window(epoch, start, factor, length)
        seen += length * batch_size
        start += length
        if start == epoch_batches:
            epoch, start = epoch + 1, 0
