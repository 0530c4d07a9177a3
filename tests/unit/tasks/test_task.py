"""The task: its fields, its optimizer and rate, its losses, and what its code raises."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.tasks import Task, TaskError, TensorSamples, guarded, is_out_of_memory, mean_loss
from steadygrad.tasks.check import check_losses

ROWS = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))


def squared(model, batch):
    return model(batch).square().mean(1)


TASK = Task(
    name="tiny",
    sample="row",
    make_model=lambda: nn.Linear(3, 2),
    train=TensorSamples(torch.ones(10, 3)),
    valid=TensorSamples(ROWS),
    per_sample_loss=squared,
    make_optimizer=torch.optim.SGD,
    lr=0.1,
    batch_size=2,
)

# Fields


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("name", 7, "`name`"),
        ("sample", None, "`sample`"),
        ("train", torch.ones(10, 3), "`train`"),
        ("train", TensorSamples(torch.ones(0, 3)), r"`len\(train\)`"),
        ("valid", TensorSamples(torch.ones(0, 3)), r"`len\(valid\)`"),
        ("lr", 0.0, "`lr`"),
        ("lr", "0.1", "`lr`"),
        ("batch_size", 0, "`batch_size`"),
        ("batch_size", 2.0, "`batch_size`"),
        ("batch_size", 11, "`batch_size`"),
        ("lr_rule", "squrt", "`lr_rule`"),
        ("samples_per_second", 0, "`samples_per_second`"),
        ("micro_batch_size", 0, "`micro_batch_size`"),
        ("tokens_per_sample", 0, "`tokens_per_sample`"),
        ("optimizer_takes", "params", "`optimizer_takes`"),
        ("warmup_samples", -1, "`warmup_samples`"),
        ("lr_decay", "cosin", "`lr_decay`"),
        ("loader_workers", -1, "`loader_workers`"),
        ("start", 3, "Task.start"),
        ("provenance", {"files": 3}, "`provenance`"),
        ("provenance", "web", "`provenance`"),
    ],
)
def test_a_bad_field_is_refused_by_name(field, value, found):
    with pytest.raises(InputError, match=found):
        replace(TASK, **{field: value})
    # A batch may be all of the data.
    assert replace(TASK, batch_size=10).batch_size == 10


def test_the_optimizer_factory_gets_what_it_asks_for():
    model = nn.Linear(3, 2)

    def given(takes):
        task = replace(TASK, make_optimizer=lambda *given: given, optimizer_takes=takes)
        return task.optimizer(model, 0.25)

    assert given("model") == (model, 0.25)
    # Lists: groups are commonly made by two comprehensions, and an iterator is empty at the second.
    assert given("parameters") == ([*model.parameters()], 0.25)
    assert given("named_parameters") == ([*model.named_parameters()], 0.25)


@pytest.mark.parametrize(
    ("warmup", "decay", "expected"),
    [
        # At 0, 50, 100, 350, 600, 1_100 and 2_000 of 1_100 samples.
        (0, "none", [1, 1, 1, 1, 1, 1, 1]),
        (100, "none", [0, 0.5, 1, 1, 1, 1, 1]),
        (100, "linear", [0, 0.5, 1, 0.75, 0.5, 0, 0]),
        (100, "cosine", [0, 0.5, 1, (1 + 0.5**0.5) / 2, 0.5, 0, 0]),
        (0, "linear", [1, 1 - 50 / 1100, 1 - 100 / 1100, 1 - 350 / 1100, 1 - 600 / 1100, 0, 0]),
        # A run that ends within its warm-up or with it.
        (2_200, "cosine", [s / 2_200 for s in (0, 50, 100, 350, 600, 1_100, 2_000)]),
        (1_100, "linear", [0, 50 / 1_100, 100 / 1_100, 350 / 1_100, 600 / 1_100, 1, 0]),
    ],
)
def test_the_learning_rate_factor(warmup, decay, expected):
    task = replace(TASK, warmup_samples=warmup, lr_decay=decay)
    found = [task.lr_factor(s, 1_100) for s in (0, 50, 100, 350, 600, 1_100, 2_000)]
    # Rounding of a cosine near zero.
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


# Losses


def losses(*values):
    return torch.tensor(values, requires_grad=True)


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (losses(1.0, 2.0).mean(), r"shape \(\): .* mean"),
        (losses(1.0), r"shape \(1,\): .* mean"),
        # A mean that was expanded is still one.
        (losses(1.0, 2.0).mean().expand(2), r"shape \(2,\): .* mean"),
        (losses(1.0, 2.0)[:, None], r"Found shape \(2, 1\)"),
        (losses(1.0, 2.0, 3.0), r"shape \(2,\)\. Found shape \(3,\)"),
        ({"loss": losses(1.0).mean()}, "dict"),
        (1.5, "float"),
        (torch.tensor([1, 2]), "torch.int64"),
        (torch.ones(2), "gradient"),
        (losses(1.0, float("nan")), "Found 1 "),
        (losses(float("inf"), float("-inf")), "Found 2 "),
    ],
)
def test_bad_losses_are_refused(bad, found):
    with pytest.raises(InputError, match=found):
        check_losses(bad, 2)


@pytest.mark.parametrize("size", [1, 3, 7, 128])
def test_the_mean_does_not_depend_on_the_micro_batch(size):
    model = nn.Linear(3, 2).double()
    # In float64 the order of the summation is all that differs.
    for samples, rows in ((None, ROWS), (TASK.train, torch.ones(10, 3))):
        expected = squared(model, rows.double()).mean().item()
        found = mean_loss(TASK, model, samples, micro_batch_size=size)
        assert found == pytest.approx(expected, rel=1e-14)


def test_evaluation_mode_and_no_gradients_then_everything_as_before():
    """In micro-batches of the task's size, unless another is asked for."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.Dropout(0.5))
    model[2].eval()
    seen, sizes = set(), []

    def watched(inner, batch):
        seen.add((torch.is_grad_enabled(), *(m.training for m in inner.modules())))
        sizes.append(len(batch))
        return squared(inner, batch)

    task = replace(TASK, per_sample_loss=watched, micro_batch_size=3)
    mean_loss(task, model)
    mean_loss(replace(task, micro_batch_size=None), model)
    mean_loss(task, model, micro_batch_size=5)
    assert sizes == [3, 3, 1, 7, 5, 2]
    assert seen == {(False,) * 5}
    mean = replace(TASK, per_sample_loss=lambda m, batch: squared(m, batch).mean())
    with pytest.raises(InputError, match="mean"):
        mean_loss(mean, model)
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert torch.is_grad_enabled()


# What a task's code raises


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
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected
    # A task's error counts by its cause.
    with pytest.raises(TaskError) as caught, guarded("Task.per_sample_loss"):
        raise error
    assert is_out_of_memory(caught.value) is expected
