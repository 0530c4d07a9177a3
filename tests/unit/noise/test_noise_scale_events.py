"""`NoiseScale` among what happens in training: loss scales, overflows, clipping, failures."""

import copy

import pytest
import torch
from torch import nn

from steadygrad.noise import NoiseScale
from tests.reference import noise_scale as reference
from tests.unit.noise.training_loop import COUNTS, last, losses, make, measure, per_sample


@pytest.mark.parametrize("source", ["microbatch", "accumulated", "per_example"])
def test_loss_scale_changes_nothing(source):
    model, x, y = make()
    plain, scaled = NoiseScale(model, source=source), NoiseScale(model, source=source)
    measure(plain, model, x, y, [5, 5])
    measure(scaled, model, x, y, [5, 5], scale=2.0**16)
    # Powers of two scale exactly.
    assert last(scaled) == last(plain)


def test_gradients_unscaled_before_the_measurement():
    model, x, y = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain, scaled = NoiseScale(model), NoiseScale(model, scaler=scaler)
    measure(plain, model, x, y, [5, 5])
    model.zero_grad()
    for a, b in zip(x.split(5), y.split(5), strict=True):
        with scaled.microbatch(5):
            scaler.scale(losses(model, a, b).mean() / 2).backward()
    scaler.unscale_(optimizer)
    scaled.step(grad_scale=1.0)
    assert last(scaled) == pytest.approx(last(plain), rel=1e-12)


def test_an_overflowed_step_is_left_out_and_counted():
    model, x, y = make()
    noise = NoiseScale(model)
    measure(noise, model, x, y)
    before = noise.estimate().as_dict()
    bad = x.clone()
    bad[0, 0] = torch.inf
    measure(noise, model, bad, y)
    # All but one step older.
    assert noise.estimate().as_dict() == {
        **before,
        "age": 1.0,
        "skipped": 1,
        "selected": pytest.approx(1 / 1.99),
    }
    assert noise.skipped.item() == 1
    assert before["measurements"] == 1


def run_out_of_memory(noise, loss):
    with noise.microbatch(10):
        loss.backward()
        raise MemoryError


@pytest.mark.parametrize("source", ["microbatch", "accumulated", "per_example"])
def test_a_failed_backward_spoils_only_its_step(source):
    model, x, y = make()
    noise = NoiseScale(model, source=source)
    measure(noise, model, x, y, [5, 5])
    before = last(noise)
    with pytest.raises(MemoryError):
        run_out_of_memory(noise, losses(model, x, y).mean())
    model.zero_grad()
    loss = losses(model, x, y).mean()
    with noise.microbatch(10):  # the usual second attempt after running out of memory
        loss.backward()
    noise.step()
    assert (last(noise), noise.skipped.item()) == (before, 1)
    measure(noise, model, x, y, [5, 5])
    assert last(noise) == pytest.approx(before)


def test_half_precision_gradients_are_measured_in_float32():
    model, x, y = make()
    half = copy.deepcopy(model).to(torch.float16)
    exact, rough = NoiseScale(model), NoiseScale(half)
    # Squares of these gradients overflow float16: their norms are far above 256.
    measure(exact, model, x * 1, y, [5, 5], scale=300.0)
    measure(rough, half, x.half(), y.half(), [5, 5], scale=300.0)
    # 2 %: float16 has 11 bits, and noise is a difference of squares.
    assert last(rough) == pytest.approx(last(exact), rel=0.02)


def test_clipping_after_the_measurement_changes_nothing():
    model, x, y = make()
    noise = NoiseScale(model)
    for _ in range(2):
        measure(noise, model, x, y)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    rows = per_sample(model, x, y)
    assert last(noise) == pytest.approx(reference.signal_and_noise(rows, COUNTS, [1.0] * 3))
