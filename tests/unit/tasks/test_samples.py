"""Samples: tensors with one row for each sample, and batches moved to the model."""

from collections import namedtuple

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.tasks import Samples, TensorSamples, place

ROWS = torch.arange(12.0).view(6, 2)
LABELS = torch.arange(6)


def test_a_batch_has_the_structure_of_the_data():
    indices = torch.tensor([4, 0, 4])
    assert torch.equal(TensorSamples(ROWS).batch(indices), ROWS[[4, 0, 4]])
    x, y = TensorSamples((ROWS, LABELS)).batch(indices)
    assert torch.equal(x, ROWS[[4, 0, 4]])
    assert y.tolist() == [4, 0, 4]
    named = TensorSamples({"x": ROWS, "y": LABELS}).batch(indices)
    assert list(named) == ["x", "y"]
    assert named["y"].tolist() == [4, 0, 4]


def test_tensor_samples_are_samples():
    samples = TensorSamples([ROWS, LABELS])
    assert len(samples) == 6
    assert isinstance(samples, Samples)
    assert not isinstance([1, 2, 3], Samples)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ((ROWS, LABELS[:5]), r"data\[0\]: 6, data\[1\]: 5"),
        ((), "no tensor"),
        ({}, "no tensor"),
        (3, "Found int"),
        ({"x": [1.0, 2.0]}, r"`data\['x'\]`.*Found list"),
        (torch.tensor(1.0), "a 0-d tensor"),
    ],
)
def test_data_that_are_not_rows_are_refused(data, found):
    with pytest.raises(InputError, match=rf"{found}.*Remedy"):
        TensorSamples(data)


def test_place_casts_floats_only_and_keeps_the_nest():
    Pair = namedtuple("Pair", ["x", "y"])
    nest = {"pair": Pair(ROWS, LABELS), "more": [ROWS.half(), (LABELS.int(), "text")]}
    placed = place(nest, nn.Linear(2, 1).double())
    assert isinstance(placed["pair"], Pair)
    assert placed["pair"].x.dtype == placed["more"][0].dtype == torch.float64
    assert torch.equal(placed["pair"].x, ROWS.double())
    assert placed["pair"].y.dtype == torch.int64
    assert placed["more"][1][0].dtype == torch.int32
    assert placed["more"][1][1] == "text"
    assert type(placed["more"]) is list
    assert type(placed["more"][1]) is tuple


def test_place_follows_the_models_device():
    placed = place((ROWS, LABELS), nn.Linear(2, 1, device="meta"))
    assert [tensor.device.type for tensor in placed] == ["meta", "meta"]


def test_place_leaves_a_batch_alone_for_a_model_without_parameters():
    assert place(ROWS, nn.Identity()) is ROWS
