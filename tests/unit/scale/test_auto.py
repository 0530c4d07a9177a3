"""The rule by which scales move, and scales that follow measured exponents, from any start."""

import math

import pytest
import torch

from steadygrad.scale import AutoScale, LayerwiseGradScaler
from steadygrad.scale.equations import BLIND_STEP, LOWEST, exponent_histogram, followed_shift
from tests.reference.layerwise import histogram
from tests.unit.scale.training import Model, Shrink, take_step


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_counts_are_frexps(dtype):
    """On Python's floats, and after what the type makes of them."""
    draw = torch.Generator().manual_seed(0)
    spread = torch.randint(-40, 30, (400,), generator=draw)
    edges = [0.0, -0.0, 1.0, -2.0, 2.0**-149, 2.0**-126, 2.0**127, 65504.0, 65520.0]
    drawn = torch.ldexp(torch.randn(400, generator=draw), spread)
    x = torch.cat([drawn, torch.tensor([*edges, math.inf, -math.inf, math.nan])]).to(dtype)
    exponents = [-math.inf, *range(LOWEST, 128), math.inf]
    for some in (x, x.reshape(4, -1), x[4:5].squeeze(), torch.empty(0, 3)):
        found = zip(exponents, exponent_histogram(some).tolist(), strict=True)
        expected = histogram(some.flatten().double().tolist())
        assert {e: n for e, n in found if n} == expected


# float16 is normal from -14 on, and infinite at 16; with a headroom of 4 the largest goes to 11.
SHIFTS = {
    "fits": ([-5, 0, 5], {}, 0),
    "starved": ([-20, -18, -3], {}, 14),
    "no more starved than accepted": ([-20] + [0] * 30, {}, 0),
    "starved at the lowest exponent": ([LOWEST], {}, 11 - LOWEST),
    "starved, but there is hardly room": ([-20, -18, 10], {}, 0),
    "a little into the headroom: slack": ([0, 12], {}, 0),
    "into the headroom": ([0, 13], {}, -2),
    "far too large": ([0, 40], {}, -29),
    "infinite is at least 16": ([0, 3], {"infinite": 1}, -5),
    "infinite, and larger seen": ([0, 20], {"infinite": 1}, -9),
    "zeros alone": ([], {"zeros": 7}, BLIND_STEP),
    "nothing": ([], {}, 0),
    # The bound is on the share of those that are not zero.
    "a fifth, too many": ([-20] * 2 + [0] * 8, {"zeros": 100, "underflow": 0.19}, 11),
    "a fifth, accepted": ([-20] * 2 + [0] * 8, {"zeros": 100, "underflow": 0.21}, 0),
}


@pytest.mark.parametrize("case", SHIFTS)
def test_follows_what_was_measured(case):
    def shift_of(exponents, zeros=0, infinite=0, underflow=0.1):
        x = [2.0**e for e in exponents] + [0.0] * zeros + [torch.inf] * infinite
        return followed_shift(exponent_histogram(torch.tensor(x))[None], underflow, 4).item()

    exponents, options, expected = SHIFTS[case]
    assert shift_of(exponents, **options) == expected


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
    # Step 0 is a multiple of every number.
    for options in ({"steps": 3, "warmup": 2}, {"steps": 1, "warmup": 0}):
        model, optimizer, scaler = run(1.0, every=10, **options)
        held = scaler.get_scales()
        assert held["0"] > 1.0
        take_step(optimizer, scaler, loss_of(model))
        assert scaler.get_scales() == held


def test_keeps_to_its_bounds():
    model = torch.nn.Sequential(Shrink(8, 8), Shrink(8, 8)).half()
    scaler = LayerwiseGradScaler(model, "auto", max_scale=2.0**5, min_scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(5):
        take_step(optimizer, scaler, loss_of(model) * 2.0**-30)
    assert max(scaler.get_scales().values()) == 2.0**5
    assert min(scaler.get_scales().values()) >= 1.0


def moved(*exponents, fixed=(), nonfinite=()):
    """Base-2 logarithms of the scales of the loss, ``a``, ``b`` and ``b.1`` within it.

    Of each layer's gradients a value of this exponent was seen; None: the layer has none.
    """
    table = LayerwiseGradScaler(Model(), AutoScale(layers=("a", "b", "b.1")))._table
    table.fix(fixed)
    seen = [torch.tensor([] if e is None else [2.0**e]) for e in exponents]
    counts = torch.stack([exponent_histogram(values) for values in seen])
    flags = torch.tensor([i in nonfinite for i in range(4)])
    table.update(flags, counts, AutoScale())
    return table.scales.log2().tolist()


def test_shifts_of_totals_become_shifts_of_own_scales():
    # What is subnormal moves to 2**11; 2**-10 and 1 may stay.
    assert moved(0, -20, 0, -19) == [0, 31, 0, 30]
    assert moved(0, 0, -20, -10) == [0, 0, 31, -31]
    assert moved(-20, 0, 0, -19) == [31, -31, -31, 30]
    # What is counted in a fixed layer moves the one around it.
    assert moved(None, 0, -20, -19, fixed=[2]) == [31, -31, 0, -1]
    assert moved(0, 0, -20, -19, fixed=[3]) == [0, 0, 30, 0]
    # A flag counts where the measurement says nothing.
    assert moved(None, None, None, None, nonfinite=[1]) == [0, -1, 0, 0]
