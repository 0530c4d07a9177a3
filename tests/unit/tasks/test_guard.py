"""A task's own errors: every kind but Ctrl-C becomes one readable line."""

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.tasks import TaskError, guarded, is_out_of_memory

CPU = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: "


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), Stop("enough\nof it")])
def test_what_a_task_raises_becomes_one_line(error):
    with pytest.raises(TaskError) as caught, guarded("Task.make_model"):
        raise error
    assert caught.value.__cause__ is error
    assert str(caught.value).startswith(
        f"Task.make_model should run without an error. Found {type(error).__name__}: "
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InputError("a line already")])
def test_ctrl_c_and_readable_lines_pass(error):
    with pytest.raises(type(error)) as caught, guarded("Task.make_model"):
        raise error
    assert caught.value is error


def test_a_generator_can_be_closed_inside():
    def numbers():
        with guarded("Task.train"):
            yield 1

    made = numbers()
    assert next(made) == 1
    made.close()


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
