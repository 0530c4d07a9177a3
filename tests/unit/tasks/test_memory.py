"""Errors for want of memory: recognised, and answered by smaller micro-batches."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from steadygrad.tasks import TaskError, TensorSamples, guarded, is_out_of_memory, mean_loss
from tests.unit.tasks import tiny
from tests.unit.tasks.tiny import squared

ROWS = torch.randn(11, 3, generator=torch.Generator().manual_seed(0))
CPU = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: "


def limited(most, error=torch.OutOfMemoryError, **changes):
    """A task that takes no more than ``most`` samples at once, and the sizes it was asked for."""
    sizes = []

    def losses(model, batch):
        sizes.append(len(batch))
        if len(batch) > most:
            raise error("CUDA out of memory. Tried to allocate 20.00 MiB")
        return squared(model, batch)

    return replace(
        tiny.TASK, **{"per_sample_loss": losses, "valid": TensorSamples(ROWS), **changes}
    ), sizes


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError(CPU + "not enough memory: you tried to allocate 9 bytes."), True),
        (RuntimeError(CPU + "can't allocate memory: you tried to allocate 9 bytes."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 3 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (ValueError("out of memory"), False),
        (OSError("No space left on device"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_allocators_own_words():
    """A petabyte: what torch says on this machine, whatever its wording."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_a_task_error_counts_by_its_cause():
    for cause, expected in ((MemoryError(), True), (KeyError("x"), False)):
        with pytest.raises(TaskError) as caught, guarded("Task.per_sample_loss"):
            raise cause
        assert is_out_of_memory(caught.value) is expected


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (11, [11]),
        (4, [11, 5, 2, 2, 2, 2, 2, 1]),
        (1, [11, 5, 2, *[1] * 11]),
    ],
)
def test_evaluation_halves_what_does_not_fit(most, expected):
    task, sizes = limited(most)
    model = nn.Linear(3, 2).double()
    # float64: the order of the summation is all that differs.
    assert mean_loss(task, model) == pytest.approx(
        squared(model, ROWS.double()).mean().item(), rel=1e-14
    )
    assert sizes == expected


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_a_sample_that_does_not_fit_is_one_line(error):
    task, sizes = limited(0, error)
    model = nn.Linear(3, 2)
    with pytest.raises(TaskError, match=r"one sample.*Found \w+Error: CUDA out.*Remedy") as caught:
        mean_loss(task, model)
    assert type(caught.value.__cause__) is error
    assert is_out_of_memory(caught.value)
    assert sizes == [11, 5, 2, 1]
    assert model.training


def test_other_errors_are_not_tried_again():
    task, sizes = limited(0, lambda text: RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        mean_loss(task, nn.Linear(3, 2))
    assert sizes == [11]
