"""The task: every field is checked when it is made."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import steadygrad
from steadygrad._checks import InputError
from steadygrad.tasks import Task, TensorSamples
from tests.unit.tasks.tiny import TASK

OPTIONAL = {
    "lr_rule": "sqrt",
    "evaluate": None,
    "samples_per_second": None,
    "provenance": {},
    "micro_batch_size": None,
    "tokens_per_sample": None,
    "optimizer_takes": "parameters",
    "warmup_samples": 0,
    "lr_decay": "none",
    "loader_workers": 0,
    "start": None,
}


def test_defaults():
    assert steadygrad.Task is Task
    assert {name: getattr(TASK, name) for name in OPTIONAL} == OPTIONAL
    assert [field.name for field in fields(Task)][-len(OPTIONAL) :] == [*OPTIONAL]


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("name", 7, "`name`"),
        ("sample", None, "`sample`"),
        ("train", torch.ones(10, 3), "`train`.*Tensor"),
        ("train", TensorSamples(torch.ones(0, 3)), r"`len\(train\)`"),
        ("valid", TensorSamples(torch.ones(0, 3)), r"`len\(valid\)`"),
        ("lr", 0.0, r"`lr`.*\(0, inf\)"),
        ("lr", "0.1", "`lr`"),
        ("batch_size", 0, "`batch_size`"),
        ("batch_size", 2.0, "`batch_size`"),
        ("batch_size", 11, "`batch_size`.*10"),
        ("lr_rule", "squrt", "`lr_rule`"),
        ("samples_per_second", 0, "`samples_per_second`"),
        ("micro_batch_size", 0, "`micro_batch_size`"),
        ("tokens_per_sample", 0, "`tokens_per_sample`"),
        ("optimizer_takes", "params", "`optimizer_takes`"),
        ("warmup_samples", -1, "`warmup_samples`.*at least 0"),
        ("lr_decay", "cosin", "`lr_decay`"),
        ("loader_workers", -1, "`loader_workers`.*at least 0"),
        ("start", 3, "Task.start"),
        ("provenance", {"files": 3}, "`provenance`"),
        ("provenance", "web", "`provenance`"),
    ],
)
def test_a_bad_field_is_refused_by_name(field, value, found):
    with pytest.raises(InputError, match=found):
        replace(TASK, **{field: value})


def test_the_batch_may_be_all_of_the_data():
    assert replace(TASK, batch_size=10).batch_size == 10


def test_the_optimizer_factory_gets_what_it_asks_for():
    model, seen = nn.Linear(3, 2), []

    def make(first, lr):
        seen.append(first)
        return torch.optim.SGD(model.parameters(), lr=lr)

    for takes in ("parameters", "named_parameters", "model"):
        task = replace(TASK, make_optimizer=make, optimizer_takes=takes)
        assert task.optimizer(model, 0.25).param_groups[0]["lr"] == 0.25
    # Lists: groups are commonly made by two comprehensions, and an iterator is empty at the second.
    parameters, named, whole = seen
    assert [type(parameters), type(named)] == [list, list]
    assert [*map(id, parameters)] == [id(model.weight), id(model.bias)]
    assert [(name, id(p)) for name, p in named] == [
        ("weight", id(model.weight)),
        ("bias", id(model.bias)),
    ]
    assert whole is model


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
