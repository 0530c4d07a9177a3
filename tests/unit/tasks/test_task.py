"""The task: every field is checked when it is made."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import nn

import steadygrad
from steadygrad._checks import InputError
from steadygrad.tasks import Task, TensorSamples, describe
from tests.unit.tasks.tiny import TASK


def test_defaults():
    assert (TASK.lr_rule, TASK.evaluate, TASK.samples_per_second) == ("sqrt", None, None)
    assert TASK.provenance == {}
    assert replace(TASK).provenance is not replace(TASK, provenance={}).provenance


def test_a_task_is_frozen_and_public():
    assert steadygrad.Task is Task
    with pytest.raises(FrozenInstanceError):
        TASK.lr = 1.0


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("name", "", "`name`.*non-empty.*Remedy"),
        ("sample", 3, "`sample`.*non-empty"),
        ("make_model", nn.Linear(1, 1).state_dict(), "`make_model` should be callable"),
        ("make_optimizer", "adam", "`make_optimizer` should be callable. Found str"),
        ("per_sample_loss", torch.ones(2), "`per_sample_loss` should be callable. Found Tensor"),
        ("evaluate", 0.5, "`evaluate` should be callable. Found float"),
        ("train", torch.ones(10, 3), "`train`.*Found Tensor.*TensorSamples"),
        ("train", TensorSamples(torch.ones(0, 3)), "`train`.*empty data set.*Remedy"),
        ("valid", TensorSamples(torch.ones(0, 3)), "`valid`.*empty data set.*Remedy"),
        ("lr", 0.0, r"`lr`.*\(0, inf\).*0.0.*Remedy: more than 0"),
        ("lr", float("nan"), "`lr`.*nan"),
        ("lr", "0.1", "`lr`"),
        ("batch_size", 0, "`batch_size`.*at least 1"),
        ("batch_size", 2.0, "`batch_size`.*integer"),
        ("batch_size", 11, "len.train. = 10.*batch is larger than the data.*Remedy"),
        ("lr_rule", "squrt", "`lr_rule`.*Remedy: did you mean 'sqrt'"),
        ("samples_per_second", 0, "`samples_per_second`"),
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


def test_describe_counts_what_trains_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad = False
    # One shared 3 x 3 weight, two biases of 3, one 2 x 3 weight; the frozen bias is left out.
    assert describe(replace(TASK, provenance={"corpus": "ones"}), model) == {
        "name": "tiny",
        "sample": "row",
        "parameters": 9 + 3 + 3 + 6,
        "train_size": 10,
        "valid_size": 4,
        "provenance": {"corpus": "ones"},
    }
