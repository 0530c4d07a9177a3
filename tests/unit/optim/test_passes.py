"""Sums that neither round nor overflow in 16 bits, masters that follow their weights, and costs."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad import numerics
from steadygrad.numerics import exact, inner_products, square_sums
from steadygrad.optim import LAMB, LANS, ScaledAdam
from steadygrad.optim.passes import sync_masters

narrow = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_sums_in_every_layout():
    a, b = draw(6, 4), draw(24).view(4, 6).t()
    pairs = [(a, b), (b, b.contiguous()), (a[:, ::2], b[:, ::2]), (draw(), draw()), (draw(0),) * 2]
    found = inner_products(*zip(*pairs, strict=True), torch.float64)
    expected = torch.stack([(x * y).sum() for x, y in pairs])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)
    expected = torch.stack([y.square().sum() for _, y in pairs])
    torch.testing.assert_close(square_sums([y for _, y in pairs]), expected, rtol=1e-14, atol=0)
    mixed = inner_products([a], [b.half()], torch.float64)
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(mixed[0], (a * b.half().double()).sum(), rtol=1e-13, atol=0)


@narrow
def test_sixteen_bits_neither_overflow_nor_round_the_sum(dtype):
    # 4096 squares of 256: their sum is past float16's range, and bfloat16 stops at 256 ones.
    assert square_sums([torch.full((4096,), 256.0, dtype=dtype)]).tolist() == [4096 * 256.0**2]
    ones = torch.ones(4099, dtype=dtype)
    assert square_sums([ones]).item() == pytest.approx(4099, rel=1e-6)
    assert inner_products([ones], [ones], torch.float32).tolist() == [4099.0]


def test_the_widest_type_of_a_device_is_found_out(monkeypatch):
    monkeypatch.setattr(numerics, "_WIDEST", {})
    assert exact(torch.device("cpu")) is torch.float64
    monkeypatch.setattr(numerics, "_WIDEST", {})

    def fail(*shape, dtype, device):
        raise TypeError("this device has no float64")

    monkeypatch.setattr(torch, "zeros", fail)
    assert exact(torch.device("cpu")) is torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
def test_sums_of_many_elements_lose_no_digits(layout):
    """A CPU adds them up one after the other: 2^22 of them in one go are off by 2e-4."""
    draws = torch.Generator().manual_seed(3)
    shape = {"strided": (2**11, 2**12)}.get(layout, (2**11, 2**11))
    x, y = (torch.randn(shape, generator=draws) + 0.1 for _ in range(2))
    if layout == "transposed":
        x, y = x.t(), y.t()
    elif layout == "strided":
        x, y = x[:, ::2], y[:, ::2]
    exact = x.double().square().sum(), (x.double() * y.double()).sum()
    # Each piece is good to 3e-7, and their errors have either sign.
    assert square_sums([x, x[:2]])[0].item() == pytest.approx(exact[0].item(), rel=5e-7)
    # The zeros of a gradient that is None have no memory of their own, and get none.
    assert square_sums([torch.zeros(()).expand(2**20, 2**10)]).tolist() == [0]
    found = inner_products([x], [y], torch.float32).item()
    assert found == pytest.approx(exact[1].item(), rel=5e-6)  # cancels to a hundredth of its terms


@narrow
def test_a_master_keeps_its_digits_until_its_weight_is_written(dtype):
    master = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    weight, expected = master.to(dtype), master.clone()
    assert not torch.equal(master, weight.float())
    for place, value in (((0, 0), 0.0), ((1, 1), -7.0), ((2, 2), torch.inf), ((3, 3), torch.nan)):
        weight[place] = expected[place] = value
    sync_masters([weight], [master])
    torch.testing.assert_close(master, expected, rtol=0, atol=0, equal_nan=True)


class Outputs(TorchDispatchMode):
    """Counts the tensors that all operations return."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.count += len(found) if isinstance(found, (list, tuple)) else 1
        return found


@pytest.mark.parametrize("kind", [LAMB, LANS, ScaledAdam])
def test_a_step_without_multi_tensor_calls_is_linear(kind):
    """Its work grows with the number of parameters, and no faster."""
    counts = []
    for size in (20, 40, 80):
        params = [nn.Parameter(torch.ones(3)) for _ in range(size)]
        for p in params:
            p.grad = torch.ones(3)
        optimizer = kind(params, foreach=False)
        optimizer.step()  # the first one builds what later ones use
        with Outputs() as outputs:
            optimizer.step()
        counts.append(outputs.count)
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])
