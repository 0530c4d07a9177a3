"""Samples: tensors with one row for each sample, and batches moved to the model."""

from collections import UserDict, namedtuple

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.tasks import Samples, TensorSamples, to_device

ROWS = torch.arange(12.0).view(6, 2)
LABELS = torch.arange(6)


def test_a_batch_has_the_structure_of_the_data():
    indices = torch.tensor([4, 0, 4])
    assert torch.equal(TensorSamples(ROWS).batch(indices), ROWS[[4, 0, 4]])
    x, y = TensorSamples((ROWS, LABELS)).batch(indices)
    assert torch.equal(x, ROWS[[4, 0, 4]])
    assert y.tolist() == [4, 0, 4]
    samples = TensorSamples({"x": ROWS, "y": LABELS})
    named = samples.batch(indices)
    assert list(named) == ["x", "y"]
    assert named["y"].tolist() == [4, 0, 4]
    assert len(samples) == 6
    assert (isinstance(samples, Samples), isinstance([1, 2, 3], Samples)) == (True, False)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ((ROWS, LABELS[:5]), r"\(6, 2\), \(5,\)"),
        ((), "no tensor"),
        (3, "int"),
        ({"x": [1.0, 2.0]}, "float"),
        (torch.tensor(1.0), "Found Tensor"),
    ],
)
def test_data_that_are_not_rows_are_refused(data, found):
    with pytest.raises(InputError, match=f"`data`.*{found}"):
        TensorSamples(data)


def test_to_device_widens_floats_only_and_keeps_the_nest():
    Pair = namedtuple("Pair", ["x", "y"])
    nest = {"pair": Pair(ROWS, LABELS), "more": [ROWS.half(), (LABELS.int(), "text")]}
    moved = to_device(nest, nn.Linear(2, 1).double())
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].x.dtype == moved["more"][0].dtype == torch.float64
    assert torch.equal(moved["pair"].x, ROWS.double())
    assert moved["pair"].y.dtype == torch.int64
    half, (number, text) = moved["more"]
    assert (half.shape, number.dtype, text) == ((6, 2), torch.int32, "text")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_to_device_narrows_nothing(dtype):
    """1001 has ten bits: in bfloat16 the target would be 1000."""
    target = to_device({"target": torch.tensor([1001.0])}, nn.Linear(2, 1).to(dtype))["target"]
    assert target.dtype == torch.float32
    assert target.item() == 1001.0
    # Neither half type is wider than the other.
    other = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}[dtype]
    assert to_device(ROWS.to(other), nn.Linear(2, 1).to(dtype)).dtype == other


class Encoding(UserDict):
    """As ``transformers.BatchEncoding``: a mapping that moves itself and is returned."""

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def test_to_device_follows_the_models_device():
    model = nn.Linear(2, 1, device="meta")
    batch = Encoding(input_ids=LABELS)
    moved, plain, text = to_device((batch, UserDict(x=ROWS), "text"), model)
    assert moved is batch
    assert moved["input_ids"].device.type == plain["x"].device.type == "meta"
    assert text == "text"


def test_to_device_of_models_without_floats_and_without_parameters():
    model = nn.Module()
    model.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    assert to_device(ROWS, model).dtype == torch.float32
    assert to_device(ROWS, nn.Identity()) is ROWS
