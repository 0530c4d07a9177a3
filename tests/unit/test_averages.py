"""`MovingAverage` against its definition, and as a module."""

import math

import pytest
import torch
from torch import nn

from steadygrad.averages import MovingAverage


def test_exact_from_the_first_value_and_by_definition_after():
    average = MovingAverage(0.1)
    assert average.value().isnan()
    values = [3.0, -1.0, 10.0, 0.5]
    for i, value in enumerate(values):
        average.update(torch.tensor(value))
        # What is left out changes nothing, even if it is NaN.
        average.update(torch.tensor(math.nan), where=torch.tensor(False))
        weights = [0.9 ** (i - j) for j in range(i + 1)]
        expected = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert average.value().item() == pytest.approx(expected, rel=1e-14)


def test_state_goes_on_in_its_own_type():
    first, second = MovingAverage(0.3), MovingAverage(0.3)
    first.update(torch.tensor(1.0))
    second.load_state_dict(first.state_dict())
    for average in (first, second):
        average.update(torch.tensor(5.0))
    assert torch.equal(first.value(), second.value())
    assert second.total.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_model_keeps_its_averages(dtype):
    inside = nn.ModuleList([MovingAverage(0.001)])
    (average,) = inside
    for value in (1.0, 1e6, 3.0):
        average.update(torch.tensor(value))
    before = average.value()
    inside.to(dtype)
    assert average.total.dtype == average.mass.dtype == torch.float64
    assert torch.equal(average.value(), before)
    inside.to("meta", dtype)
    assert (average.total.device.type, average.total.dtype) == ("meta", torch.float64)
