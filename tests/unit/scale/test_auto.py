"""Scales that follow measured exponents: from any start, back to what is known to fit."""

import math

import pytest
import torch

from steadygrad.scale import AutoScale, LayerwiseGradScaler
from steadygrad.scale.equations import exponent_histogram
from tests.unit.scale.training import Model, take_step


class Shrink(torch.nn.Linear):
    """Its input's gradient is some 2**10 times smaller than its output's."""

    def forward(self, x):
        return super().forward(x) * 2.0**-10


def run(start, steps=40, dtype=torch.float16, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Shrink(8, 8) for _ in range(3))).to(dtype)
    auto = AutoScale(scale=start, **options)
    scaler = LayerwiseGradScaler(model, auto, init_scale=start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        take_step(optimizer, scaler, loss_of(model))
    return model, optimizer, scaler


def loss_of(model):
    return model(torch.ones(4, 8, dtype=model[0].weight.dtype)).float().sum()


@pytest.mark.parametrize("start", [2.0**-60, 1.0, 2.0**60])
def test_finds_scales_that_fit_from_any_start(start):
    model, _, scaler = run(start)
    found = scaler.measured
    exponents = torch.arange(-149, 128)
    seen = (found.activations + found.weights)[:, 1:-1]
    total = seen.sum(1)
    assert (found.activations + found.weights)[:, -1].eq(0).all()
    starved = torch.where(exponents < -14, seen, 0.0).sum(1) / total
    largest = torch.stack([exponents[row > 0].max() for row in seen])
    # Below the headroom, give or take the slack; and where too much is small, as high as that.
    assert (largest <= 12).all()
    assert ((starved <= 0.01) | (largest >= 10)).all()
    assert (starved < 0.1).all()
    for scale in scaler.get_scales().values():
        assert math.log2(scale).is_integer()
    # And the steps that it then takes are the true gradients.
    totals = found.scales
    assert totals[1] > totals[2] > totals[3]
    full, *_ = run(1.0, steps=1, dtype=torch.float32)
    for half, expected in zip(model.parameters(), full.parameters(), strict=True):
        error = (half.grad.float() - expected.grad).abs().max()
        # What is unscaled is rounded to float16 again: to its least number, 2**-24, at worst.
        assert error < max(2.0**-24, 0.006 * expected.grad.abs().max().item())


def test_measures_only_when_due():
    model, optimizer, scaler = run(1.0, steps=3, warmup=2, every=10)
    held = scaler.get_scales()
    assert held["0"] > 1.0
    take_step(optimizer, scaler, loss_of(model))
    assert scaler.get_scales() == held
    # Step 0 is a multiple of every number.
    model, optimizer, scaler = run(1.0, steps=1, warmup=0, every=10)
    assert scaler.measured is not None
    held = scaler.get_scales()
    take_step(optimizer, scaler, loss_of(model))
    assert scaler.get_scales() == held


def test_backs_off_at_once_where_an_infinity_arose():
    model, optimizer, scaler = run(1.0, steps=30, warmup=25, every=1000)
    before = scaler.get_scales()
    scaler.scale(loss_of(model)).backward()
    model[1].weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.culprits() == ["1"]
    assert scaler.get_scales() == before | {"1": before["1"] / 2}


def test_keeps_to_its_bounds():
    model = torch.nn.Sequential(Shrink(8, 8), Shrink(8, 8)).half()
    scaler = LayerwiseGradScaler(model, "auto", max_scale=2.0**5, min_scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(5):
        take_step(optimizer, scaler, loss_of(model) * 2.0**-30)
    assert max(scaler.get_scales().values()) == 2.0**5
    assert min(scaler.get_scales().values()) >= 1.0


def test_a_flag_counts_where_the_measurement_says_nothing():
    *_, scaler = run(1.0, steps=5)
    table, auto = scaler._table, AutoScale()
    before = table.scales.clone()
    nonfinite = torch.tensor([False, True, False, False])
    table.update(nonfinite, torch.zeros(4, table.counts.shape[1]), auto)
    assert torch.equal(table.scales, before * torch.tensor([1.0, 0.5, 1.0, 1.0]))


def moved(*exponents, fixed=()):
    """Base-2 logarithms of the scales of the loss, ``a``, ``b`` and ``b.1`` within it.

    Of each layer's gradients a value of this exponent was seen; None: the layer has none.
    """
    table = LayerwiseGradScaler(Model(), AutoScale(layers=("a", "b", "b.1")))._table
    table.fix(fixed)
    seen = [torch.tensor([] if e is None else [2.0**e]) for e in exponents]
    counts = torch.stack([exponent_histogram(values) for values in seen])
    table.update(torch.zeros(4) > 0, counts, AutoScale())
    return table.scales.log2().tolist()


def test_shifts_of_totals_become_shifts_of_own_scales():
    # What is subnormal moves to 2**11; 2**-10 and 1 may stay.
    assert moved(0, -20, 0, -19) == [0, 31, 0, 30]
    assert moved(0, 0, -20, -10) == [0, 0, 31, -31]
    assert moved(-20, 0, 0, -19) == [31, -31, -31, 30]


def test_what_is_counted_in_a_fixed_layer_moves_the_one_around_it():
    assert moved(None, 0, -20, -19, fixed=[2]) == [31, -31, 0, -1]
    assert moved(0, 0, -20, -19, fixed=[3]) == [0, 0, 30, 0]
