"""The task: every field is checked when it is made."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import nn

import steadygrad
from steadygrad._checks import InputError
from steadygrad.tasks import Task, TensorSamples
from tests.unit.tasks.tiny import TASK


def test_defaults():
    assert (TASK.lr_rule, TASK.evaluate, TASK.samples_per_second) == ("sqrt", None, None)
    assert (TASK.micro_batch_size, TASK.tokens_per_sample, TASK.loader_workers) == (None, None, 0)
    assert (TASK.optimizer_takes, TASK.warmup_samples, TASK.lr_decay) == ("parameters", 0, "none")
    assert (TASK.provenance, TASK.start) == ({}, None)
    assert replace(TASK).provenance is not replace(TASK, provenance={}).provenance


def test_a_task_is_frozen_and_public():
    assert steadygrad.Task is Task
    with pytest.raises(FrozenInstanceError):
        TASK.lr = 1.0


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("name", 7, "`name`.*of type str"),
        ("sample", None, "`sample`.*of type str"),
        ("train", torch.ones(10, 3), "`train`.*Found Tensor.*TensorSamples"),
        ("train", TensorSamples(torch.ones(0, 3)), r"`len\(train\)`.*Remedy"),
        ("valid", TensorSamples(torch.ones(0, 3)), r"`len\(valid\)`.*Remedy"),
        ("lr", 0.0, r"`lr`.*\(0, inf\).*0.0.*Remedy: more than 0"),
        ("lr", float("nan"), "`lr`.*nan"),
        ("lr", "0.1", "`lr`"),
        ("batch_size", 0, "`batch_size`.*at least 1"),
        ("batch_size", 2.0, "`batch_size`.*integer"),
        ("batch_size", 11, "`batch_size`.*10.*Remedy: 10 or less"),
        ("lr_rule", "squrt", "`lr_rule`.*Remedy: did you mean 'sqrt'"),
        ("samples_per_second", 0, "`samples_per_second`"),
        ("micro_batch_size", 0, "`micro_batch_size`.*at least 1.*Remedy: 1 or more"),
        ("micro_batch_size", 2.0, "`micro_batch_size`.*Remedy: 2, an int"),
        ("tokens_per_sample", 0, "`tokens_per_sample`.*at least 1"),
        ("optimizer_takes", "params", "`optimizer_takes`.*'params'.*Remedy: did you mean"),
        ("warmup_samples", -1, "`warmup_samples`.*at least 0.*Remedy: 0 or more"),
        ("lr_decay", "cosin", "`lr_decay`.*Remedy: did you mean 'cosine'"),
        ("loader_workers", -1, "`loader_workers`.*at least 0"),
        ("loader_workers", None, "`loader_workers`.*integer"),
        ("start", 3, "Task.start should be a file, or a folder.*Found 3.*Remedy"),
        ("provenance", {"files": 3}, "`provenance`.*Remedy"),
        ("provenance", "web", "`provenance`.*Remedy"),
    ],
)
def test_a_bad_field_is_refused_by_name(field, value, found):
    with pytest.raises(InputError, match=found) as caught:
        replace(TASK, **{field: value})
    assert "\n" not in str(caught.value)


def test_the_batch_may_be_all_of_the_data():
    assert replace(TASK, batch_size=10).batch_size == 10


def test_the_optimizer_factory_gets_what_it_asks_for():
    model, seen = nn.Linear(3, 2), []

    def make(first, lr):
        seen.append((first, lr))
        return torch.optim.SGD(model.parameters(), lr=lr)

    for takes in ("parameters", "named_parameters", "model"):
        task = replace(TASK, make_optimizer=make, optimizer_takes=takes)
        assert task.optimizer(model, 0.25).param_groups[0]["lr"] == 0.25
    (parameters, lr), (named, _), (whole, _) = seen
    assert [id(p) for p in parameters] == [id(model.weight), id(model.bias)]
    assert [(name, id(p)) for name, p in named] == [
        ("weight", id(model.weight)),
        ("bias", id(model.bias)),
    ]
    assert whole is model
    assert lr == 0.25


def test_named_parameters_can_be_gone_through_twice():
    """Groups are commonly made by two comprehensions; an iterator is empty at the second."""

    def by_name(named, lr):
        decayed = [p for name, p in named if name.endswith("weight")]
        rest = [p for name, p in named if not name.endswith("weight")]
        return torch.optim.AdamW(
            [{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=lr
        )

    task = replace(TASK, make_optimizer=by_name, optimizer_takes="named_parameters")
    sizes = [len(group["params"]) for group in task.optimizer(nn.Linear(3, 2), 0.1).param_groups]
    assert sizes == [1, 1]


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
    assert all(0 <= factor <= 1 for factor in found)
