"""Steps of trainers: micro-batches and their rows, and a watch that is asked once a step."""

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from steadygrad._checks import InputError, check_count, check_type
from steadygrad.noise.schedule import BatchSizeSchedule
from steadygrad.watch import Finding, GradientWatch


def rows_of(batch: Any) -> int:
    """Rows of the first tensor of a micro-batch, a nest of mappings and sequences."""
    # A tokenizer's BatchEncoding is a mapping that torch's pytree does not know.
    leaves = tree_leaves({**batch} if isinstance(batch, Mapping) else batch)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if first is None:
        raise InputError(
            f"Expected a micro-batch with a tensor. Found a {type(batch).__name__}. Remedy: pass "
            "`samples`, a function from the micro-batch to its number of samples."
        )
    return len(first)


class Window(NamedTuple):
    """One optimizer step's micro-batches.

    It lies in an ``epoch``, from 0, after ``start`` micro-batches. The trainer is set to accumulate
    ``factor`` micro-batches, and gets ``length`` of them: fewer at an epoch's end.
    """

    epoch: int
    start: int
    factor: int
    length: int


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
    check_type("schedule", schedule, BatchSizeSchedule, "BatchSizeSchedule([...])")
    check_count("batch_size", batch_size)
    for size in (stage["batch_size"] for stage in schedule.stages):
        if size % batch_size:
            raise InputError(
                f"Expected stages whose batch size is a multiple of {batch_size}, the samples of "
                f"one micro-batch on all devices. Found {size}. Remedy: round the stages, for "
                "example to powers of two."
            )
    epoch = start = seen = factor = 0
    while True:
        wanted = schedule.batch_size(seen) // batch_size
        factor = wanted if start % wanted == 0 else factor
        length = factor if epoch_batches is None else min(factor, epoch_batches - start)
        yield Window(epoch, start, factor, length)
        seen += length * batch_size
        start += length
        if start == epoch_batches:
            epoch, start = epoch + 1, 0


class StepWatch(GradientWatch):
    """Warns once for each run of consecutive steps with non-finite gradients, and keeps findings.

    The model is as it is called in training.
    """

    def __init__(self, model: nn.Module, findings: list[Finding]) -> None:
        super().__init__(model)
        self._findings, self._broken = findings, False

    def step(self) -> None:
        """Looks at the step's gradients, which waits for the device; every process must call it."""
        broken = not math.isfinite(math.hypot(*self.norms().values()))
        finding = self.report() if broken and not self._broken else None
        self._broken = broken
        if finding is not None:
            self._findings.append(finding)
            warnings.warn(str(finding), stacklevel=2)
