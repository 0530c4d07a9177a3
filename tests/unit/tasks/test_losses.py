"""Per-sample losses: one finite loss a sample, their mean over a data set; and a task's errors."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.tasks import TaskError, TensorSamples, guarded, is_out_of_memory, mean_loss
from steadygrad.tasks.check import check_losses
from tests.unit.tasks import tiny
from tests.unit.tasks.tiny import squared

ROWS = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
TASK = replace(tiny.TASK, valid=TensorSamples(ROWS))


def losses(*values):
    return torch.tensor(values, requires_grad=True)


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (losses(1.0, 2.0).mean(), r"shape \(\): .* mean.*Task.from_hf"),
        (losses(1.0), r"shape \(1,\): .* mean"),
        # A mean that was expanded is still one.
        (losses(1.0, 2.0).mean().expand(2), r"shape \(2,\): .* mean"),
        (losses(1.0, 2.0)[:, None], r"Found shape \(2, 1\)"),
        (losses(1.0, 2.0, 3.0), r"shape \(2,\)\. Found shape \(3,\)"),
        ({"loss": losses(1.0).mean()}, "dict.*Task.from_hf"),
        (1.5, "Found float"),
        (torch.tensor([1, 2]), "torch.int64"),
        (torch.ones(2), "gradient"),
        (losses(1.0, float("nan")), "Found 1 "),
        (losses(float("inf"), float("-inf")), "Found 2 "),
    ],
)
def test_bad_losses_are_refused(bad, found):
    with pytest.raises(InputError, match=found) as caught:
        check_losses(bad, 2)
    assert "\n" not in str(caught.value)


def test_good_losses_come_back_themselves():
    good = losses(1.0, 2.0)
    assert check_losses(good, 2) is good
    assert check_losses(losses(1.0), 1).shape == (1,)
    with torch.no_grad():
        assert check_losses(good.detach(), 2).tolist() == [1.0, 2.0]
    # A batch of one needs its dimension.
    with pytest.raises(InputError, match="mean"):
        check_losses(losses(1.0).mean(), 1)


@pytest.mark.parametrize("size", [1, 3, 7, 128])
def test_the_mean_does_not_depend_on_the_micro_batch(size):
    model = nn.Linear(3, 2).double()
    # In float64 the order of the summation is all that differs.
    for samples, rows in ((None, ROWS), (TASK.train, torch.ones(10, 3))):
        expected = squared(model, rows.double()).mean().item()
        found = mean_loss(TASK, model, samples, micro_batch_size=size)
        assert found == pytest.approx(expected, rel=1e-14)


def test_evaluation_mode_and_no_gradients_then_everything_as_before():
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.Dropout(0.5))
    model[2].eval()
    seen = []

    def watched(inner, batch):
        seen.append((torch.is_grad_enabled(), *(m.training for m in inner.modules())))
        return squared(inner, batch)

    first, second = (mean_loss(replace(TASK, per_sample_loss=watched), model) for _ in range(2))
    assert first == second
    assert set(seen) == {(False, False, False, False, False)}
    mean = replace(TASK, per_sample_loss=lambda m, batch: squared(m, batch).mean())
    with pytest.raises(InputError, match="mean"):
        mean_loss(mean, model)
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert torch.is_grad_enabled()


def test_a_diverged_model_has_a_mean_that_says_so():
    model = nn.Linear(3, 2)
    nn.init.constant_(model.bias, float("nan"))
    assert mean_loss(TASK, model) != mean_loss(TASK, model)


def test_the_tasks_micro_batch_is_the_default():
    sizes = []

    def watched(model, batch):
        sizes.append(len(batch))
        return squared(model, batch)

    task = replace(TASK, per_sample_loss=watched, micro_batch_size=3)
    mean_loss(task, nn.Linear(3, 2))
    mean_loss(replace(task, micro_batch_size=None), nn.Linear(3, 2))
    mean_loss(task, nn.Linear(3, 2), micro_batch_size=5)
    assert sizes == [3, 3, 1, 7, 5, 2]


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), Stop("enough\nof it")])
def test_what_a_task_raises_becomes_one_line(error):
    found = f"^Task.make_model .*{type(error).__name__}: "
    with pytest.raises(TaskError, match=found) as caught, guarded("Task.make_model"):
        raise error
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InputError("a line"), GeneratorExit()])
def test_ctrl_c_readable_lines_and_the_end_of_a_generator_pass(error):
    with pytest.raises(type(error)) as caught, guarded("Task.make_model"):
        raise error
    assert caught.value is error


CPU = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: "


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
    # A task's error counts by its cause.
    with pytest.raises(TaskError) as caught, guarded("Task.per_sample_loss"):
        raise error
    assert is_out_of_memory(caught.value) is expected


def test_the_allocators_own_words():
    """A petabyte: what torch says on this machine, whatever its wording."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
